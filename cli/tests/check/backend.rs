//! `check --backend cuda`: an error that states the reason on a machine without a GPU; with one,
//! the golden cases pass, and outputs that no kernel computes are left unchecked.

use crate::support::{run, stderr, stdout};
use serde_json::Value;

#[test]
fn a_machine_without_a_gpu_is_a_refusal_and_no_pass() {
    if marlinspike_accel::Device::open().is_ok() {
        return;
    }
    for json in [&[][..], &["--json"]] {
        let output = run(["check", "--backend", "cuda"].iter().chain(json));
        assert_eq!(output.status.code(), Some(2));
        let text = stderr(&output);
        assert!(text.starts_with("error: ") && text.contains("CUDA"), "{text}");
        assert!(text.contains("help: use a machine with an NVIDIA GPU and its driver"), "{text}");
        // `--json` says so in JSON, too.
        let lines: Vec<Value> =
            stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), json.len());
        assert!(lines.iter().all(|line| line["error"].as_str().unwrap().contains("CUDA")));
    }
}

#[test]
fn other_backends_are_refused_by_name() {
    let output = run(["check", "--backend", "rocm"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("[possible values: cuda]"), "{}", stderr(&output));
}

#[test]
fn golden_cases_pass_on_a_gpu() {
    if marlinspike_accel::Device::open().is_err() {
        println!("SKIPPED (no CUDA device): golden_cases_pass_on_a_gpu");
        return;
    }
    let output = run(["check", "--backend", "cuda", "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let last = stdout(&output).lines().last().unwrap();
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!((&last["summary"]["fail"], &last["summary"]["error"]), (&0.into(), &0.into()));
    let operations = last["device"]["operations"].as_object().unwrap();
    assert!(operations.values().all(|count| count["differing"] == 0), "{last}");
    let absent = last["device"]["not_on_cuda"].as_object().unwrap();
    let absent: u64 = absent.values().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(Some(absent), last["summary"]["outputs_unchecked"].as_u64());
}
