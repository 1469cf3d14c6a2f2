//! The whole way on a small package: right tests kill a mutant, weak tests let it survive. And the page with the results
//! of all modules.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

use marlinspike_mutation::build::Package;
use marlinspike_mutation::report::{self, Line};
use marlinspike_mutation::source::Source;
use marlinspike_mutation::trials::{self, Limits, Outcome};

const TOY: &str = r#"
pub fn add(a: u32, b: u32) -> u32 {
    a + b // a comment
}

pub fn weakly_tested(a: u32) -> bool {
    a > 3
}

pub fn count(to: u32) -> u32 {
    let mut at = 0;
    while at != to {
        at += 1;
    }
    at
}

pub fn never_called(a: bool) -> bool {
    !a
}

pub const fn constant(a: u32) -> u32 {
    a * 2
}

pub struct NoDefault(u8);

pub fn made() -> NoDefault {
    NoDefault(7)
}

pub fn name(of: u32) -> &'static str {
    match of {
        0 => "zero",
        n if n < 10 => "small",
        _ => "large",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums() {
        assert_eq!(add(2, 3), 5);
        assert_eq!(made().0, 7);
    }

    #[test]
    fn counts() {
        assert_eq!(count(3), 3);
    }

    #[test]
    fn far_from_the_limit() {
        assert!(weakly_tested(9) && !weakly_tested(0));
    }

    #[test]
    fn names() {
        assert_eq!([0, 1, 99].map(name), ["zero", "small", "large"]);
    }
}
"#;

#[test]
fn a_toy_package() {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        fs::create_dir_all(root.path().join(path).parent().unwrap()).unwrap();
        fs::write(root.path().join(path), text).unwrap();
    };
    write("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"toy\"]\n");
    write("toy/Cargo.toml", "[package]\nname = \"toy\"\nversion = \"0.1.0\"\nedition = \"2024\"\n");
    write("toy/src/lib.rs", TOY);

    let mut package =
        Package::open(root.path(), root.path(), "toy", "toy", &["src".to_owned()]).unwrap();
    let built = package.build(&[], &|_| ()).unwrap();
    let limits = Limits {
        jobs: 2,
        test: Duration::from_secs(60),
        mutant: Duration::from_secs(60),
        memory: 16 << 20,
    };
    let folder = root.path().join("toy");
    let tests = trials::baseline(&built.programs, &folder, &limits).unwrap();
    assert_eq!(tests.len(), 4);

    let viable: Vec<_> = built.mutants.iter().collect();
    let lines = std::sync::Mutex::new(Vec::new());
    trials::run_all(&viable, &tests, &folder, &limits, &|mutant, outcome| {
        lines.lock().unwrap().push(Line { mutant: mutant.clone(), outcome: outcome.clone() });
    });
    let mut lines = lines.into_inner().unwrap();
    lines.sort_by_key(|line| line.mutant.id);
    let outcomes: BTreeMap<String, Outcome> = lines
        .iter()
        .map(|Line { mutant, outcome }| {
            (format!("{}: {}", mutant.function, mutant.change), outcome.clone())
        })
        .collect();

    let killed = |by: &str| Outcome::Killed { by: format!("toy tests::{by}") };
    let survived = Outcome::Survived { tests: 1, left_out: 0 };
    for (name, expected) in [
        ("add: replace + with -", killed("sums")),
        ("add: return 0", killed("sums")),
        ("weakly_tested: replace > with ==", killed("far_from_the_limit")),
        ("weakly_tested: replace > with >=", survived.clone()),
        ("count: replace += with *=", Outcome::TimedOut { by: "toy tests::counts".to_owned() }),
        ("never_called: delete !", Outcome::NotReached),
        ("name: delete arm 0", killed("names")),
        ("name: replace guard with false", killed("names")),
        ("name: replace < with <=", survived),
    ] {
        assert_eq!(outcomes.get(name), Some(&expected), "{name}: {outcomes:#?}");
    }
    // `NoDefault` has no default value, and a constant function cannot read the environment.
    let dropped: Vec<_> = package.mutants().filter(|mutant| package.is_dropped(mutant)).collect();
    assert!(
        dropped.iter().all(|mutant| mutant.function == "made") && dropped.len() == 1,
        "{dropped:?}"
    );
    assert!(!outcomes.keys().any(|name| name.starts_with("constant")));
    let table = report::markdown(&lines, &built.constant);
    assert!(
        table.contains("- src/lib.rs:7 weakly_tested: replace > with >= (survived)"),
        "{table}"
    );
}

