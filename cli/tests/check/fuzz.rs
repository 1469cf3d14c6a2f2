//! `marlinspike fuzz` as a user runs it: a shell script and a C library as kernels.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// `int4_fp8_preprocess` without zero points: a code v of 8 and above becomes v − 8, another 15 − v.
/// The mistake is chosen at compile time.
const KERNEL: &str = r#"
#include "marlinspike_kernel.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int marlinspike_kernel_abi(void) { return MARLINSPIKE_KERNEL_ABI; }

static uint32_t code(uint32_t v) {
#ifdef WRONG
  return v ^ 8;
#else
  /* uint4b8 to sign and magnitude */
  return v < 8 ? 15 - v : v - 8;
#endif
}

int marlinspike_kernel_run(const marlinspike_call *call) {
  if (call->size < sizeof *call || call->num_outputs != 1) return 1;
  const DLTensor *in = 0, *out = &call->outputs[0].tensor;
  for (size_t i = 0; i < call->num_inputs; i++)
    if (!strcmp(call->inputs[i].name, "qweight")) in = &call->inputs[i].tensor;
  if (!in || strstr(call->config, "awq")) {
    snprintf(call->message, call->message_bytes, "GPTQ only");
    return MARLINSPIKE_UNSUPPORTED;
  }
  puts("printing is harmless");
  size_t words = in->shape[0] * in->shape[1];
  const uint32_t *x = in->data;
  uint32_t *y = out->data;
#ifdef UNWRITTEN
  words -= 1;
#endif
#ifdef PAST_END
  words += 16;
#endif
#ifdef BEFORE
  y[-1] = 0;
#endif
#ifdef WRITES_INPUT
  ((uint32_t *)x)[0] = 0;
#endif
#ifdef FAILS
  snprintf(call->message, call->message_bytes, "no such tile");
  return 3;
#endif
#ifdef HANGS
  for (;;) sleep(1);
#endif
  for (size_t i = 0; i < words; i++) {
    uint32_t word = 0;
    for (int j = 0; j < 32; j += 4) word |= code(x[i % (in->shape[0] * in->shape[1])] >> j & 15) << j;
    y[i] = word;
  }
#ifdef RACE
  static int calls;
  y[5] += calls++;
#endif
  return MARLINSPIKE_OK;
}
"#;

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Compiles the kernel with one mistake.
fn library(folder: &Path, mistake: &str) -> PathBuf {
    let source = folder.join("kernel.c");
    std::fs::write(&source, KERNEL).unwrap();
    let library = folder.join("kernel.so");
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proptests/include");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-w", "-shared", "-fPIC"]).arg(format!("-D{mistake}"));
    cc.arg("-I").arg(include).arg("-o").arg(&library).arg(&source);
    assert!(cc.status().expect("a C compiler").success());
    library
}

fn fuzz(folder: &Path, kernel: &[&str]) -> (Output, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_marlinspike"));
    command.args(["fuzz", "--op", "int4_fp8_preprocess", "--seed", "1", "--cases", "12"]);
    command.args(["--timeout", "2", "--keep"]).arg(folder.join("kept")).args(kernel);
    let output = command.current_dir(folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, text)
}

fn merge(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_marlinspike"));
    command.args(["fuzz", "merge"]).args(arguments).current_dir(folder).output().unwrap()
}

fn fuzz_library(mistake: &str) -> (Output, String) {
    let folder = folder(mistake);
    library(&folder, mistake);
    fuzz(&folder, &["--lib", "kernel.so"])
}

#[test]
fn a_right_library_passes() {
    let (output, text) = fuzz_library("RIGHT");
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("not supported by the kernel") && text.contains("no failure"), "{text}");
}

