//! `vectors`: a seed always gives the same bytes, and wrong usage is bad input.

use std::collections::BTreeMap;
use std::path::Path;

use crate::support::{check_json, folder, run, stderr, stdout};
use marlinspike::case::Case;
use serde_json::Value;

/// Writes cases and returns the name and bytes of each file.
fn vectors(out: &Path, more: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let output = run(["vectors", "--out", out.to_str().unwrap()].iter().chain(more));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let files = std::fs::read_dir(out).unwrap().map(|f| f.unwrap().path());
    let name = |p: &Path| p.file_name().unwrap().to_str().unwrap().to_owned();
    files.map(|p| (name(&p), std::fs::read(&p).unwrap())).collect()
}

#[test]
fn cases_depend_on_seed_and_number_alone() {
    let temp = folder();
    let ops = [
        "linear",
        "moe",
        "int4_fp8_preprocess",
        "router",
        "moe_align_block_size",
        "swizzle_blockscale",
        "scaled_fp4_quant",
        "cutlass_scaled_mm",
    ];
    for op in ops {
        let at = |name: &str| temp.path().join(format!("{op}-{name}"));
        let many = vectors(&at("many"), &["--op", op, "--seed", "0x2a", "--count", "6"]);
        assert_eq!(many.len(), 6, "{op}");
        let one = vectors(&at("one"), &["--op", op, "--seed", "42", "--start", "4"]);
        assert_eq!(one.len(), 1, "{op}");
        for (name, bytes) in &one {
            assert!(many[name] == *bytes, "{op} {name}");
            let case = Case::parse(bytes).unwrap();
            assert_eq!(case.config.op().name(), op);
            assert!(case.provenance.contains("0x000000000000002a"), "{}", case.provenance);
        }
        let other = vectors(&at("other"), &["--op", op, "--seed", "43", "--start", "4"]);
        assert!(one.values().ne(other.values()), "{op}: another seed, the same case");
    }
}

/// The output of `vectors` matches its files, and `check` finds no wrong bit in them.
#[test]
fn json_lines_describe_cases_that_check_accepts() {
    let temp = folder();
    let out = temp.path().join("cases");
    let args = ["vectors", "--op", "linear", "--seed", "7", "--count", "5", "--json", "--out"];
    let output = run(args.iter().copied().chain([out.to_str().unwrap()]));
    assert_eq!(stderr(&output), "");
    let lines: Vec<Value> =
        stdout(&output).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let (summary, cases) = lines.split_last().unwrap();
    let summary = &summary["summary"];
    assert_eq!((&summary["cases"], &summary["op"]), (&5.into(), &"linear".into()));
    assert_eq!(summary["seed"], "0x0000000000000007");
    let mut bytes = 0;
    for (i, line) in cases.iter().enumerate() {
        let path = Path::new(line["path"].as_str().unwrap());
        let case = std::fs::read(path).unwrap();
        bytes += case.len();
        assert_eq!((&line["index"], &line["bytes"]), (&i.into(), &case.len().into()));
        let case = Case::parse(&case).unwrap();
        assert_eq!(
            (&line["name"], &line["outputs"]),
            (&case.name.into(), &case.outputs.len().into())
        );
    }
    assert_eq!((cases.len(), &summary["bytes"]), (5, &bytes.into()));

    let (_, checked) = check_json(&[&out]);
    let outputs = checked.iter().filter_map(|c| c["outputs"].as_array()).flatten();
    let verdicts: Vec<_> = outputs.map(|o| o["verdict"].as_str().unwrap()).collect();
    assert!(verdicts.contains(&"pass") && !verdicts.contains(&"fail"), "{verdicts:?}");
}

#[test]
fn a_drawn_seed_is_printed_and_makes_the_case_again() {
    let temp = folder();
    let (first, again) = (temp.path().join("first"), temp.path().join("again"));
    let output = run(["vectors", "--op", "router", "--out", first.to_str().unwrap()]);
    let text = stdout(&output);
    let seed = text.strip_prefix("seed ").and_then(|t| t.split(':').next()).unwrap();
    let written = vectors(&again, &["--op", "router", "--seed", seed]);
    for (name, bytes) in written {
        assert!(std::fs::read(first.join(&name)).unwrap() == bytes, "{name} of {seed}");
    }
}

#[test]
fn list_prints_every_configuration_and_writes_nothing() {
    let output = run(["vectors", "--op", "moe", "--list"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let lines: Vec<&str> = stdout(&output).lines().collect();
    assert!(lines.len() > 20, "{}", lines.len());
    let distinct: std::collections::BTreeSet<_> = lines.iter().collect();
    assert_eq!(distinct.len(), lines.len());
    for line in lines {
        assert!(serde_json::from_str::<Value>(line).unwrap().is_object(), "{line}");
    }
}

#[test]
fn wrong_usage_is_bad_input() {
    let temp = folder();
    let out = temp.path().to_str().unwrap();
    let file = temp.path().join("file");
    std::fs::write(&file, b"").unwrap();
    let end = u64::MAX.to_string();
    for (args, named) in [
        (vec!["--op", "conv", "--out", out], "linear, moe"),
        (vec!["--op", "linear"], "--out"),
        (vec!["--out", out], "--op"),
        (vec!["--op", "linear", "--out", out, "--seed", "0x1_0000_0000_0000_0000"], "2^64"),
        (vec!["--op", "linear", "--out", out, "--seed", "two"], "2^64"),
        (vec!["--op", "linear", "--out", out, "--start", &end, "--count", "2"], "2^64"),
        (vec!["--op", "linear", "--list", "--seed", "1"], "--list"),
        (vec!["--op", "linear", "--out", file.to_str().unwrap()], "file"),
    ] {
        let output = run(std::iter::once("vectors").chain(args.iter().copied()));
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(named), "{args:?}: {}", stderr(&output));
    }
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1, "only the file made here");
}

/// A killed process leaves its temporary file, which the next one removes.
#[test]
fn temporary_files_of_killed_processes_are_removed() {
    let folder = folder();
    let out = folder.path().join("cases");
    let parts = || {
        let names = std::fs::read_dir(&out).into_iter().flatten().flatten().map(|e| e.file_name());
        names.filter(|name| name.to_string_lossy().ends_with(".part")).count()
    };
    // Killed again and again until a file is caught in the making.
    for _ in 0..200 {
        let mut command = crate::support::command();
        command.args(["vectors", "--op", "int4_fp8_preprocess", "--count", "100000", "--out"]);
        command.arg(&out).stdout(std::process::Stdio::null());
        let mut child = command.spawn().unwrap();
        for _ in 0..1000 {
            if parts() > 0 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        if parts() > 0 {
            break;
        }
    }
    assert!(parts() > 0, "no process was killed while it wrote");
    let out = out.to_str().unwrap();
    let done = run(["vectors", "--op", "int4_fp8_preprocess", "--count", "1", "--out", out]);
    assert_eq!((done.status.code(), parts()), (Some(0), 0));
}
