//! `marlinspike schema`: the book's page equals the program's output, JSON Schema accepts every
//! config of every lattice, and each example writes a readable case.

use crate::schema as validator;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use marlinspike::case::{Case, Op};
use marlinspike::schema;
use serde_json::{Value, json};

fn marlinspike(args: &[&str]) -> (String, String, i32) {
    let run = Command::new(env!("CARGO_BIN_EXE_marlinspike")).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (text(run.stdout), text(run.stderr), run.status.code().unwrap())
}

fn book(page: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/reference").join(page)
}

#[test]
fn the_page_is_what_the_program_prints() {
    let (printed, _, code) = marlinspike(&["schema", "--markdown"]);
    assert_eq!(code, 0);
    let page = fs::read_to_string(book("schema.md")).unwrap_or_default();
    assert!(
        page == printed,
        "stale: run `marlinspike schema --markdown > docs/src/reference/schema.md`"
    );
}

/// The header of a case, as the schema describes it.
fn header(case: &Case<'_>) -> Value {
    let tensors =
        |all: &std::collections::BTreeMap<String, marlinspike::num::tensor::Tensor<'_>>| {
            let one = |(name, tensor): (&String, &marlinspike::num::tensor::Tensor<'_>)| {
                (name.clone(), json!({"dtype": tensor.dtype().name(), "shape": tensor.shape()}))
            };
            Value::Object(all.iter().map(one).collect())
        };
    json!({
        "op": case.op.name(), "config": case.config.to_json(),
        "inputs": tensors(&case.inputs), "outputs": tensors(&case.outputs),
    })
}

#[test]
fn generated_cases_obey_the_json_schema() {
    for &(name, op) in Op::NAMED {
        let (text, _, code) = marlinspike(&["schema", "--op", name, "--json"]);
        assert_eq!(code, 0);
        let schema: Value = serde_json::from_str(&text).unwrap();
        let generator = marlinspike::vectors::Generator::new(op, 5).unwrap();
        for index in 0..6 {
            let header = header(&generator.case(index).unwrap());
            let found = validator::violations(&schema, &schema, &header, name);
            assert!(found.is_empty(), "{found:#?}");
        }
        // Wrong headers are not: a missing key, an unknown key, an unknown tensor, a wrong type.
        let right = header(&generator.case(0).unwrap());
        let required = schema["properties"]["config"]["required"].as_array().unwrap();
        for wrong in [
            edited(&right, |v| {
                let first = required.first().map_or("", |key| key.as_str().unwrap());
                v["config"].as_object_mut().unwrap().remove(first)
            }),
            edited(&right, |v| Some(std::mem::replace(&mut v["config"]["sise_m"], json!(1)))),
            edited(&right, |v| Some(std::mem::replace(&mut v["inputs"]["xx"], json!({})))),
            edited(&right, |v| Some(std::mem::replace(&mut v["op"], json!("linea")))),
        ] {
            let Some(wrong) = wrong else { continue };
            let found = validator::violations(&schema, &schema, &wrong, name);
            assert!(!found.is_empty(), "{name}: {wrong}");
        }
    }
}

/// The value after an edit; `None` where there was nothing to edit.
fn edited(value: &Value, edit: impl Fn(&mut Value) -> Option<Value>) -> Option<Value> {
    let mut value = value.clone();
    edit(&mut value).map(|_| value)
}

