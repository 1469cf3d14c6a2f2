//! `check --report --explorer`: the report links a wrong packed weight to its place in a layout.

use std::path::Path;
use std::process::Command;

use marlinspike::case::Op;
use marlinspike::num::tensor::Tensor;
use marlinspike::vectors::Generator;

/// Writes a case whose packed weight has one wrong bit, in word `word`.
fn damaged(folder: &Path, word: usize) {
    damaged_output(folder, "marlin_qweight", "uint4b8", word);
}

/// Writes a case of `weight_type` whose `output` has one wrong bit, in element `at`.
fn damaged_output(folder: &Path, output: &str, weight_type: &str, at: usize) {
    let generator = Generator::new(Op::Linear, 3).unwrap();
    let mut case = (0..50)
        .map(|index| generator.case(index).unwrap())
        .find(|case| {
            case.config.to_json()["weight_type"] == weight_type && case.outputs.contains_key(output)
        })
        .unwrap();
    let right = &case.outputs[output];
    let mut bytes = right.bytes().to_vec();
    // Little endian: bit 9 of a word.
    bytes[at * right.dtype().bytes() + usize::from(right.dtype().bytes() > 1)] ^= 2;
    let wrong = Tensor::new("x", right.dtype(), right.shape().to_vec(), bytes).unwrap();
    case.add_output(output, wrong);
    std::fs::write(folder.join("case.safetensors"), case.to_bytes().unwrap()).unwrap();
}

fn check(folder: &Path, more: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_marlinspike"));
    command.args(["check", "case.safetensors"]).args(more).current_dir(folder);
    let run = command.output().unwrap();
    (run.status.code(), String::from_utf8_lossy(&run.stderr).into_owned())
}

#[test]
fn the_report_links_to_the_explorer_that_is_named() {
    let folder = tempfile::tempdir().unwrap();
    damaged(folder.path(), 77);
    let page = |more: &[&str]| {
        let (code, error) = check(folder.path(), &[&["--report", "r.html"], more].concat());
        assert_eq!(code, Some(1), "{error}");
        std::fs::read_to_string(folder.path().join("r.html")).unwrap()
    };
    assert!(!page(&[]).contains("show it in the layout"));
    for address in ["https://host/explorer/", "../explorer/index.html"] {
        let page = page(&["--explorer", address]);
        let (_, link) = page.split_once(&format!("href=\"{address}#layout?")).unwrap();
        let link = link.split('"').next().unwrap().replace("&amp;", "&");
        assert!(link.starts_with("layout=marlin_qweight&size_k="), "{link}");
        // The wrong value's first bit: its code has bits 8 to 11.
        assert!(link.contains("&bits=4&") && link.ends_with("&element=77&bit=8"), "{link}");
    }
    // Quotes cannot leave the attribute.
    assert!(page(&["--explorer", "a\"b<c"]).contains("href=\"a&quot;b&lt;c#layout?"));
}

#[test]
fn scales_zero_points_and_biases_are_linked_too() {
    for (output, weight_type) in [
        ("marlin_scales", "uint4b8"),
        ("marlin_scales", "uint8b128"),
        ("marlin_scales", "float4_e2m1f"),
        ("marlin_zeros", "uint4"),
        ("marlin_bias", "uint4b8"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        damaged_output(folder.path(), output, weight_type, 3);
        let (code, error) = check(folder.path(), &["--report", "r.html", "--explorer", "x"]);
        assert_eq!(code, Some(1), "{error}");
        let page = std::fs::read_to_string(folder.path().join("r.html")).unwrap();
        let link = page
            .split_once("href=\"x#layout?")
            .unwrap_or_else(|| panic!("{output}, {weight_type}"));
        let link = link.1.split('"').next().unwrap().replace("&amp;", "&");
        assert!(link.starts_with(&format!("layout={output}")), "{link}");
        assert!(link.contains("&element=3&"), "{link}");
    }
}

#[test]
fn an_address_that_runs_a_script_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    damaged(folder.path(), 0);
    for address in ["javascript:alert(1)", "data:text/html,x", ""] {
        let (code, error) = check(folder.path(), &["--report", "r.html", "--explorer", address]);
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains("expected an http, https or file address, or a path"), "{error}");
    }
    let (code, error) = check(folder.path(), &["--explorer", "x"]);
    assert_eq!(code, Some(2));
    assert!(error.contains("--report"), "{error}");
}
