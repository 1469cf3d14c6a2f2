//! `marlinspike check` as a program: golden cases pass; modified copies fail, with the place and
//! the reason.

use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use crate::support::*;
use serde_json::{Value, json};

const ACT_ORDER: &str = "linear-f16_u4b8_g32_act1";

#[test]
fn golden_cases_have_no_wrong_bit() {
    let output = run(["check", "--json"]);
    let lines: Vec<Value> =
        stdout(&output).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let manifest = marlinspike_golden::Manifest::load().unwrap();
    let (summary, cases) = lines.split_last().unwrap();
    let summary = &summary["summary"];
    assert_eq!(cases.len(), manifest.cases().len());
    assert_eq!(summary["cases"], manifest.cases().len());
    assert_eq!((&summary["fail"], &summary["error"]), (&json!(0), &json!(0)));
    let count = |key: &str| summary[key].as_u64().unwrap();
    assert!(count("outputs_pass") > 100, "{summary}");
    // Outputs with a known fault of their producer fail as the manifest records.
    let faults = manifest.cases().iter().filter(|c| c.known_fault.is_some()).count();
    assert_eq!((faults, &summary["fail_as_recorded"]), (4, &json!(4)));
    for (case, entry) in cases.iter().zip(manifest.cases()) {
        assert_eq!(case["known_fault"], json!(entry.known_fault), "{}", entry.path);
        assert_eq!(case["verdict"] == "fail", entry.known_fault.is_some(), "{}", entry.path);
    }
    let complete = count("outputs_unchecked") == 0;
    assert_eq!(output.status.code(), Some(if complete { 0 } else { 1 }));
    // Every layout output was judged, in the order of the manifest.
    for (case, entry) in cases.iter().zip(manifest.cases()) {
        assert!(case["path"].as_str().unwrap().ends_with(&entry.path));
        for o in case["outputs"].as_array().unwrap() {
            if o["name"].as_str().unwrap().contains("marlin") {
                assert_eq!((&o["verdict"], &o["equal_bits"]), (&json!("pass"), &json!(1.0)));
            }
        }
    }
}

#[test]
fn exit_0_only_when_everything_was_checked_and_passed() {
    let passing = golden(PASSING);
    let (code, lines) = check_json(&[&passing]);
    assert_eq!((code, &lines[0]["verdict"]), (0, &json!("pass")));
    // Only the layout outputs; the others are not computed.
    let linear = golden(LINEAR);
    let arguments = ["--only".as_ref(), "marlin_*".as_ref(), linear.as_path()];
    let (code, lines) = check_json(&arguments);
    assert_eq!((code, lines[0]["outputs"].as_array().unwrap().len()), (0, 3));
}

/// As an explicit file, a golden case with a known fault of its producer fails like any other case.
#[test]
fn a_known_fault_fails_whoever_made_it() {
    let path = golden("linear-tp2_0_rank0");
    let (code, lines) = check_json(&[&path]);
    assert_eq!((code, &lines[0]["verdict"]), (1, &json!("fail")));
    assert_eq!(lines[0].get("known_fault"), None);
    let y = output(&lines[0], "y");
    assert_eq!(y["diagnosis_id"], "upstream-k-slice-scales");
    assert_eq!(lines[1]["summary"]["fail"], 1);
    // Damage that the fault does not explain is not a known fault.
    let root = folder();
    let manifest = marlinspike_golden::Manifest::load().unwrap();
    let mut list: Value =
        serde_json::from_str(&std::fs::read_to_string(manifest.path("manifest.json")).unwrap())
            .unwrap();
    let cases = list["cases"].as_array_mut().unwrap();
    cases.retain(|c| c["path"].as_str().unwrap().contains("linear-tp2_0_rank"));
    cases[1]["known_fault"] = json!("upstream-nvfp4-bias-scaled");
    (list["tables"], list["checkpoints"]) = (json!([]), json!([]));
    list["models"] = json!([]);
    std::fs::create_dir_all(root.path().join("data/cases")).unwrap();
    for entry in list["cases"].as_array().unwrap() {
        let path = entry["path"].as_str().unwrap();
        std::fs::copy(manifest.path(path), root.path().join(path)).unwrap();
    }
    std::fs::write(root.path().join("manifest.json"), list.to_string()).unwrap();
    let output = command().arg("check").env("MARLINSPIKE_GOLDEN", root.path()).output().unwrap();
    let text = unwrapped(stdout(&output));
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("as expected, a known fault of upstream: upstream-k-slice-scales"),
        "{text}"
    );
    assert!(
        text.contains("1 failed")
            && text.contains("1 with the fault that golden/manifest.json records"),
        "{text}"
    );
}