#[test]
fn one_config_prints_its_tensors() {
    let config = r#"{"checkpoint_format": "awq", "size_k": 128, "size_n": 64}"#;
    let args = ["schema", "--op", "int4_fp8_preprocess", "--config", config];
    let (text, _, code) = marlinspike(&args);
    assert_eq!(code, 0);
    assert!(text.lines().any(|line| line.starts_with("in.qweight") && line.contains("[128, 8]")));
    assert!(text.contains("in.qzeros") && text.contains("I32"));
    let args = ["schema", "--op", "int4_fp8_preprocess", "--config", r#"{"size_k": 128}"#];
    let (_, error, code) = marlinspike(&args);
    assert_eq!(code, 2);
    assert!(error.contains("checkpoint_format"), "{error}");
    let (list, _, _) = marlinspike(&["schema"]);
    assert!(Op::NAMED.iter().all(|(name, _)| list.contains(name)));
}

/// A Python with numpy: `MARLINSPIKE_PYTHON`, or the environment that `scripts/setup` creates.
pub(crate) fn python() -> Option<PathBuf> {
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../python/bin/python");
    let stated = std::env::var_os("MARLINSPIKE_PYTHON").map(PathBuf::from);
    [stated, Some(made), Some("python3".into())].into_iter().flatten().find(|python| {
        let imports = ["-c", "import numpy"];
        Command::new(python).args(imports).output().is_ok_and(|run| run.status.success())
    })
}

/// Prints a skipped test directly to standard output, which the harness does not capture then.
fn skipped(reason: &str, test: &str) {
    let line = format!("\nSKIPPED ({reason}): {test}\n");
    std::io::stdout().write_all(line.as_bytes()).unwrap();
}

/// Reads the case that an example wrote.
fn reads(folder: &Path, op: Op, language: &str) {
    let bytes = fs::read(folder.join("case.safetensors")).unwrap();
    let case = Case::parse(&bytes).unwrap_or_else(|e| panic!("{op} in {language}: {e}"));
    assert_eq!(case.op, op);
    assert!(!case.inputs.is_empty());
}

/// The fenced block after `intro` in the page.
fn module(language: &str, file: &str) -> String {
    let page = fs::read_to_string(book("schema.md")).unwrap();
    let fence = format!("```{language}\n");
    let blocks = page.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap_or(""));
    blocks
        .into_iter()
        .find(|block| block.lines().next().is_some_and(|l| l.contains(file)))
        .unwrap()
        .to_owned()
}

#[test]
fn python_examples_write_cases_that_are_read() {
    let Some(python) = python() else {
        skipped("no Python with numpy", "python_examples_write_cases_that_are_read");
        return;
    };
    // One process for all, since numpy takes long to import.
    let folder = tempfile::tempdir().unwrap();
    let mut all = String::from("import os, runpy, sys\nsys.path.insert(0, os.getcwd())\n");
    fs::write(folder.path().join("case_file.py"), module("python", "case_file.py")).unwrap();
    for &(name, op) in Op::NAMED {
        let example = schema::describe(op).unwrap().python_example().unwrap();
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join("example.py"), example).unwrap();
        all += &format!("os.chdir('{name}')\nrunpy.run_path('example.py', run_name='__main__')\n");
        all += "os.chdir('..')\n";
    }
    let run = Command::new(&python).args(["-c", &all]).current_dir(&folder).output().unwrap();
    // The traceback names the example's file and line.
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    for &(name, op) in Op::NAMED {
        reads(&folder.path().join(name), op, "Python");
    }
}

#[test]
fn cpp_examples_write_cases_that_are_read() {
    if Command::new("c++").arg("--version").output().is_err() {
        skipped("no C++ compiler", "cpp_examples_write_cases_that_are_read");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("case_file.hpp"), module("cpp", "case_file.hpp")).unwrap();
    // One program for all: each example's `main` becomes a function.
    let mut program = String::new();
    let mut calls = String::new();
    for (i, &(_, op)) in Op::NAMED.iter().enumerate() {
        let example = schema::describe(op).unwrap().cpp_example().unwrap();
        program += &example
            .replace("int main()", &format!("void example_{i}()"))
            .replace("case.safetensors", &format!("{op}.safetensors"));
        calls += &format!("example_{i}();");
    }
    program += &format!("int main() {{ {calls} }}\n");
    fs::write(folder.path().join("examples.cpp"), program).unwrap();
    let flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "examples.cpp", "-o", "examples"];
    let run = Command::new("c++").args(flags).current_dir(&folder).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let run = Command::new(folder.path().join("examples")).current_dir(&folder).output().unwrap();
    assert!(run.status.success());
    for &(_, op) in Op::NAMED {
        let from = folder.path().join(format!("{op}.safetensors"));
        fs::rename(from, folder.path().join("case.safetensors")).unwrap();
        reads(folder.path(), op, "C++");
    }
}
