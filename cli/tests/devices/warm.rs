//! `warm`: the list of kernels, rejected arguments, and the contents of the cache.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output};

use marlinspike_accel::nvrtc::{LIBRARY_VARIABLE, Nvrtc};

fn warm(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_marlinspike"));
    command.arg("warm").args(args);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The numbers in an operation's line.
fn numbers(out: &Output, operation: &str) -> Vec<usize> {
    let stdout = text(&out.stdout);
    let line = stdout.lines().find(|line| line.trim().starts_with(operation));
    let words = line.unwrap_or_else(|| panic!("no {operation} in {stdout}")).split_whitespace();
    words.skip(1).map(|word| word.parse().unwrap()).collect()
}

#[test]
fn operations_are_listed_with_their_modules() {
    let out = warm(&["--list", "--capability", "9.0", "--capability", "8.0"]).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    // f16 and bf16; all slots, or by ids or places; one or eight columns at a time; for two architectures.
    assert_eq!(numbers(&out, "moe_sum"), [24]);
    // One thread block, and from 9.0 on a cluster, too.
    assert_eq!(numbers(&out, "moe_align_block_size"), [3]);
    // An operation that needs 8.0 has no kernels for 7.5.
    let out = warm(&["--list", "--capability", "7.5"]).output().unwrap();
    assert_eq!(numbers(&out, "moe_sum"), [0]);
    assert_eq!(numbers(&out, "moe_align_block_size"), [1]);
}

#[test]
fn bad_arguments_are_refused_with_help() {
    for (args, message, help) in [
        (&["--operation", "moe_summ"][..], "--operation: found \"moe_summ\"", "moe_sum"),
        (&["--capability", "sm_90"], "found \"sm_90\"", "--help"),
    ] {
        let out = warm(args).output().unwrap();
        let stderr = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(message) && stderr.contains(help), "{stderr}");
    }
}

#[test]
fn a_missing_compiler_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().to_str().unwrap();
    let out = warm(&["--capability", "9.0", "--operation", "moe_sum", "--cache", cache])
        .env(LIBRARY_VARIABLE, "/absent/libnvrtc.so")
        .output()
        .unwrap();
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("/absent/libnvrtc.so") && stderr.contains("help: "), "{stderr}");
    let out = warm(&["--capability", "9.0"]).env("MARLINSPIKE_CACHE", "off").output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("no cache"), "{}", text(&out.stderr));
}

#[test]
fn the_second_run_finds_every_module() {
    if Nvrtc::open().is_err() && std::env::var_os(LIBRARY_VARIABLE).is_none() {
        let line = b"\nSKIPPED (no NVRTC): the_second_run_finds_every_module\n";
        std::io::stdout().lock().write_all(line).unwrap();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let run = |cache: &Path| {
        let args = ["--capability", "8.0", "--operation", "moe_sum", "--cache"];
        warm(&args).arg(cache).output().unwrap()
    };
    let first = run(&cache);
    assert_eq!(first.status.code(), Some(0), "{}", text(&first.stderr));
    assert_eq!(numbers(&first, "moe_sum"), [12, 0, 12, 0]);
    assert_eq!(numbers(&run(&cache), "moe_sum"), [12, 12, 0, 0]);
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 12);
    // A folder that cannot be created.
    let file = folder.path().join("file");
    std::fs::write(&file, b"").unwrap();
    let out = run(&file.join("cache"));
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    assert_eq!(numbers(&out, "moe_sum"), [12, 0, 0, 12]);
}