#[test]
fn a_flipped_nibble_is_found() {
    let folder = folder();
    let path = flipped().write(folder.path(), "flipped");
    let (code, lines) = check_json(&[&path]);
    assert_eq!(code, 1);
    let wrong = output(&lines[0], "marlin_qweight");
    let expected = marlin_position(3, 250, 3);
    let first = &wrong["first_mismatch"];
    assert_eq!((&wrong["verdict"], &wrong["mismatches"]), (&json!("fail"), &json!(1)));
    assert_eq!(first["index"], json!([3, 250]));
    assert_eq!((&first["bit"], &first["width"]), (&json!(12), &json!(4)));
    assert_eq!((&first["k"], &first["n"]), (&json!(expected.k), &json!(expected.n)));
    let fragment = &first["fragment"];
    let tile = [&fragment["tile_k"], &fragment["tile_n"]];
    assert_eq!(tile, [&json!(expected.tile.0), &json!(expected.tile.1)]);
    assert_eq!(fragment["lane"], expected.lane);
    assert_eq!(fragment["register"], expected.register);
    let right = CaseFile::golden(LINEAR);
    let word = right.words("out.marlin_qweight")[3 * right.shape("out.marlin_qweight")[1] + 250];
    let nibble = word >> 12 & 15;
    assert_eq!(first["expected"], format!("{nibble:#x}"));
    assert_eq!(first["found"], format!("{:#x}", nibble ^ 5));

    // The same as text.
    let shown = run(["check", path.to_str().unwrap()]);
    let text = unwrapped(stdout(&shown));
    assert_eq!(shown.status.code(), Some(1));
    let Position { k, n, tile, lane, register } = expected;
    for part in [
        "out.marlin_qweight[3, 250], bits 12 to 15".to_owned(),
        format!("(k, n) = ({k}, {n})"),
        format!("tile ({}, {}), lane {lane}", tile.0, tile.1),
        format!("register {register}"),
        format!("expected {nibble:#x}, found {:#x}", nibble ^ 5),
        "99.9980 %".to_owned(),
        "FAIL".to_owned(),
    ] {
        assert!(text.contains(&part), "no {part:?} in\n{text}");
    }
    assert!(!text.contains("100.0"), "{text}");
}

#[test]
fn swapped_scale_columns_are_named() {
    let folder = folder();
    let path = swapped_columns().write(folder.path(), "swapped");
    let (code, lines) = check_json(&[&path]);
    let wrong = output(&lines[0], "marlin_scales");
    let (a, b) = (grouped_column(17), grouped_column(42));
    let diagnosis = wrong["diagnosis"].as_str().unwrap();
    assert_eq!((code, &wrong["verdict"]), (1, &json!("fail")));
    assert!(diagnosis.contains(&format!("{a} and {b} are swapped")), "{diagnosis}");
    assert_eq!(wrong["diagnosis_unexplained"], 0);
    assert_eq!(wrong["first_mismatch"]["index"], json!([0, 17]));
    assert_eq!(wrong["first_mismatch"]["n"], a);
    assert_eq!(wrong["first_mismatch"]["group"], 0);
    assert_eq!(wrong["first_mismatch"]["fragment"], Value::Null);
    assert_eq!(output(&lines[0], "marlin_qweight")["verdict"], "pass");
}

#[test]
fn the_other_scale_permutation_is_recognized() {
    let folder = folder();
    let mut case = CaseFile::golden(LINEAR);
    let columns = case.shape("out.marlin_scales")[1];
    let mut scales = case.halves("out.marlin_scales");
    for row in scales.chunks_exact_mut(columns) {
        let mut logical = vec![0; columns];
        (0..columns).for_each(|s| logical[grouped_column(s)] = row[s]);
        (0..columns).for_each(|s| row[s] = logical[single_column(s)]);
    }
    case.set_halves("out.marlin_scales", &scales);
    let path = case.write(folder.path(), "other-permutation");
    let (code, lines) = check_json(&[&path]);
    let wrong = output(&lines[0], "marlin_scales");
    assert_eq!(code, 1);
    assert_eq!(wrong["diagnosis_id"], "scales-other-permutation");
    assert_eq!(wrong["diagnosis_unexplained"], 0);
    let shown = run(["check", path.to_str().unwrap()]);
    let count = wrong["mismatches"].as_u64().unwrap();
    let words = format!("{count} of {count} wrong values explained: ");
    assert!(unwrapped(stdout(&shown)).contains(&words), "{}", stdout(&shown));
}

