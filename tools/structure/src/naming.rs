//! Files that name a thing.

use std::collections::BTreeSet;

use crate::source::Workspace;
use crate::tokens::plain;

/// Files whose identifiers or literals contain one of `names`, without regard to case and `_`.
///
/// Names of `upstream` that contain a name do not count: upstream chose them. A folder with one of the
/// names is a place of its own: its files count as one, by the folder's path.
pub fn files<'w>(workspace: &'w Workspace, names: &[&str], upstream: &[&str]) -> Vec<&'w str> {
    let names: Vec<String> = names.iter().map(|name| plain(name)).collect();
    let upstream: Vec<String> = upstream.iter().map(|name| plain(name)).collect();
    let upstream: Vec<&String> = upstream.iter().filter(|name| !names.contains(name)).collect();
    let is_named = |word: &str| names.iter().any(|name| word.contains(name));
    // Few words contain a name: only in those is it worth a search for upstream's names.
    let names_thing = |word: &String| {
        is_named(word)
            && is_named(&upstream.iter().fold(word.clone(), |word, name| word.replace(*name, " ")))
    };
    let named = workspace.files.iter().filter(|file| file.words.iter().any(names_thing));
    let places = named.map(|file| own_folder(&file.path, &names).unwrap_or(&file.path));
    places.collect::<BTreeSet<_>>().into_iter().collect()
}

/// The outermost folder of `path` that is called by one of `names`.
fn own_folder<'p>(path: &'p str, names: &[String]) -> Option<&'p str> {
    let (folders, _) = path.rsplit_once('/')?;
    let is_end = |at: &usize| {
        let last = folders[..*at].rsplit('/').next().unwrap_or_default();
        names.contains(&plain(last))
    };
    let ends = folders.match_indices('/').map(|(at, _)| at).chain([folders.len()]);
    ends.filter(is_end).map(|at| &path[..at]).next()
}
