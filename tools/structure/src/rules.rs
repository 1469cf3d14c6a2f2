//! What ARCHITECTURE.md and `limits.txt` allow.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};

/// Imports that are allowed, by importer.
pub type Allowed = BTreeMap<String, BTreeSet<String>>;

/// The block fenced as ```` ```edges ```` of ARCHITECTURE.md: lines `a -> b, c`, and
/// `#` comments. `*` means every importer.
///
/// # Errors
/// When the block is missing or a line has no arrow.
pub fn edges(architecture: &str) -> Result<Allowed> {
    let (_, rest) = architecture
        .split_once("```edges\n")
        .context("ARCHITECTURE.md has no block fenced as ```edges")?;
    let (block, _) = rest.split_once("\n```").context("the block ```edges is not closed")?;
    let mut allowed = Allowed::new();
    for line in block.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let Some((from, to)) = line.split_once("->") else {
            bail!("edges: found {line:?}, expected `module -> module ...`");
        };
        let to = to.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
        allowed.entry(from.trim().to_owned()).or_default().extend(to);
    }
    Ok(allowed)
}

/// `limits.txt`: exceptions with their reasons, and ceilings of counts.
#[derive(Debug, Default)]
pub struct Limits {
    /// Files over the limit of lines.
    pub files: BTreeMap<String, String>,
    /// Functions over the limit of lines.
    pub functions: BTreeMap<String, String>,
    /// Functions over the limit of parameters.
    pub parameters: BTreeMap<String, String>,
    /// Cycles among siblings: parent and members.
    pub cycles: BTreeMap<(String, BTreeSet<String>), String>,
    /// Ceilings on the number of files that name a thing.
    pub counts: Vec<Count>,
    /// Upstream's own names, with where they are from: they do not count as names of a format.
    pub upstream: BTreeMap<String, String>,
}

/// The ceiling of one cost.
#[derive(Debug)]
pub struct Count {
    /// The thing.
    pub thing: String,
    /// Its names.
    pub names: Vec<String>,
    /// The largest number of files today.
    pub ceiling: usize,
    /// The largest number of files that the design aims at.
    pub target: usize,
}

/// Reads `limits.txt`: `kind | subject | reason`, or `count | thing: names | ceiling | target`.
///
/// # Errors
/// When a line has another form.
pub fn limits(text: &str) -> Result<Limits> {
    let mut limits = Limits::default();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let fields: Vec<&str> = line.split('|').map(str::trim).collect();
        match *fields.as_slice() {
            [kind @ ("file" | "function" | "parameters" | "upstream"), subject, reason]
                if !reason.is_empty() =>
            {
                let table = match kind {
                    "file" => &mut limits.files,
                    "function" => &mut limits.functions,
                    "upstream" => &mut limits.upstream,
                    _ => &mut limits.parameters,
                };
                table.insert(subject.to_owned(), reason.to_owned());
            }
            ["cycle", subject, reason] if !reason.is_empty() => {
                let (parent, members) = subject
                    .split_once(':')
                    .and_then(|_| subject.rsplit_once(": "))
                    .with_context(|| format!("{line:?}: expected `parent: member member`"))?;
                let members = members.split_whitespace().map(str::to_owned).collect();
                limits.cycles.insert((parent.to_owned(), members), reason.to_owned());
            }
            ["count", subject, ceiling, target] => {
                let (thing, names) =
                    subject.split_once(':').with_context(|| format!("{line:?}: no names"))?;
                limits.counts.push(Count {
                    thing: thing.to_owned(),
                    names: names.split_whitespace().map(str::to_owned).collect(),
                    ceiling: ceiling.parse().with_context(|| line.to_owned())?,
                    target: target.parse().with_context(|| line.to_owned())?,
                });
            }
            _ => bail!("limits.txt: found {line:?}, expected `kind | subject | reason`"),
        }
    }
    Ok(limits)
}
