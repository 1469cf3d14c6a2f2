//! Short names of case files.

use std::path::{Component, Path};

/// Short names: each path without the folders that all paths share and without its extension.
pub(super) fn labels(paths: &[&Path]) -> Vec<String> {
    let folders = |p: &Path| -> Vec<_> {
        let parent = p.parent().unwrap_or(Path::new(""));
        parent.components().map(|c| c.as_os_str().to_owned()).collect()
    };
    let mut shared: Option<Vec<_>> = None;
    for path in paths {
        let own = folders(path);
        shared = Some(match shared {
            None => own,
            Some(s) => s.into_iter().zip(own).take_while(|(a, b)| a == b).map(|(a, _)| a).collect(),
        });
    }
    let skip = shared.unwrap_or_default().len();
    let label = |path: &&Path| {
        let rest: std::path::PathBuf = path.components().skip(skip).collect();
        let rest = if rest.extension().is_some_and(|e| e == "safetensors") {
            rest.with_extension("")
        } else {
            rest
        };
        // A path that is a root or ends in `..` is kept whole.
        match rest.components().next_back() {
            Some(Component::Normal(_)) => rest.display().to_string(),
            _ => path.display().to_string(),
        }
    };
    paths.iter().map(label).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_drop_what_all_share() {
        let of = |paths: &[&str]| labels(&paths.iter().map(Path::new).collect::<Vec<_>>());
        assert_eq!(of(&["/a/b/x.safetensors", "/a/b/c/y.safetensors"]), ["x", "c/y"]);
        assert_eq!(of(&["x.safetensors"]), ["x"]);
        assert_eq!(of(&["a/x.safetensors", "b/x.safetensors"]), ["a/x", "b/x"]);
        assert_eq!(of(&["a/x.safetensors", "/"]), ["a/x", "/"]);
        assert!(of(&[]).is_empty());
    }
}
