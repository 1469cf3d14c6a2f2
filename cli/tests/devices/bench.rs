//! `bench`: the output of `bench cpu` on tiny shapes is consistent; wrong arguments are rejected
//! before any measurement; `bench gpu` without a GPU is an error.

use crate::support::{run, stderr, stdout};
use serde_json::Value;

const TINY: [&str; 12] = [
    "bench",
    "cpu",
    "--shape",
    "64x96,4x2x64x32",
    "--tokens",
    "1,3",
    "--threads",
    "2",
    "--group",
    "32,channel",
    "--calls",
    "3",
];

fn tiny(more: &[&str]) -> String {
    let output = run(TINY.iter().chain(&["--quick", "--warm", "--seconds", "0"]).chain(more));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stderr(&output), "");
    stdout(&output).to_owned()
}

/// Recomputes every field from the others.
#[test]
fn json_has_a_row_for_each_case() {
    let report: Value = serde_json::from_str(&tiny(&["--json"])).unwrap();
    let machine = &report["machine"];
    assert!(machine["cpu"].is_string() && machine["pinned"].is_boolean(), "{machine}");
    let kernels: Vec<_> = marlinspike::w4a8::kernels().iter().map(|k| k.name()).collect();
    assert_eq!(machine["kernel"].as_str(), kernels.last().copied());

    let [limits] = report["limits"].as_array().unwrap().as_slice() else {
        panic!("one number of threads: {report}")
    };
    assert_eq!(limits["threads"], 2);
    let float = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value} in {report}"));
    let read = float(&limits["read_gb_s"]["best"]);
    assert!(read >= float(&limits["read_gb_s"]["median"]), "{limits}");
    assert_eq!(limits["gmac_s"].is_null(), machine["instruction"].is_null());
    let multiply = limits["gmac_s"]["best"].as_f64();

    let rows = report["results"].as_array().unwrap();
    let key = |row: &Value| {
        let tokens = row["tokens"].as_u64().unwrap();
        (row["shape"].as_str().unwrap().to_owned(), row["group_size"].as_i64().unwrap(), tokens)
    };
    let mut expected = Vec::new();
    for shape in ["64x96", "4x2x64x32"] {
        for group in [32, -1] {
            expected.extend([1, 3].map(|tokens| (shape.to_owned(), group, tokens)));
        }
    }
    assert_eq!(rows.iter().map(key).collect::<Vec<_>>(), expected);
    for row in rows {
        let tokens = float(&row["tokens"]);
        let macs = if row["shape"] == "64x96" { 64.0 * 96.0 } else { 2.0 * 3.0 * 64.0 * 32.0 };
        assert_eq!(float(&row["macs"]), tokens * macs);
        let (best, median) = (float(&row["seconds"]["best"]), float(&row["seconds"]["median"]));
        assert!(best > 0.0 && median >= best && row["seconds"]["calls"].as_u64() >= Some(3));
        let bytes = float(&row["bytes_read"]);
        assert!(bytes > 0.0 && bytes <= float(&row["weight_bytes"]), "{row}");
        let near = |found: &Value, expected: f64| {
            assert!((float(found) / expected - 1.0).abs() < 1e-9, "{found} {expected} in {row}");
        };
        near(&row["gb_s"], bytes / 1e9 / best);
        near(&row["gmac_s"], tokens * macs / 1e9 / best);
        let reading = bytes / 1e9 / read;
        let multiplying = multiply.map_or(0.0, |rate| tokens * macs / 1e9 / rate);
        let floor = reading.max(multiplying);
        near(&row["of_limit_best"], floor / best);
        near(&row["of_limit_median"], floor / median);
        assert_eq!(row["bound"], if multiplying > reading { "multiply" } else { "read" });
    }
}

#[test]
fn the_table_names_every_case() {
    let text = tiny(&[]);
    assert!(text.contains("2 threads: reads "), "{text}");
    let rows = |shape: &str| text.lines().filter(|line| line.starts_with(shape)).count();
    assert_eq!((rows(" 64x96 "), rows(" 4x2x64x32 ")), (4, 4), "{text}");
    assert_eq!(text.lines().filter(|line| line.contains(" channel ")).count(), 4, "{text}");
}

#[test]
fn wrong_arguments_are_refused() {
    let cases: [(&[&str], &str); 9] = [
        (&["--shape", "qwen"], "\"qwen\" is no workload: expected one of 4096x4096"),
        (&["--shape", "64x33"], "multiples of 32"),
        (&["--shape", "64x64", "--group", "128"], "64x64: "),
        (&["--group", "31"], "a multiple of 32 up to 1048576, or `channel`"),
        (&["--tokens", "0"], "0 is not in 1..=65536"),
        (&["--threads", "0"], "0 is not in 1..=1024"),
        (&["--seconds=-1"], "a number of seconds from 0 to 86400"),
        (&["--kernel", "gpu"], "--kernel gpu: no such kernel here"),
        (&["--shape", "1048576x1048576"], "are available"),
    ];
    for (args, expected) in cases {
        let output = run(["bench", "cpu"].iter().chain(args));
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(expected), "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{args:?}");
    }
}

/// Whether this machine has a GPU; the tests below need one without.
fn has_gpu() -> bool {
    marlinspike_accel::Device::open().is_ok()
}

#[test]
fn without_a_gpu_that_is_what_is_said() {
    if has_gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("roofline.svg");
    let output = run(["bench", "gpu", "--shape", "64x64", "--plot", svg.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(text.starts_with("error: ") && text.contains("CUDA"), "{text}");
    assert!(text.contains("help: "), "{text}");
    assert_eq!(stdout(&output), "");
    assert!(!svg.exists());
}

#[test]
fn wrong_arguments_of_gpu_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = folder.path().join("wrong.json");
    std::fs::write(&wrong, "{}").unwrap();
    let wrong = wrong.to_str().unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&["--type", "int3"], "expected one of uint4b8, "),
        (&["--tokens", "0"], "0 is not in 1..=65536"),
        (&["--replays", "0"], "0 is not in 1..=1000"),
        (&["--peers", "/nowhere/peers.json"], "/nowhere/peers.json: "),
        (&["--peers", wrong], "not a file of scripts/gpu_peers: missing field `results`"),
    ];
    for (args, expected) in cases {
        let output = run(["bench", "gpu"].iter().chain(args));
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(expected), "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{args:?}");
    }
}
