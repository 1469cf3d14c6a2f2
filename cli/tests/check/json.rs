//! `check --json`: every line conforms to docs/src/check.schema.json, whatever the result of the
//! run.

use crate::schema::violations;
use crate::support::*;
use serde_json::{Value, json};

fn published() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/check.schema.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Violations of the schema.
fn of(schema: &Value, line: &Value) -> Vec<String> {
    violations(schema, schema, line, "line")
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A product with large activations, whose partial sums may overflow: it has no bound.
fn unbounded() -> CaseFile {
    let mut case = CaseFile::golden("linear-bf16_u8b128_g128_act0");
    let largest = vec![0x7f7f; case.halves("in.x").len()];
    case.set_halves("in.x", &largest);
    let zero = vec![0; case.halves("out.y").len()];
    case.set_halves("out.y", &zero);
    case
}

/// Lines of cases that pass, fail in a packed weight, fail in a product, are not checked, and cannot
/// be read, and the summary.
fn every_kind() -> Vec<Value> {
    let folder = folder();
    CaseFile::golden(PASSING).write(folder.path(), "a");
    flipped().write(folder.path(), "b");
    let mut product = CaseFile::golden(LINEAR);
    let mut y = product.halves("out.y");
    y[5] ^= 0x4000;
    product.set_halves("out.y", &y);
    product.write(folder.path(), "c");
    unbounded().write(folder.path(), "d");
    let mut truncated = CaseFile::golden(LINEAR);
    truncated.bytes.truncate(5000);
    truncated.write(folder.path(), "e");
    check_json(&[folder.path()]).1
}

#[test]
fn every_line_is_as_published() {
    let schema = published();
    let kinds = every_kind();
    let verdicts: Vec<_> =
        kinds[..5].iter().map(|line| line["verdict"].as_str().unwrap()).collect();
    assert_eq!(verdicts, ["pass", "fail", "fail", "unchecked", "error"]);
    assert!(output(&kinds[1], "marlin_qweight")["first_mismatch"]["fragment"].is_object());
    let golden = run(["check", "--json"]);
    let golden = lines(stdout(&golden));
    assert!(golden.iter().any(|line| line.get("known_fault").is_some()));
    for line in kinds.iter().chain(&golden) {
        assert_eq!(of(&schema, line), [""; 0], "{line}");
    }
    // With a device, the summary has a second key.
    let mut last = golden.last().unwrap().clone();
    let count = json!({"calls": 2, "outputs": 10, "differing": 0});
    last["device"] =
        json!({"name": "GPU", "operations": {"moe_sum": count}, "not_on_cuda": {"x": 1}});
    assert_eq!(of(&schema, &last), [""; 0]);
    last["device"]["operations"]["moe_sum"]["calls"] = json!("2");
    assert!(!of(&schema, &last).is_empty());
}

/// Every path in a document: the keys and indices that lead to each value.
fn places(value: &Value, path: &str, found: &mut Vec<String>) {
    let parts: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, part)| (key.clone(), part)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect(),
        _ => Vec::new(),
    };
    for (key, part) in parts {
        let path = format!("{path}/{key}");
        places(part, &path, found);
        found.push(path);
    }
}

#[test]
fn a_changed_document_is_noticed() {
    let schema = published();
    let mut changed = 0;
    for line in every_kind() {
        let mut found = Vec::new();
        places(&line, "", &mut found);
        for path in found {
            let (parent, key) = path.rsplit_once('/').unwrap();
            // A value of another type.
            let mut other = line.clone();
            *other.pointer_mut(&path).unwrap() = json!({"other": [null]});
            assert!(!of(&schema, &other).is_empty(), "{path} may be anything");
            // A missing, a renamed, and an added key.
            let mut other = line.clone();
            let Some(Value::Object(map)) = other.pointer_mut(parent) else { continue };
            let value = map.remove(key).unwrap();
            assert!(!of(&schema, &other).is_empty(), "{path} may be absent");
            let Some(Value::Object(map)) = other.pointer_mut(parent) else { continue };
            map.insert(format!("{key}s"), value.clone());
            assert!(!of(&schema, &other).is_empty(), "{path} may have another name");
            let Some(Value::Object(map)) = other.pointer_mut(parent) else { continue };
            map.insert(key.to_owned(), value);
            assert!(!of(&schema, &other).is_empty(), "{path}s is new");
            changed += 1;
        }
    }
    assert!(changed > 200, "{changed}");
}

#[test]
fn a_run_that_fails_as_a_whole_prints_json() {
    let schema = published();
    let case = golden(PASSING);
    let case = case.to_str().unwrap();
    let folder = folder();
    let report = folder.path().join("missing/report.html");
    let report = report.to_str().unwrap();
    let runs = [
        (vec!["--only", "qweigth", case], "no output of 1 case matches `qweigth`", 1),
        (
            vec!["--class", "nonsense", case],
            "--class: found `nonsense`, expected one of f32-any-order",
            1,
        ),
        (
            vec!["--convention", "nonsense", case],
            "--convention: found `nonsense`, expected one of ",
            1,
        ),
        // The verdicts come first.
        (vec!["--report", report, case], "cannot be written", 3),
    ];
    for (arguments, error, count) in runs {
        let output = run(["check", "--json"].iter().chain(&arguments));
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let lines = lines(stdout(&output));
        assert_eq!(lines.len(), count, "{arguments:?}: {lines:?}");
        lines.iter().for_each(|line| assert_eq!(of(&schema, line), [""; 0], "{line}"));
        let last = lines.last().unwrap();
        assert!(last["error"].as_str().unwrap().contains(error), "{last}");
        // Standard error has the same as text.
        assert!(stderr(&output).contains(last["error"].as_str().unwrap()), "{}", stderr(&output));
        assert!(stderr(&output).contains(last["help"].as_str().unwrap()), "{}", stderr(&output));
    }
    let nowhere = command()
        .args(["check", "--json"])
        .env("MARLINSPIKE_GOLDEN", "/nonexistent")
        .output()
        .unwrap();
    let lines = lines(stdout(&nowhere));
    assert_eq!((nowhere.status.code(), lines.len()), (Some(2), 1));
    assert!(lines[0]["error"].as_str().unwrap().starts_with("no golden data"), "{}", lines[0]);
}
