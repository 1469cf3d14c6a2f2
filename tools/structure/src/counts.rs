//! What the house costs a newcomer, in numbers, each with its goal. They are a compass: no test holds them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::source::{Crate, Workspace};
use crate::surface::Kind;

/// A number and its goal.
struct Count {
    what: &'static str,
    found: String,
    goal: &'static str,
}

/// The numbers as a table in Markdown.
///
/// # Errors
/// When the workspace's folder cannot be read, or has no `reference`.
pub fn table(root: &Path, workspace: &Workspace) -> Result<String> {
    let reference = workspace.crate_at("reference").context("found no crate in reference")?;
    let public = |kind: Kind| {
        reference.modules.iter().flat_map(|m| &m.public).filter(|p| p.kind == kind).count()
    };
    let at_root = reference.modules[0].public.iter().filter(|p| p.kind == Kind::Use).count();
    let (largest, lines) = largest_crate(workspace).context("found no crate")?;
    let matching: Vec<usize> =
        workspace.files.iter().map(|f| f.scheme_matches).filter(|&count| count > 0).collect();
    let total: usize = workspace.files.iter().map(|f| f.lines).sum();
    let functions = (public(Kind::Function), public(Kind::Type));
    let rows = [
        Count {
            what: "public functions and types of `marlinspike`",
            found: format!("{} and {}", functions.0, functions.1),
            goal: "450 functions",
        },
        Count { what: "items at its root", found: at_root.to_string(), goal: "20" },
        Count {
            what: "methods of the trait `Operation`",
            found: methods_of(workspace, "Operation", root)?.to_string(),
            goal: "10",
        },
        Count {
            what: "files that match on `Scheme::`, and places",
            found: format!("{} ({})", matching.len(), matching.iter().sum::<usize>()),
            goal: "8",
        },
        Count {
            what: "type names with three meanings or more",
            found: repeated(workspace),
            goal: "none",
        },
        Count {
            what: "entries at the top of the repository, without hidden ones",
            found: entries(root)?.to_string(),
            goal: "20",
        },
        Count { what: "lines of Rust in `src` folders", found: total.to_string(), goal: "141000" },
        Count {
            what: "largest crate: lines, modules at its top",
            found: format!("{} {lines}, {}", largest.folder, largest.modules[0].children.len()),
            goal: "22000, 6",
        },
    ];
    let mut text = "| count | found | goal |\n| --- | --- | --- |\n".to_owned();
    for Count { what, found, goal } in rows {
        writeln!(text, "| {what} | {found} | {goal} |")?;
    }
    Ok(text)
}

fn largest_crate(workspace: &Workspace) -> Option<(&Crate, usize)> {
    let lines = |folder: &str| -> usize {
        let prefix = format!("{folder}/");
        workspace.files.iter().filter(|f| f.path.starts_with(&prefix)).map(|f| f.lines).sum()
    };
    workspace.crates.iter().map(|c| (c, lines(&c.folder))).max_by_key(|(_, lines)| *lines)
}

/// The methods that the trait of this name declares.
fn methods_of(workspace: &Workspace, name: &str, root: &Path) -> Result<usize> {
    for file in workspace.files.iter().filter(|f| f.path.starts_with("reference/")) {
        let syntax = syn::parse_file(&std::fs::read_to_string(root.join(&file.path))?)?;
        for item in syntax.items {
            if let syn::Item::Trait(found) = item
                && found.ident == name
            {
                return Ok(found
                    .items
                    .iter()
                    .filter(|i| matches!(i, syn::TraitItem::Fn(_)))
                    .count());
            }
        }
    }
    Ok(0)
}

/// Names of public types that at least three modules of the workspace define.
fn repeated(workspace: &Workspace) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let public = workspace.crates.iter().flat_map(|c| &c.modules).flat_map(|m| &m.public);
    for item in public.filter(|p| p.kind == Kind::Type) {
        *counts.entry(item.name.clone()).or_default() += 1;
    }
    let mut often: Vec<_> = counts.into_iter().filter(|(_, count)| *count >= 3).collect();
    often.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let shown = often.iter().map(|(name, count)| format!("{name} {count}"));
    match often.is_empty() {
        true => "none".to_owned(),
        false => shown.collect::<Vec<_>>().join(", "),
    }
}

fn entries(root: &Path) -> Result<usize> {
    let mut count = 0;
    for entry in std::fs::read_dir(root)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        count += usize::from(!name.starts_with('.') && !["target", "out"].contains(&&*name));
    }
    Ok(count)
}
