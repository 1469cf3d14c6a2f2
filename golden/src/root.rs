//! Location of the golden folder.

use std::{
    env,
    path::{Path, PathBuf},
};

use crate::{GoldenError, ROOT_VARIABLE, Result};

/// This crate's source folder. Released programs leave it out: it is a folder of the machine that
/// built them.
const SOURCE: Option<&str> = match option_env!("MARLINSPIKE_RELEASE") {
    Some(_) => None,
    None => Some(env!("CARGO_MANIFEST_DIR")),
};

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
    choose(env::var_os(ROOT_VARIABLE).map(PathBuf::from), SOURCE.map(Path::new), &current)
}

fn choose(variable: Option<PathBuf>, source: Option<&Path>, current: &Path) -> Result<PathBuf> {
    let searched: Vec<PathBuf> = match variable {
        Some(path) => vec![path],
        None => source
            .map(Path::to_path_buf)
            .into_iter()
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
        let nowhere = Path::new("/nowhere");
        let found = choose(Some(SOURCE.into()), Some(nowhere), nowhere).unwrap();
        assert_eq!(found, Path::new(SOURCE));
        let error = choose(Some("/nowhere".into()), Some(Path::new(SOURCE)), Path::new(SOURCE));
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
        // With and without a source folder.
        for source in [Some(Path::new("/nowhere")), None] {
            assert_eq!(
                choose(None, source, &deep).unwrap(),
                Path::new(SOURCE).parent().unwrap().join("golden")
            );
            assert!(matches!(
                choose(None, source, Path::new("/")),
                Err(GoldenError::RootNotFound { .. })
            ));
        }
    }
}
