//! The kernel formats and their options on the command line.

use std::path::Path;

use crate::support::{folder, run, stderr, stdout};

fn checkpoint(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/checkpoints");
    folder.join(name).to_str().unwrap().to_owned()
}

#[test]
fn an_option_of_one_format_is_refused_with_another() {
    let temp = folder();
    let out = temp.path().join("out");
    let (model, out) = (checkpoint("ct-int-w4a8-moe"), out.to_str().unwrap());
    for (format, option, value, owner) in [
        ("marlin", "--nr", "4", "kleidiai"),
        ("flashinfer", "--nr", "8", "kleidiai"),
        ("marlin", "--nvfp4-backend", "VLLM_CUTLASS", "flashinfer"),
        ("kleidiai", "--nvfp4-backend", "FLASHINFER_TRTLLM", "flashinfer"),
    ] {
        let output = run(["convert", &model, out, "--to", format, option, value]);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        let expected = format!("found {option} with another format, expected --to {owner}");
        assert!(text.contains(&expected), "{expected:?} is not in {text}");
        assert!(!Path::new(out).exists());
    }
    for (option, value) in [("--nr", "5"), ("--nvfp4-backend", "CUBLAS")] {
        let output = run(["convert", &model, out, "--to", "kleidiai", option, value]);
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains(value));
    }
    let output = run(["convert", &model, out, "--to", "kleidiai", "--nr", "4"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let config = std::fs::read_to_string(Path::new(out).join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let layers = config["marlinspike"]["layers"].as_object().unwrap();
    assert!(!layers.is_empty() && layers.values().all(|layer| layer["nr"] == 4));
}

#[test]
fn the_help_has_every_format_with_its_option_and_example() {
    let output = run(["convert", "--help"]);
    let help = stdout(&output);
    for text in [
        "--to kleidiai        dense rhs_packed",
        "--to flashinfer      experts' weight_packed",
        "GPTQ, AWQ            qweight",
        "--nr <",
        "--nvfp4-backend <",
        "marlinspike convert model out --to kleidiai",
        "--nvfp4-backend VLLM_CUTLASS --skip-unsupported",
        "--to kleidiai takes 4-bit weights",
    ] {
        assert!(help.contains(text), "{text:?} is not in {help}");
    }
}
