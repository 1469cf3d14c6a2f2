//! A tiny race in every detail of its JSON, and arguments that are refused.
#![allow(missing_docs)]

use std::process::{Command, Output};

use serde_json::Value;

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_peers")).args(args).output().unwrap()
}

#[test]
fn a_race_has_every_contender_once() {
    let output = run(&[
        "--shape",
        "256x64,4x2x64x32",
        "--tokens",
        "1,3",
        "--threads",
        "1,2",
        "--calls",
        "3",
        "--seconds",
        "0",
        "--warm",
        "--json",
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let with_ggml = report["ggml"].as_bool().unwrap();
    let cases = report["cases"].as_array().unwrap();
    let key = |case: &Value| {
        let number = |name: &str| case[name].as_u64().unwrap();
        (number("threads"), case["shape"].as_str().unwrap().to_owned(), number("tokens"))
    };
    let mut expected = Vec::new();
    for threads in [1, 2] {
        for shape in ["256x64", "4x2x64x32"] {
            expected.extend([1, 3].map(|tokens| (threads, shape.to_owned(), tokens)));
        }
    }
    assert_eq!(cases.iter().map(key).collect::<Vec<_>>(), expected);
    for case in cases {
        let mut names = vec!["marlinspike"];
        names.extend((case["shape"] == "256x64").then_some("candle Q4_K"));
        if with_ggml {
            names.push("ggml Q4_0");
            // Blocks of 256.
            let dense = case["shape"] == "256x64";
            names.extend(["ggml Q4_K", "ggml IQ4_XS"].into_iter().filter(|_| dense));
        }
        let contenders = case["contenders"].as_array().unwrap();
        // Few CPUs have tiles.
        let found = contenders.iter().map(|c| c["name"].as_str().unwrap());
        assert_eq!(found.filter(|name| *name != "ggml AMX").collect::<Vec<_>>(), names);
        for found in contenders {
            let float = |of: &Value, name: &str| of[name].as_f64().unwrap();
            assert!(found["calls"].as_u64().unwrap() >= 3);
            let (best, median) = (float(found, "best"), float(found, "median"));
            assert!(best > 0.0 && best <= median, "{found}");
            let ratio = |name| float(found, name) / float(&contenders[0], name);
            assert!((float(found, "ratio_best") / ratio("best") - 1.0).abs() < 1e-9);
            assert!((float(found, "ratio_median") / ratio("median") - 1.0).abs() < 1e-9);
            // The same product but for roundings: of activations to 8 bits (about 0.4 % of a row's
            // largest, twice in a layer, whose sums cancel), of weights once more for Q4_K. Other
            // weights would be 1 apart or more.
            let limit = 0.1;
            assert!(float(found, "difference") < limit, "{found}");
        }
        assert_eq!(contenders[0]["difference"], 0.0);
    }
}

/// MXFP4's weights are the same in both, so only the activations' roundings differ.
#[test]
fn mxfp4_layers_are_compared() {
    let args = ["--mxfp4", "--shape", "4x2x64x32", "--tokens", "1,3", "--threads", "1"];
    let output = run(&[&args[..], &["--calls", "3", "--seconds", "0", "--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let count = if report["ggml"].as_bool().unwrap() { 3 } else { 1 };
    for case in report["cases"].as_array().unwrap() {
        let contenders = case["contenders"].as_array().unwrap();
        assert_eq!(contenders.len(), count);
        assert!(contenders.iter().all(|c| c["difference"].as_f64().unwrap() < 0.01), "{case}");
    }
    let refused = run(&["--mxfp4", "--shape", "64x64", "--threads", "1"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("MXFP4 is compared in layers only"));
}

#[test]
fn wrong_arguments_are_refused() {
    let cases: [(&[&str], &str); 5] = [
        (&["--shape", "qwen"], "\"qwen\" is no workload"),
        (&["--group", "0"], "group_size"),
        (&["--shape", "64x64", "--group", "128"], "128"),
        (&["--tokens", "0"], "0 is not in"),
        (&["--seconds", "nan"], "--seconds"),
    ];
    for (args, expected) in cases {
        let output = run(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{args:?} {error}");
        assert!(error.contains(expected), "{args:?} {error}");
    }
}