#[test]
fn weights_without_the_act_order_gather_are_recognized() {
    let folder = folder();
    let mut case = CaseFile::golden(ACT_ORDER);
    let [rows, row_words] = case.shape("out.marlin_qweight").try_into().unwrap();
    let size_n = case.shape("in.qweight")[1];
    // The checkpoint packs eight k of a column into a word, lowest nibble first.
    let source = case.words("in.qweight");
    let code = |k: usize, n: usize| source[k / 8 * size_n + n] >> (4 * (k % 8)) & 15;
    let word = |i: usize| {
        let nibble = |p| {
            let at = marlin_position(i / row_words, i % row_words, p);
            code(at.k, at.n) << (4 * p)
        };
        (0..8).map(nibble).sum()
    };
    let packed: Vec<u32> = (0..rows * row_words).map(word).collect();
    assert_ne!(packed, case.words("out.marlin_qweight"));
    case.set_words("out.marlin_qweight", &packed);
    let path = case.write(folder.path(), "not-gathered");
    let (code, lines) = check_json(&[&path]);
    let wrong = output(&lines[0], "marlin_qweight");
    assert_eq!((code, &wrong["diagnosis_id"]), (1, &json!("act-order-ignored")));
    assert_eq!(wrong["diagnosis_unexplained"], 0);
}

#[test]
fn unreadable_files_are_named_and_the_others_checked() {
    let folder = folder();
    let whole = CaseFile::golden(PASSING);
    whole.write(folder.path(), "a-good");
    let mut truncated = CaseFile::golden(LINEAR);
    truncated.bytes.truncate(5000);
    truncated.write(folder.path(), "b-truncated");
    let mut unknown = CaseFile::golden(LINEAR);
    unknown.rename("out.marlin_scales", "out.marlin_scalex");
    unknown.write(folder.path(), "c-unknown");
    std::fs::write(folder.path().join("d-empty.safetensors"), b"").unwrap();
    std::fs::create_dir(folder.path().join("e")).unwrap();
    flipped().write(&folder.path().join("e"), "f-wrong");

    let (code, lines) = check_json(&[folder.path()]);
    assert_eq!(code, 2);
    let verdicts: Vec<_> = lines[..5].iter().map(|l| l["verdict"].as_str().unwrap()).collect();
    assert_eq!(verdicts, ["pass", "error", "error", "error", "fail"]);
    let error = |i: usize| lines[i]["error"].as_str().unwrap();
    assert!(error(1).contains("b-truncated.safetensors: tensor `"), "{}", error(1));
    assert!(error(1).contains("expected at most"), "{}", error(1));
    assert!(error(2).contains("tensor `out.marlin_scalex` is unknown"), "{}", error(2));
    assert!(error(2).contains("out.marlin_scales"), "{}", error(2));
    assert!(error(3).contains("ends after 0 bytes, expected at least 8"), "{}", error(3));
    let expected = json!({
        "path": folder.path().join("d-empty.safetensors"), "op": null, "name": null,
        "verdict": "error", "outputs": [], "error": error(3),
    });
    assert_eq!(lines[3], expected);
    let summary = &lines[5]["summary"];
    for (key, count) in [("cases", 5), ("pass", 1), ("fail", 1), ("error", 3), ("unchecked", 0)] {
        assert_eq!(summary[key], count, "{key}");
    }

    let shown = run(["check".as_ref(), "-v".as_ref(), folder.path()]);
    assert_eq!(shown.status.code(), Some(2));
    let text = unwrapped(stdout(&shown));
    for part in ["a-good", "e/f-wrong", "ERROR", error(1), error(2), error(3)] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    // Passing outputs are listed only on request.
    let shown = run(["check".as_ref(), folder.path()]);
    let text = unwrapped(stdout(&shown));
    assert!(text.contains("e/f-wrong") && !text.contains("a-good"), "{text}");
    assert!(text.contains("1 of 5 cases pass in "), "{text}");
    assert!(text.contains(" s; 1 failed; 3 could not be read "), "{text}");
}

