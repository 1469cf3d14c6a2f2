//! Holds the product code to ARCHITECTURE.md's edges and to `limits.txt`.
//!
//! A failure lists every breach and every exception that is no longer needed. One test makes every
//! check: it parses all sources, which takes longer than the checks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::LazyLock;

use marlinspike_structure::rules::{self, Limits};
use marlinspike_structure::source::Workspace;
use marlinspike_structure::{graph, naming};

/// Maximum number of lines of a file.
const FILE_LINES: usize = 400;
/// Maximum number of lines of a function.
const FUNCTION_LINES: usize = 80;
/// Maximum number of parameters of a function, including its receiver.
const PARAMETERS: usize = 7;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the workspace's folder")
}

static WORKSPACE: LazyLock<Workspace> = LazyLock::new(|| {
    // The names of the Python package are upstream's.
    let skipped = ["tools/structure", "integrations/python"];
    Workspace::read(root(), &skipped).expect("the workspace's sources")
});

fn limits() -> Limits {
    let text =
        std::fs::read_to_string(root().join("tools/structure/limits.txt")).expect("limits.txt");
    rules::limits(&text).expect("limits.txt")
}

#[test]
fn the_product_keeps_its_structure() {
    let workspace = &*WORKSPACE;
    let limits = limits();
    let functions = || workspace.files.iter().flat_map(|f| &f.functions);
    let lines = functions().map(|f| (f.name.clone(), f.lines));
    let parameters = functions().map(|f| (f.name.clone(), f.parameters));
    let files = workspace.files.iter().map(|f| (f.path.clone(), f.lines));
    let breaches = [
        only_the_edges_of_architecture_md(workspace),
        no_cycles_between_siblings(workspace, &limits),
        over("file", FILE_LINES, files, &limits.files),
        over("function", FUNCTION_LINES, lines, &limits.functions),
        over("parameters", PARAMETERS, parameters, &limits.parameters),
        things_are_named_in_few_files(workspace, &limits),
    ]
    .concat();
    assert!(breaches.is_empty(), "{} breaches:\n{}", breaches.len(), breaches.join("\n"));
}

fn only_the_edges_of_architecture_md(workspace: &Workspace) -> Vec<String> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let allowed = rules::edges(&text).expect("its edges");
    let may = |from: &str, to: &str| {
        [from, "*"].iter().any(|from| allowed.get(*from).is_some_and(|list| list.contains(to)))
    };
    let mut breaches = Vec::new();
    for member in &workspace.crates {
        let from = format!("crate {}", member.folder);
        for to in member.dependencies.iter().filter(|to| !may(&from, to)) {
            breaches.push(format!("{from} depends on {to}"));
        }
    }
    let reference = workspace.crate_at("reference").expect("the crate `reference`");
    for ((from, to), files) in graph::top_edges(reference) {
        if !may(&from, &to) {
            let files: Vec<_> = files.into_iter().collect();
            breaches.push(format!("{from} -> {to} ({})", files.join(", ")));
        }
    }
    let tops: BTreeSet<&String> = reference.modules[0].children.keys().collect();
    for name in allowed.iter().flat_map(|(from, to)| to.iter().chain([from])) {
        let folder = name.strip_prefix("crate ").unwrap_or(name);
        if name != "*" && workspace.crate_at(folder).is_none() && !tops.contains(name) {
            breaches.push(format!("ARCHITECTURE.md names `{name}`, which does not exist"));
        }
    }
    breaches
}

fn no_cycles_between_siblings(workspace: &Workspace, limits: &Limits) -> Vec<String> {
    let allowed = &limits.cycles;
    let mut breaches = Vec::new();
    let mut found = BTreeSet::new();
    for cycle in workspace.crates.iter().flat_map(graph::cycles) {
        let key = (cycle.parent.clone(), cycle.members.clone());
        if !allowed.contains_key(&key) {
            let members: Vec<_> = cycle.members.into_iter().collect();
            let imports: Vec<_> = cycle.imports.into_iter().collect();
            let (parent, members) = (cycle.parent, members.join(" "));
            breaches.push(format!("cycle | {parent}: {members}\n    {}", imports.join("\n    ")));
        }
        found.insert(key);
    }
    for (parent, members) in allowed.keys().filter(|key| !found.contains(*key)) {
        let members: Vec<_> = members.iter().cloned().collect();
        breaches.push(format!("no longer a cycle: {parent}: {}", members.join(" ")));
    }
    breaches
}

/// Items over `limit` that are not in `allowed`, and items in `allowed` that are not over
/// it.
fn over(
    kind: &str,
    limit: usize,
    measured: impl Iterator<Item = (String, usize)>,
    allowed: &BTreeMap<String, String>,
) -> Vec<String> {
    let mut breaches = Vec::new();
    let mut found = BTreeSet::new();
    for (name, size) in measured.filter(|&(_, size)| size > limit) {
        if !allowed.contains_key(&name) {
            breaches.push(format!("{kind} | {name} ({size}, at most {limit})"));
        }
        found.insert(name);
    }
    for name in allowed.keys().filter(|name| !found.contains(*name)) {
        breaches.push(format!("{kind} | {name}: no longer over {limit}; remove the exception"));
    }
    breaches
}

fn things_are_named_in_few_files(workspace: &Workspace, limits: &Limits) -> Vec<String> {
    let mut breaches = Vec::new();
    let Limits { counts, upstream, .. } = limits;
    let upstream: Vec<&str> = upstream.keys().map(String::as_str).collect();
    for name in upstream.iter().filter(|name| naming::files(workspace, &[name], &[]).is_empty()) {
        breaches.push(format!("upstream | {name}: no file names it; remove the line"));
    }
    for count in counts {
        let names: Vec<&str> = count.names.iter().map(String::as_str).collect();
        let files = naming::files(workspace, &names, &upstream);
        let (found, ceiling, target) = (files.len(), count.ceiling, count.target);
        println!("{}: {found} files, ceiling {ceiling}, target {target}", count.thing);
        if found > ceiling {
            let files = files.join("\n    ");
            breaches.push(format!(
                "{}: {found} files name it, at most {ceiling} may\n    {files}",
                count.thing
            ));
        }
    }
    breaches
}

/// Folders of the crates that other projects depend on, and the files of their public surfaces: a change of one is seen
/// where it is reviewed.
const SURFACES: [(&str, &str); 2] =
    [("reference", "marlinspike.txt"), ("proptests", "marlinspike-proptests.txt")];

#[test]
fn every_public_item_is_recorded() {
    for (folder, name) in SURFACES {
        let found = WORKSPACE.crate_at(folder).expect("the crate");
        let public = found.modules.iter().flat_map(|module| &module.public);
        let lines: BTreeSet<&str> = public.map(|item| &*item.declaration).collect();
        assert!(lines.len() > 100, "{folder}: {} public items", lines.len());
        let path = root().join("tools/structure/public").join(name);
        if std::env::var_os("MARLINSPIKE_WRITE_DOCS").is_some() {
            let text: String = lines.iter().flat_map(|line| [line, "\n"]).collect();
            std::fs::write(&path, text).expect("a folder to write in");
        }
        let recorded = std::fs::read_to_string(&path).expect("the recorded surface");
        let recorded: BTreeSet<&str> = recorded.lines().collect();
        let new: Vec<_> = lines.difference(&recorded).collect();
        let gone: Vec<_> = recorded.difference(&lines).collect();
        assert!(
            new.is_empty() && gone.is_empty(),
            "{}: new {new:#?}, gone {gone:#?}; MARLINSPIKE_WRITE_DOCS=1 records them",
            path.display()
        );
    }
}