#[test]
fn each_mistake_of_a_library_is_a_finding() {
    let mistakes = [
        ("WRONG", "values are wrong"),
        ("UNWRITTEN", "left 4 of"),
        ("PAST_END", "SIGSEGV"),
        ("BEFORE", "SIGSEGV"),
        ("WRITES_INPUT", "SIGSEGV"),
        ("FAILS", "returned 3: no such tile"),
        ("RACE", "two runs on the same inputs differ"),
    ];
    for (mistake, words) in mistakes {
        let (output, text) = fuzz_library(mistake);
        assert_eq!(output.status.code(), Some(1), "{mistake}: {text}");
        assert!(text.contains("finding:") && text.contains(words), "{mistake}: {text}");
        // The run went on after the first finding.
        assert!(text.contains("12 cases in"), "{mistake}: {text}");
    }
}

#[test]
fn a_hang_is_a_finding() {
    let folder = folder("HANGS");
    library(&folder, "HANGS");
    let only = "checkpoint_format=gptq,size_k=128,size_n=64";
    let more = ["--lib", "kernel.so", "--cases", "1", "--timeout", "0.3", "--where", only];
    let mut command = Command::new(env!("CARGO_BIN_EXE_marlinspike"));
    command.args(["fuzz", "--op", "int4_fp8_preprocess", "--seed", "1"]).args(more);
    let output = command.current_dir(&folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("no answer within 300ms"), "{text}");
}

fn script(folder: &Path, lines: &str) -> String {
    let path = folder.join("kernel.sh");
    std::fs::write(&path, format!("{lines}\n")).unwrap();
    format!("sh {}", path.display())
}

#[test]
fn what_a_process_does_wrong_is_a_finding() {
    let scripts = [
        ("exit 3", "exit code 3"),
        ("echo the tile is too small >&2; exit 1", "the tile is too small"),
        ("kill -9 $$", "signal 9"),
        ("exit 0", "the file of outputs"),
        ("head -c 100 /dev/zero > $2", "unreadable outputs"),
        ("cp $1 $2", "found output `in.qweight`"),
    ];
    for (i, (lines, words)) in scripts.into_iter().enumerate() {
        let folder = folder(&format!("process{i}"));
        let (output, text) = fuzz(&folder, &["--cmd", &script(&folder, lines)]);
        assert_eq!(output.status.code(), Some(1), "{lines}: {text}");
        assert!(text.contains(words), "{lines}: {text}");
    }
}

/// A pipe would wait for a writer, and a device has no end.
#[test]
fn outputs_that_are_no_regular_file_are_a_finding() {
    for (i, (lines, words)) in [
        ("mkfifo $2", "not a regular file"),
        ("mkdir $2", "not a regular file"),
        ("ln -s /dev/zero $2", "not a regular file"),
        ("ln -s absent $2", "No such file"),
        ("truncate -s 1G $2", "found a file of 1073741824 bytes, expected at most"),
    ]
    .into_iter()
    .enumerate()
    {
        let folder = folder(&format!("special{i}"));
        let (output, text) = fuzz(&folder, &["--cmd", &script(&folder, lines)]);
        assert_eq!(output.status.code(), Some(1), "{lines}: {text}");
        assert!(text.contains("finding: unreadable outputs"), "{lines}: {text}");
        assert!(text.contains("the file of outputs: ") && text.contains(words), "{lines}: {text}");
    }
}

/// A program that the system does not start is an error. One that starts and then does not find another is
/// a crash.
#[test]
fn a_program_that_does_not_start_is_no_finding() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = folder("unstarted");
    let file = |name: &str, text: &str, mode: u32| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let script = file("script", "#!/no/such/interpreter\n", 0o755);
    let data = file("data", "text\n", 0o644);
    let wrapper = file("wrapper", "#!/bin/sh\nexec /no/such/kernel\n", 0o755);
    for protocol in [&[][..], &["--persistent"]] {
        for (command, words) in [
            ("./missing", "./missing: program not found"),
            (&script, "script: program not found"),
            (&script, "interpreter"),
            (&data, "data: the program cannot be started: Permission denied"),
        ] {
            let (output, text) = fuzz(&folder, &[&["--cmd", command], protocol].concat());
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{command}: {text}{error}");
            assert!(error.contains(words), "{command}: {error}");
        }
        let (output, text) = fuzz(&folder, &[&["--cmd", &wrapper], protocol].concat());
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("finding: crash") && text.contains("exit code 127"), "{text}");
    }
}