#[test]
fn json_lines_have_the_documented_keys() {
    let folder = folder();
    let wrong = flipped().write(folder.path(), "flipped");
    let (_, lines) = check_json(&[&wrong, &golden(PASSING)]);
    assert_eq!(lines.len(), 3);
    for case in &lines[..2] {
        let keys: Vec<_> = case.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["path", "op", "name", "verdict", "outputs", "error"]);
        for o in case["outputs"].as_array().unwrap() {
            for key in [
                "name",
                "verdict",
                "elements",
                "equal_bits",
                "max_ulp",
                "max_error_over_bound",
                "first_mismatch",
                "diagnosis",
                "diagnosis_strength",
                "conventions",
                "power",
            ] {
                assert!(o.get(key).is_some(), "{key} in {o}");
            }
            let failed = o["verdict"] == "fail";
            assert_eq!(o["first_mismatch"].is_object(), failed, "{o}");
            assert_eq!(o["equal_bits"].is_null(), o["verdict"] == "unchecked", "{o}");
        }
    }
    let y = output(&lines[0], "y");
    let shape = CaseFile::golden(LINEAR).shape("out.y");
    assert_eq!(y["elements"], shape.iter().product::<usize>());
    let summary = lines[2]["summary"].as_object().unwrap();
    for key in [
        "cases",
        "pass",
        "fail",
        "error",
        "unchecked",
        "outputs_pass",
        "outputs_fail",
        "outputs_unchecked",
    ] {
        assert!(summary[key].is_u64(), "{key}");
    }
    assert_eq!(summary["fail"], 1);
    assert_eq!(summary["pass"], 1);
}

#[test]
fn only_selects_outputs_and_skips_cases_without() {
    let folder = folder();
    flipped().write(folder.path(), "flipped");
    CaseFile::golden("router-softmax_1_1").write(folder.path(), "router");
    let only =
        |pattern: &'static str| check_json(&["--only".as_ref(), pattern.as_ref(), folder.path()]);
    // The wrong output is not selected.
    let (code, lines) = only("*scales");
    assert_eq!((code, lines.len()), (0, 2));
    let names: Vec<_> =
        lines[0]["outputs"].as_array().unwrap().iter().map(|o| &o["name"]).collect();
    assert_eq!(names, ["marlin_scales"]);
    assert_eq!(
        (&lines[1]["summary"]["cases"], &lines[1]["summary"]["skipped"]),
        (&json!(1), &json!(1))
    );
    let (code, lines) = only("*qweight");
    assert_eq!((code, &lines[0]["verdict"]), (1, &json!("fail")));
    // A pattern without a match checks nothing, which is not a success.
    let nothing = run(["check", "--only", "qweigth", folder.path().to_str().unwrap()]);
    assert_eq!((nothing.status.code(), stdout(&nothing)), (Some(2), ""));
    assert!(stderr(&nothing).contains("error: no output of 2 cases matches `qweigth`"));
    assert!(stderr(&nothing).contains("help: similar names: "), "{}", stderr(&nothing));
    assert!(stderr(&nothing).contains("`marlin_qweight`"), "{}", stderr(&nothing));
}

/// A dash names standard input. The verdict is the file's; other input is an error of that case
/// only.
#[test]
fn a_case_is_read_from_standard_input() {
    let check = |input: Vec<u8>, others: &[&Path]| {
        let mut command = command();
        command.args(["check", "--json", "-"]).args(others);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(&input).unwrap();
        let output = child.wait_with_output().unwrap();
        let lines: Vec<Value> =
            stdout(&output).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        (output.status.code().unwrap(), lines)
    };
    let right = golden(PASSING);
    let (code, lines) = check(std::fs::read(&right).unwrap(), &[]);
    assert_eq!((code, &lines[0]["path"], &lines[0]["verdict"]), (0, &json!("-"), &json!("pass")));
    let (_, of_file) = check_json(&[&right]);
    assert_eq!(lines[0]["outputs"], of_file[0]["outputs"]);
    let (code, lines) = check(flipped().bytes, &[&right]);
    let verdicts: Vec<_> = lines[..2].iter().map(|l| &l["verdict"]).collect();
    assert_eq!((code, verdicts), (1, vec![&json!("fail"), &json!("pass")]));
    for bad in [Vec::new(), b"not a case".to_vec()] {
        let (code, lines) = check(bad, &[&right]);
        assert_eq!((code, &lines[1]["verdict"]), (2, &json!("pass")));
        let error = lines[0]["error"].as_str().unwrap();
        assert!(error.starts_with("-: "), "{error}");
    }
}