#[test]
fn branches_nest_and_can_be_left_out() {
    let text = "fn f(a: u32, b: u32) -> u32 { a - b * 2 }";
    let source = Source::parse("f.rs", text, 5).unwrap();
    let changes: Vec<_> = source
        .mutants
        .iter()
        .map(|mutant| (mutant.id, mutant.place, mutant.change.as_str()))
        .collect();
    assert_eq!(
        changes,
        [
            (5, 5, "return 0"),
            (6, 5, "return 1"),
            (7, 7, "replace - with +"),
            (8, 7, "replace - with /"),
            (9, 9, "replace * with +"),
            (10, 9, "replace * with /"),
        ]
    );
    assert_eq!(source.branched(&|_| false).text, text);
    let branched = source.branched(&|id| id == 8 || id == 9);
    assert_eq!(
        branched.text,
        "fn f(a: u32, b: u32) -> u32 { (match crate::mutation::pick(7) { 0 | 2.. => a - \
         (match crate::mutation::pick(9) { 1 | 2.. => b * 2, 0 => (b) + (2) }), 1 => (a) / (b * 2) }) }"
    );
    assert!(Source::parse("f.rs", "fn f( {", 0).is_err());
}

/// The modules that a page's first table of results has, without `all`.
fn rows(page: &str) -> Vec<&str> {
    let table = page.lines().skip_while(|line| !line.starts_with("| module | tested |"));
    let rows = table.take_while(|line| line.starts_with('|')).filter_map(|line| {
        line.strip_prefix("| `").and_then(|line| line.split_once('`')).map(|(module, _)| module)
    });
    rows.collect()
}

/// A run of some modules prints a table of these alone. On the page it would replace the table of all, which are those of
/// the page's command.
#[test]
fn the_page_has_one_row_for_each_module() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/src/results/mutants.md")).unwrap();
    let command = page.lines().find(|line| line.contains("marlinspike-mutation -- ")).unwrap();
    let modules: Vec<String> = command
        .split_whitespace()
        .filter(|word| word.starts_with("src/"))
        .map(str::to_owned)
        .collect();
    assert_eq!(modules.len(), 5, "{command}");
    let package = Package::open(&root, &root, "reference", "marlinspike", &modules).unwrap();
    let expected: BTreeSet<String> = package.mutated_files().map(report::module).collect();

    let without_row = |missing: &[&str]| -> Vec<String> {
        let found = rows(&page);
        let distinct: BTreeSet<_> = found.iter().copied().chain(missing.iter().copied()).collect();
        assert_eq!(distinct.len(), found.len() + missing.len(), "a module has two rows: {found:?}");
        let unknown: Vec<_> = distinct.iter().filter(|row| !expected.contains(**row)).collect();
        assert!(unknown.is_empty(), "mutants.md: no module has the rows {unknown:?}");
        expected.iter().filter(|row| !distinct.contains(row.as_str())).cloned().collect()
    };
    // Modules that did not exist when the table was made; the page says so.
    let newer = ["layouts::int8"];
    assert!(
        newer.iter().all(|module| page.contains(&format!("`{module}` is newer than the table")))
    );
    let missing = without_row(&newer);
    assert!(missing.is_empty(), "mutants.md has no row for {missing:?}: run its command for them");
    assert_eq!(without_row(&[]), newer);

    // What a run of one module prints has a row for it alone.
    let lines: Vec<Line> = package
        .mutants()
        .filter(|mutant| mutant.file.starts_with("src/act_order"))
        .map(|mutant| Line { mutant: mutant.clone(), outcome: Outcome::NotReached })
        .collect();
    assert_eq!(rows(&report::markdown(&lines, &[])), ["act_order"]);
}
