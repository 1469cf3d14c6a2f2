//! The measures themselves, on small workspaces with known faults.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use marlinspike_structure::source::Workspace;
use marlinspike_structure::{graph, naming, rules};

/// A workspace of one crate `c` with these files below `c/src`.
fn workspace(files: &[(&str, &str)]) -> Workspace {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |path: &Path, text: &str| {
        fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        fs::write(path, text).expect("a file");
    };
    write(&folder.path().join("Cargo.toml"), "[workspace]\nmembers = [\"c\"]\n");
    write(&folder.path().join("c/Cargo.toml"), "[package]\nname = \"c\"\n");
    for (path, text) in files {
        write(&folder.path().join("c/src").join(path), text);
    }
    Workspace::read(folder.path(), &[]).expect("a workspace")
}

/// Parent and members of each cycle.
fn cycles(files: &[(&str, &str)]) -> Vec<(String, Vec<String>)> {
    let found = graph::cycles(&workspace(files).crates[0]);
    found.into_iter().map(|c| (c.parent, c.members.into_iter().collect())).collect()
}

fn cycle(parent: &str, members: &[&str]) -> Vec<(String, Vec<String>)> {
    vec![(parent.to_owned(), members.iter().map(|&m| m.to_owned()).collect())]
}

#[test]
fn a_cycle_is_found_however_it_is_spelled() {
    let lib = ("lib.rs", "mod a; mod b; mod c;");
    let a = ("a.rs", "use crate::b::B; pub struct A(B);");
    let ways = [
        "use crate::a::A; pub struct B(Box<A>);",
        "use super::a; pub struct B(Box<a::A>);",
        "pub struct B(Box<crate::a::A>);",
        "pub struct B; fn f() -> usize { assert!(matches!(1, crate::a::ONE)); 1 }",
        "use super::c::Again; pub struct B(Box<Again>);",
        "use super::c::*; pub struct B(Box<Again>);",
    ];
    for b in ways {
        let c = ("c.rs", "pub use crate::a::A as Again;");
        let found = cycles(&[lib, a, ("b.rs", b), c]);
        let members: &[&str] = if b.contains('*') { &["a", "b", "c"] } else { &["a", "b"] };
        assert_eq!(found, cycle("c", members), "{b}");
    }
}

#[test]
fn what_only_tests_import_ties_nothing() {
    let lib = ("lib.rs", "mod a; mod b;");
    let a = ("a.rs", "use crate::b::B; pub struct A(B);");
    for b in [
        "pub struct B;",
        "pub struct B; #[cfg(test)] use crate::a::A;",
        "pub struct B; #[cfg(test)] mod tests { use crate::a::A; }",
        "pub struct B; // crate::a::A\n/// [`crate::a::A`]\nfn f() {}",
        "pub struct B; use other::a::A;",
    ] {
        assert_eq!(cycles(&[lib, a, ("b.rs", b)]), [], "{b}");
    }
}

#[test]
fn cycles_below_the_top_and_through_three() {
    let found = cycles(&[
        ("lib.rs", "mod top;"),
        ("top/mod.rs", "mod x; mod y; mod z; pub struct Own;"),
        ("top/x.rs", "use super::{Own, y};"),
        ("top/y.rs", "use super::z::Z; pub struct Y;"),
        ("top/z/mod.rs", "mod deep; pub struct Z;"),
        ("top/z/deep.rs", "use crate::top::x; use crate::top::Own;"),
    ]);
    assert_eq!(found, cycle("c::top", &["x", "y", "z"]));
}

#[test]
fn edges_of_the_top_modules() {
    let files = [
        ("lib.rs", "mod a; mod b; pub struct Root;"),
        ("a/mod.rs", "mod inner;"),
        ("a/inner.rs", "use crate::b::B; use crate::Root;"),
        ("b.rs", "pub struct B;"),
    ];
    let workspace = workspace(&files);
    let edges: Vec<_> = graph::top_edges(&workspace.crates[0]).into_iter().collect();
    let expected = BTreeSet::from(["c/src/a/inner.rs".to_owned()]);
    assert_eq!(edges, [(("a".to_owned(), "b".to_owned()), expected)]);
}