#[test]
fn wrong_usage_is_bad_input() {
    for arguments in [&["check", "--nonsense"][..], &["check", "--only", "[", "x"], &["chekc"], &[]]
    {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!stderr(&output).is_empty(), "{arguments:?}");
    }
    let version = run(["--version"]);
    assert_eq!(version.status.code(), Some(0));
    let first = format!("marlinspike {}", env!("CARGO_PKG_VERSION"));
    assert!(stdout(&version).starts_with(&first), "{}", stdout(&version));
    let help = run(["check", "--help"]);
    for part in ["Examples:", "Exit codes:", "skipped", "equal in every bit"] {
        assert!(stdout(&help).contains(part), "{part}");
    }
}

#[test]
fn paths_without_cases_are_bad_input() {
    let folder = folder();
    let missing = folder.path().join("missing.safetensors");
    for (path, reason) in
        [(missing.as_path(), "No such file"), (folder.path(), "found no file named *.safetensors")]
    {
        let (code, lines) = check_json(&[path]);
        let error = lines[0]["error"].as_str().unwrap();
        assert_eq!(code, 2);
        assert!(error.contains(reason) && error.contains(path.to_str().unwrap()), "{error}");
    }
}

#[test]
fn golden_cases_must_be_there_and_untouched() {
    let nowhere =
        command().arg("check").env("MARLINSPIKE_GOLDEN", "/nonexistent").output().unwrap();
    assert_eq!((nowhere.status.code(), stdout(&nowhere)), (Some(2), ""));
    assert!(stderr(&nowhere).starts_with("error: no golden data"), "{}", stderr(&nowhere));
    assert!(stderr(&nowhere).contains("help: name the case files"), "{}", stderr(&nowhere));

    // One changed file of the right length, all others missing.
    let root = folder();
    let manifest = marlinspike_golden::Manifest::load().unwrap();
    std::fs::copy(manifest.path("manifest.json"), root.path().join("manifest.json")).unwrap();
    let cases = root.path().join("data/cases");
    std::fs::create_dir_all(&cases).unwrap();
    let changed = flipped().write(&cases, LINEAR);
    let output = command()
        .args(["check", "--json"])
        .env("MARLINSPIKE_GOLDEN", root.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let lines = stdout(&output).lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    let changed = changed.to_str().unwrap().to_owned();
    let line = lines.into_iter().find(|l| l["path"] == changed).unwrap();
    assert_eq!(line["verdict"], "error");
    assert!(line["error"].as_str().unwrap().contains("SHA-256"), "{line}");
}

#[test]
fn colours_only_where_wanted() {
    let path = golden(PASSING);
    let path = path.to_str().unwrap();
    assert!(!stdout(&run(["check", path])).contains('\u{1b}'));
    assert!(stdout(&run(["check", path, "--color", "always"])).contains('\u{1b}'));
}

#[test]
fn text_from_files_cannot_steer_the_terminal() {
    let folder = folder();
    let mut case = CaseFile::golden(LINEAR);
    case.rename("out.marlin_scales", "out.\\u001b[2Jscal");
    let path = case.write(folder.path(), "escape");
    let shown = run(["check", path.to_str().unwrap()]);
    assert_eq!(shown.status.code(), Some(2));
    assert!(stdout(&shown).contains("out.\\u{1b}[2Jscal"), "{}", stdout(&shown));
    assert!(!stdout(&shown).contains('\u{1b}'));
}

#[test]
fn a_reader_that_leaves_is_no_panic() {
    let mut child = command()
        .args(["check".as_ref(), golden(LINEAR).as_path()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(stderr(&output), "");
    assert_eq!(output.status.code(), Some(0));
}