#[test]
fn a_kernel_that_supports_nothing_does_not_pass() {
    let folder = folder("nothing");
    let kernel = script(&folder, "echo not here; exit 77");
    let (output, text) = fuzz(&folder, &["--cmd", &kernel]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("nothing was judged"), "{text}");
}

#[test]
fn reports_for_programs_hold_every_finding() {
    let folder = folder("reports");
    let kernel = script(&folder, "exit 3");
    let (output, text) = fuzz(&folder, &["--cmd", &kernel, "--json", "--junit", "junit.xml"]);
    assert_eq!(output.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["summary"]["failed"], 12);
    assert_eq!(json["summary"]["findings"][0]["signature"], "crash");
    assert_eq!(json["summary"]["findings"][0]["failure"]["fault"]["fault"], "crashed");
    assert_eq!((&json["success"], &json["summary"]["shard"]), (&false.into(), &"1/1".into()));
    let file = json["files"][0].as_str().unwrap();
    assert!(folder.join(file).is_file(), "{file}");
    let xml = std::fs::read_to_string(folder.join("junit.xml")).unwrap();
    assert!(xml.contains("failures=\"1\"") && xml.contains("name=\"crash\""), "{xml}");
    // Kept cases run first.
    let (_, text) = fuzz(&folder, &["--cmd", &kernel]);
    assert!(text.contains("still fails:"), "{text}");
}

/// Two machines: each runs a shard and writes a summary; the summaries and failing cases are merged.
#[test]
fn shards_of_two_machines_are_merged() {
    let folder = folder("machines");
    let wrong = script(&folder, "exit 3");
    for number in ["1", "2"] {
        let (shard, summary) = (format!("{number}/2"), format!("{number}/summary.json"));
        std::fs::create_dir_all(folder.join(number)).unwrap();
        let kept = format!("{number}/kept");
        let more = ["--shard", &shard, "--summary", &summary, "--keep", &kept];
        let mut command = Command::new(env!("CARGO_BIN_EXE_marlinspike"));
        command.args(["fuzz", "--op", "int4_fp8_preprocess", "--seed", "1", "--cases", "12"]);
        let output = command.args(more).args(["--cmd", &wrong]).current_dir(&folder).output();
        assert_eq!(output.unwrap().status.code(), Some(1));
    }
    let both = ["1/summary.json", "2/summary.json", "--regressions", "regressions"];
    let output = merge(&folder, &both);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("2 runs, 12 cases in") && text.contains("12 fail (1 distinct)"),
        "{text}"
    );
    assert!(text.contains("finding: crash (2 runs)"), "{text}");
    assert!(std::fs::read_dir(folder.join("regressions")).unwrap().count() > 0);

    let output = merge(&folder, &["2/summary.json", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["campaigns"][0]["missing"][0]["shard"], "1/2");
    assert_eq!(json["campaigns"][0]["failed"], 6);
}

#[test]
fn arguments_that_cannot_be_used_are_named() {
    let folder = folder("arguments");
    let cases = [
        (vec!["--cmd", "x", "--where", "colour=red"], "size_k"),
        (vec!["--cmd", "x 'y"], "a quote is open"),
        (vec!["--cmd", "x", "--set", "schedule"], "KEY=VALUE"),
        (vec!["--cmd", "true", "--output", "z"], "expected one of qweight"),
        (vec!["--cmd", "x", "--shard", "0/4"], "I from 1 to N"),
        (vec!["--cmd", "x", "--shard", "5/4"], "I from 1 to N"),
        (vec!["merge", "absent.json"], "absent.json"),
    ];
    for (arguments, words) in cases {
        let output = match arguments[0] {
            "merge" => merge(&folder, &arguments[1..]),
            _ => fuzz(&folder, &arguments).0,
        };
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(words), "{arguments:?}: {error}");
    }
}
