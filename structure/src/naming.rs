//! Files that name a thing.

use crate::source::Workspace;
use crate::tokens::plain;

/// Files whose identifiers or literals contain one of `names`, without regard to case and `_`.
///
/// Names of `upstream` that contain a name do not count: upstream chose them.
pub fn files<'w>(workspace: &'w Workspace, names: &[&str], upstream: &[&str]) -> Vec<&'w str> {
    let names: Vec<String> = names.iter().map(|name| plain(name)).collect();
    let upstream: Vec<String> = upstream.iter().map(|name| plain(name)).collect();
    let upstream: Vec<&String> = upstream.iter().filter(|name| !names.contains(name)).collect();
    let names_thing = |word: &String| {
        let own = upstream.iter().fold(word.clone(), |word, name| word.replace(*name, " "));
        names.iter().any(|name| own.contains(name))
    };
    let named = workspace.files.iter().filter(|file| file.words.iter().any(names_thing));
    named.map(|file| file.path.as_str()).collect()
}
