//! Location of the golden folder.

use std::{
    env,
    path::{Path, PathBuf},
};

use crate::{GoldenError, ROOT_VARIABLE, Result};

/// The folder that holds `manifest.json` and `data/`.
///
/// `MARLINSPIKE_GOLDEN` if set (and only there, so that a wrong value is an
/// error); otherwise this crate's source folder, if it still exists;
/// otherwise `golden/` in the current folder or the nearest folder above it.
///
/// # Errors
/// [`GoldenError::RootNotFound`] with every place searched.
pub fn find_root() -> Result<PathBuf> {
    let current = env::current_dir()
        .map_err(|source| GoldenError::Io { path: PathBuf::from("."), source })?;
    choose(
        env::var_os(ROOT_VARIABLE).map(PathBuf::from),
        Path::new(env!("CARGO_MANIFEST_DIR")),
        &current,
    )
}

fn choose(variable: Option<PathBuf>, source: &Path, current: &Path) -> Result<PathBuf> {
    let searched: Vec<PathBuf> = match variable {
        Some(path) => vec![path],
        None => std::iter::once(source.to_path_buf())
            .chain(current.ancestors().map(|folder| folder.join("golden")))
            .collect(),
    };
    match searched.iter().find(|folder| folder.join("manifest.json").is_file()) {
        Some(found) => Ok(found.clone()),
        None => Err(GoldenError::RootNotFound { searched }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = env!("CARGO_MANIFEST_DIR");

    #[test]
    fn variable_wins_and_is_not_papered_over() {
        let found =
            choose(Some(SOURCE.into()), Path::new("/nowhere"), Path::new("/nowhere")).unwrap();
        assert_eq!(found, Path::new(SOURCE));
        let error = choose(Some("/nowhere".into()), Path::new(SOURCE), Path::new(SOURCE));
        match error {
            Err(GoldenError::RootNotFound { searched }) => {
                assert_eq!(searched, [Path::new("/nowhere")]);
            }
            other => panic!("expected RootNotFound, found {other:?}"),
        }
    }

    #[test]
    fn searches_upwards_from_the_current_folder() {
        let deep = Path::new(SOURCE).join("data/cases");
        assert_eq!(
            choose(None, Path::new("/nowhere"), &deep).unwrap(),
            Path::new(SOURCE).parent().unwrap().join("golden")
        );
        assert!(matches!(
            choose(None, Path::new("/nowhere"), Path::new("/")),
            Err(GoldenError::RootNotFound { .. })
        ));
    }
}
