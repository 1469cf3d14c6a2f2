//! Comments, strings and documents do not use the phrases that `words.txt` bans.

use std::path::Path;

use marlinspike_structure::wording::{Wording, wording};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the workspace's folder")
}

fn list() -> Wording {
    let text =
        std::fs::read_to_string(root().join("tools/structure/words.txt")).expect("words.txt");
    wording(&text).expect("words.txt")
}

#[test]
fn no_banned_phrase_is_used() {
    let breaches = list().breaches(root()).expect("the sources");
    assert!(breaches.is_empty(), "{} breaches:\n{}", breaches.len(), breaches.join("\n"));
}

#[test]
fn skipped_paths_exist() {
    for (path, _) in list().skipped {
        assert!(root().join(&path).exists(), "words.txt: {path} does not exist");
    }
}

/// Lines at which `text` uses the phrases `nobody` or `so many`.
fn lines(path: &str, text: &str) -> Vec<usize> {
    let list = wording("ban | nobody | x\nban | so many | x").expect("a list");
    let line = |breach: &String| breach.split(':').nth(1)?.parse().ok();
    list.uses(path, text).iter().filter_map(line).collect()
}

#[test]
fn prose_of_sources_counts() {
    assert_eq!(lines("a.rs", "//! Nobody\nfn f() {}"), [1]);
    assert_eq!(lines("a.rs", "fn f() {} // read by nobody"), [1]);
    assert_eq!(lines("a.rs", "/* one\n * nobody */"), [2]);
    assert_eq!(lines("a.rs", "let s = \"a \\\" nobody\";"), [1]);
    assert_eq!(lines("a.rs", "let s = \"so \\\n   many\";"), [1]);
    assert_eq!(lines("a.rs", "let s = r#\"a \" nobody\"#;"), [1]);
    assert_eq!(lines("a.rs", "/// There are so\n/// many words.\n\n/// And nobody"), [1, 4]);
    assert_eq!(lines("a.rs", "let c = '\"'; // nobody\nlet d = '\\''; // nobody"), [1, 2]);
    assert_eq!(lines("a.rs", "fn f<'a>(x: &'a str) {} // nobody"), [1]);
    assert_eq!(lines("a.cu", "__shared__ int x; // nobody"), [1]);
}

#[test]
fn code_does_not_count() {
    assert_eq!(lines("a.rs", "fn nobody() { so(many) }"), []);
    assert_eq!(lines("a.rs", "/// Calls `nobody`; so `x` many."), []);
    assert_eq!(lines("a.rs", "/// so\nfn f() {}\n/// many"), []);
    assert_eq!(lines("a.rs", "f(\"so\", \"many\"); // nobody_else"), []);
}

#[test]
fn documents_count_outside_of_code() {
    assert_eq!(lines("a.md", "# Title\n\nNobody\n"), [3]);
    assert_eq!(lines("a.md", "so\nmany\n"), [1]);
    assert_eq!(lines("a.md", "```\nnobody\n```\nand nobody\n"), [4]);
}

#[test]
fn a_malformed_line_is_an_error() {
    for line in ["ban | nobody", "ban | | x", "skip | accel |", "nobody"] {
        assert!(wording(line).is_err(), "{line}");
    }
}