#[test]
fn sizes_leave_tests_out() {
    let text = "/// Doc.\nfn long(\n    a: u8,\n    b: u8,\n) {\n}\n\
                struct S;\nimpl S {\n    fn m(&self) {}\n}\n\
                #[cfg(test)]\nmod tests {\n    fn t() {}\n}\n";
    let workspace = workspace(&[("lib.rs", text)]);
    let file = &workspace.files[0];
    assert_eq!(file.lines, 10);
    let functions: Vec<_> =
        file.functions.iter().map(|f| (f.name.as_str(), f.lines, f.parameters)).collect();
    assert_eq!(functions, [("c/src/lib.rs:long", 5, 2), ("c/src/lib.rs:S::m", 1, 1)]);
}

#[test]
fn names_are_found_in_code_and_literals_alone() {
    let workspace = workspace(&[
        ("lib.rs", "mod a; mod b; mod c; mod d;"),
        ("a.rs", "enum E { MxFp8 }"),
        ("b.rs", "const NAME: &str = \"MXFP8\";"),
        ("c.rs", "//! MXFP8\n/// mxfp8\nfn f() {} // mxfp8"),
        ("d.rs", "fn f() { vec![mx_fp8::<u8>()]; }"),
    ]);
    assert_eq!(
        naming::files(&workspace, &["mxfp8"], &[]),
        ["c/src/a.rs", "c/src/b.rs", "c/src/d.rs"]
    );
}

#[test]
fn a_folder_of_the_name_is_one_place() {
    let workspace = workspace(&[
        ("lib.rs", "mod layouts;"),
        ("layouts/mod.rs", "mod mxfp8; mod my_mxfp8;"),
        ("layouts/mxfp8/mod.rs", "mod a; fn mxfp8() {}"),
        ("layouts/mxfp8/a.rs", "fn mxfp8_a() {}"),
        ("layouts/my_mxfp8/mod.rs", "fn mxfp8_b() {}"),
    ]);
    assert_eq!(
        naming::files(&workspace, &["mxfp8"], &[]),
        ["c/src/layouts/mod.rs", "c/src/layouts/mxfp8", "c/src/layouts/my_mxfp8/mod.rs"]
    );
}

#[test]
fn names_of_upstream_do_not_count() {
    let workspace = workspace(&[
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "const NAME: &str = \"awq_marlin_repack\";"),
        ("b.rs", "fn awq_marlin_repack_of_awq() {}"),
        ("c.rs", "enum E { Awq }"),
    ]);
    let files = |names: &[&str]| naming::files(&workspace, names, &["awq_marlin_repack"]);
    assert_eq!(files(&["awq"]), ["c/src/b.rs", "c/src/c.rs"]);
    assert_eq!(files(&["awqmarlinrepack"]), ["c/src/a.rs", "c/src/b.rs"]);
}

#[test]
fn malformed_rules_are_refused() {
    let block = |lines: &str| rules::edges(&format!("# A\n\n```edges\n{lines}\n```\n"));
    let allowed = block("a -> b, c\n# why\nb ->").expect("edges");
    assert_eq!(allowed["a"], BTreeSet::from(["b".to_owned(), "c".to_owned()]));
    assert!(allowed["b"].is_empty());
    assert!(block("a b").is_err());
    assert!(rules::edges("nothing").is_err());
    assert!(rules::limits("file | a.rs | ").is_err(), "an exception needs a reason");
    assert!(rules::limits("count | a: b | many | 2").is_err());
    let limits = rules::limits("cycle | c::top: x y | they share a table").expect("limits");
    let members = BTreeSet::from(["x".to_owned(), "y".to_owned()]);
    assert!(limits.cycles.contains_key(&("c::top".to_owned(), members)));
}
