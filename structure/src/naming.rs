//! Files that name a thing.

use crate::source::Workspace;
use crate::tokens::plain;

/// Files whose identifiers or literals contain one of `names`, without regard to case and `_`.
pub fn files<'w>(workspace: &'w Workspace, names: &[&str]) -> Vec<&'w str> {
    let names: Vec<String> = names.iter().map(|name| plain(name)).collect();
    let named = workspace
        .files
        .iter()
        .filter(|file| file.words.iter().any(|word| names.iter().any(|name| word.contains(name))));
    named.map(|file| file.path.as_str()).collect()
}
