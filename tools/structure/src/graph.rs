//! Imports between modules, and the cycles among siblings.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{Crate, Module};

/// How many `use` aliases a path may go through.
const MAX_ALIASES: usize = 12;

/// Sibling modules that import each other, directly or through one another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cycle {
    /// Their parent: the crate's folder, then module names, joined by `::`.
    pub parent: String,
    /// Their names.
    pub members: BTreeSet<String>,
    /// The imports that tie them: `file imports module`.
    pub imports: BTreeSet<String>,
}

/// The imports of a crate: (importing module, module that owns what is imported).
pub fn imports(of: &Crate) -> BTreeSet<(usize, usize)> {
    let mut edges = BTreeSet::new();
    for (from, module) in of.modules.iter().enumerate() {
        let used = module.aliases.values().chain(&module.globs);
        for path in used.chain(&module.paths) {
            let resolved = resolve(&of.modules, from, path, 0);
            edges.extend(resolved.filter(|&to| to != from).map(|to| (from, to)));
        }
    }
    edges
}

/// The module that owns what `path` names as seen from module `from`; `None` outside the crate.
fn resolve(modules: &[Module], from: usize, path: &[String], aliases: usize) -> Option<usize> {
    if aliases > MAX_ALIASES {
        return None;
    }
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "crate" => descend(modules, 0, rest, aliases),
        "self" => descend(modules, from, rest, aliases),
        "super" => {
            let mut at = modules[from].parent?;
            let mut rest = rest;
            while let Some(("super", after)) = rest.split_first().map(|(f, r)| (f.as_str(), r)) {
                (at, rest) = (modules[at].parent?, after);
            }
            descend(modules, at, rest, aliases)
        }
        _ => step(modules, from, path, aliases),
    }
}

/// [`resolve`] of a path inside module `at`: unknown names belong to `at`.
fn descend(modules: &[Module], at: usize, path: &[String], aliases: usize) -> Option<usize> {
    if path.is_empty() {
        return Some(at);
    }
    Some(step(modules, at, path, aliases).unwrap_or(at))
}

/// [`resolve`] of a path whose first segment is a name in the scope of module `at`.
fn step(modules: &[Module], at: usize, path: &[String], aliases: usize) -> Option<usize> {
    let module = &modules[at];
    let (first, rest) = path.split_first()?;
    if let Some(&child) = module.children.get(first) {
        return descend(modules, child, rest, aliases);
    }
    if module.items.contains(first) {
        return Some(at);
    }
    if let Some(target) = module.aliases.get(first) {
        let whole: Vec<String> = target.iter().chain(rest).cloned().collect();
        return resolve(modules, at, &whole, aliases + 1);
    }
    module.globs.iter().find_map(|glob| {
        let target = resolve(modules, at, glob, aliases + 1).filter(|&target| target != at)?;
        let known = &modules[target];
        let defines = known.items.contains(first)
            || known.children.contains_key(first)
            || known.aliases.contains_key(first);
        defines.then(|| descend(modules, target, path, aliases + 1)).flatten()
    })
}

/// Imports between the top modules of a crate, with the importing files.
pub fn top_edges(of: &Crate) -> BTreeMap<(String, String), BTreeSet<String>> {
    let mut edges: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for (from, to) in imports(of) {
        let (a, b) = (&of.modules[from], &of.modules[to]);
        if let (Some(first), Some(second)) = (a.path.first(), b.path.first())
            && first != second
        {
            edges.entry((first.clone(), second.clone())).or_default().insert(a.file.clone());
        }
    }
    edges
}

/// Every cycle among siblings of a crate.
pub fn cycles(of: &Crate) -> Vec<Cycle> {
    // For each parent: edges between siblings, with the imports that cause them.
    type Siblings = BTreeMap<(String, String), BTreeSet<String>>;
    let mut families: BTreeMap<Vec<String>, Siblings> = BTreeMap::new();
    for (from, to) in imports(of) {
        let (a, b) = (&of.modules[from], &of.modules[to]);
        let common = a.path.iter().zip(&b.path).take_while(|(x, y)| x == y).count();
        // A parent and its descendants are not siblings.
        if common == a.path.len() || common == b.path.len() {
            continue;
        }
        let pair = (a.path[common].clone(), b.path[common].clone());
        let family = families.entry(a.path[..common].to_vec()).or_default();
        let import = format!("{} imports {}", a.file, b.path.join("::"));
        family.entry(pair).or_default().insert(import);
    }
    let mut cycles = Vec::new();
    for (parent, edges) in &families {
        let names: BTreeSet<&String> = edges.keys().flat_map(|(a, b)| [a, b]).collect();
        let reach: BTreeMap<&String, BTreeSet<&String>> =
            names.iter().map(|&name| (name, reachable(edges.keys(), name))).collect();
        let mut done = BTreeSet::new();
        for &name in &names {
            let both = |other: &&String| reach[name].contains(other) && reach[other].contains(name);
            let members: BTreeSet<String> = names.iter().copied().filter(both).cloned().collect();
            if members.len() > 1 && done.insert(members.clone()) {
                let tied =
                    edges.iter().filter(|((a, b), _)| members.contains(a) && members.contains(b));
                let imports = tied.flat_map(|(_, imports)| imports.iter().cloned()).collect();
                let parent: Vec<&str> = [of.folder.as_str()]
                    .into_iter()
                    .chain(parent.iter().map(String::as_str))
                    .collect();
                cycles.push(Cycle { parent: parent.join("::"), members, imports });
            }
        }
    }
    cycles
}

fn reachable<'e>(
    edges: impl Iterator<Item = &'e (String, String)> + Clone,
    from: &'e String,
) -> BTreeSet<&'e String> {
    let mut seen = BTreeSet::new();
    let mut next = vec![from];
    while let Some(at) = next.pop() {
        for (_, to) in edges.clone().filter(|(a, _)| a == at) {
            if seen.insert(to) {
                next.push(to);
            }
        }
    }
    seen
}
