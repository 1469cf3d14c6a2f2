//! Files that are too large, nested too deeply or of wrong shapes: every other file keeps its
//! verdict, in `--json` too.

use std::path::{Path, PathBuf};

use crate::support::*;
use serde_json::{Value, json};

const ALIGN: &str = "moe_align_block_size-2_-1";

/// A golden case with `from` replaced by `to` in its header; the header's length is adjusted.
fn changed(folder: &Path, name: &str, case: &str, from: &str, to: &str) -> PathBuf {
    let bytes = std::fs::read(golden(case)).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..end]).unwrap();
    assert!(header.contains(from), "no {from} in {header}");
    let header = header.replacen(from, to, 1);
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[end..]].concat();
    let path = folder.join(format!("{name}.safetensors"));
    std::fs::write(&path, file).unwrap();
    path
}

#[test]
fn a_hostile_file_leaves_the_others_their_verdicts() {
    let folder = folder();
    let at = folder.path();
    let deep = format!("\\\"num_experts\\\": {}", "[".repeat(100_000));
    changed(at, "a_deep", ALIGN, "\\\"num_experts\\\": 64", &deep);
    changed(at, "b_experts", ALIGN, "\\\"num_experts\\\": 64", "\\\"num_experts\\\": 2147483647");
    changed(at, "c_block", ALIGN, "\\\"block_size\\\": 48", "\\\"block_size\\\": 2147483647");
    changed(at, "d_shape", ALIGN, "\"shape\":[3072]", "\"shape\":[48,64]");
    std::fs::copy(golden(PASSING), at.join("e_right.safetensors")).unwrap();
    let (code, lines) = check_json(&[at]);
    assert_eq!(code, 2);
    let verdicts: Vec<&Value> = lines[..5].iter().map(|line| &line["verdict"]).collect();
    assert_eq!(verdicts, ["error", "error", "error", "fail", "pass"]);
    let error = |i: usize| lines[i]["error"].as_str().unwrap();
    assert!(error(0).contains("`config` is not a JSON object"), "{}", error(0));
    assert!(error(1).contains("num_experts 2147483647 takes 68.7 GB of memory"), "{}", error(1));
    assert!(error(2).contains("blocks of 2147483647"), "{}", error(2));
    let sorted = output(&lines[3], "sorted_token_ids");
    assert_eq!(sorted["diagnosis_id"], "wrong-shape");
    assert_eq!(sorted["diagnosis"], "found I32 [48, 64], expected I32 [any]");
    assert_eq!(output(&lines[3], "expert_ids")["verdict"], "pass");
    let summary = &lines[5]["summary"];
    assert_eq!((&summary["error"], &summary["outputs_fail"]), (&json!(3), &json!(1)));
}

#[test]
fn max_work_is_a_limit_that_can_be_raised() {
    let case = golden(LINEAR);
    let path = case.to_str().unwrap();
    let shown = run(["check", "--max-work", "1000", path]);
    assert_eq!(shown.status.code(), Some(2));
    let text = unwrapped(stdout(&shown));
    assert!(text.contains("multiply-adds; the limit is 1000, which --max-work raises"), "{text}");
    assert_eq!(run(["check", "--max-work", "1000000000", path]).status.code(), Some(0));
    assert_eq!(run(["check", path]).status.code(), Some(0));
}
