//! The documents: every relative link and anchor resolves, every page is in the book's summary, and
//! files that documents and sources name exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::support;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// All files below `dir` whose name ends with one of `ends`, without build output and data.
fn files(dir: &Path, ends: &[&str], found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !name.starts_with('.') && !["target", "data", "corpus"].contains(&name.as_str()) {
                files(&path, ends, found);
            }
        } else if ends.iter().any(|end| name.ends_with(end)) {
            found.push(path);
        }
    }
}

/// The lines outside fenced code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

/// A heading's anchor in GitHub's and mdBook's form.
fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// The targets of a line's links, code spans left out.
fn links(line: &str) -> Vec<String> {
    let text: String = line.split('`').step_by(2).collect();
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://")).map(str::to_owned).collect()
}

pub(crate) fn documents() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    files(&root(), &[".md"], &mut pages);
    assert!(pages.len() > 20, "{pages:?}");
    pages
}

#[test]
fn every_link_resolves() {
    let mut broken = Vec::new();
    for page in documents() {
        let text = fs::read_to_string(&page).unwrap();
        for link in prose(&text).flat_map(links) {
            let (file, fragment) = link.split_once('#').unwrap_or((&link, ""));
            let target =
                if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            let Ok(target_text) = fs::read(&target) else {
                if !target.is_dir() {
                    broken.push(format!("{}: {link}", page.display()));
                }
                continue;
            };
            let target_text = String::from_utf8_lossy(&target_text).into_owned();
            let mut headings = prose(&target_text).filter(|line| line.starts_with('#'));
            if !fragment.is_empty() && !headings.any(|heading| anchor(heading) == fragment) {
                broken.push(format!("{}: no heading for {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_summary_lists_every_page_once() {
    let book = root().join("docs/src");
    let summary = fs::read_to_string(book.join("SUMMARY.md")).unwrap();
    let listed: Vec<PathBuf> =
        summary.lines().flat_map(links).map(|link| book.join(link)).collect();
    let unique: BTreeSet<_> = listed.iter().cloned().collect();
    assert_eq!(unique.len(), listed.len(), "a page is listed twice");
    let mut pages = Vec::new();
    files(&book, &[".md"], &mut pages);
    pages.retain(|page| !page.ends_with("SUMMARY.md"));
    assert_eq!(pages.into_iter().collect::<BTreeSet<_>>(), unique);
}

#[test]
fn pages_that_sources_name_exist() {
    let mut sources = Vec::new();
    files(&root(), &[".rs", ".cu", ".cuh", ".py", ".sh", ".md"], &mut sources);
    let mut missing = Vec::new();
    for source in sources {
        let text = fs::read_to_string(&source).unwrap();
        for rest in text.split("docs/src/").skip(1) {
            let Some(end) = rest.find(".md") else { continue };
            let page = &rest[..end];
            let name = |c: char| c.is_ascii_alphanumeric() || "-_/".contains(c);
            if page.chars().all(name) && !root().join(format!("docs/src/{page}.md")).exists() {
                missing.push(format!("{}: docs/src/{page}.md", source.display()));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn files_that_documents_name_exist() {
    let folders: Vec<String> = fs::read_dir(root())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    let mut missing = Vec::new();
    for page in documents() {
        let text = fs::read_to_string(&page).unwrap();
        for span in prose(&text).flat_map(|line| line.split('`').skip(1).step_by(2)) {
            let path = span.split_whitespace().next().unwrap_or_default();
            let Some((folder, _)) = path.split_once('/') else { continue };
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
            if folders.iter().any(|f| f == folder)
                && folder != "target"
                && path.chars().all(plain)
                && !root().join(path).exists()
            {
                missing.push(format!("{}: {path}", page.display()));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn the_readme_is_short() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    assert!(readme.lines().count() <= 150);
}

/// Examples of `check`'s output explain their columns as the program does.
#[test]
fn examples_explain_columns_as_the_program_does() {
    let case = support::golden(support::PASSING);
    let run = support::run(["check".as_ref(), "-v".as_ref(), case.as_os_str()]);
    let legend = support::stdout(&run).lines().next().unwrap();
    let begin = "bit-equal: share of values";
    assert!(legend.starts_with(begin), "{legend}");
    let mut examples = 0;
    for page in documents() {
        let text = fs::read_to_string(&page).unwrap();
        for (at, _) in text.match_indices(begin) {
            let example = text[at..].split("\n\n").next().unwrap();
            assert_eq!(support::unwrapped(example), legend, "{}", page.display());
            examples += 1;
        }
    }
    assert!(examples > 3, "{examples}");
}
