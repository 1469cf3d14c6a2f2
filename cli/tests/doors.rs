//! Hostile files and out-of-range arguments, for every command.
#![allow(missing_docs)]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{folder, golden, run, stderr, stdout};

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/checkpoints").join(name)
}

/// A copy of a sample checkpoint.
fn copied(name: &str, to: &Path) -> PathBuf {
    let to = to.join(name);
    fs::create_dir_all(&to).unwrap();
    for file in fs::read_dir(checkpoint(name)).unwrap() {
        let file = file.unwrap().path();
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
    to
}

/// A safetensors file from its header and data.
fn container(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn read(bytes: &[u8]) -> (Value, &[u8]) {
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..end]).unwrap(), &bytes[end..])
}

#[track_caller]
fn refused(output: &Output, parts: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn numbers_out_of_range_are_refused_with_the_range() {
    let temp = folder();
    let out = temp.path().join("out");
    let (model, out) = (checkpoint("ct-pack-moe"), out.to_str().unwrap());
    let model = model.to_str().unwrap();
    let threads = "from 1 to 1024";
    let ranks = "from 1 to 4096";
    let size = "from 0.000001 to 1000000";
    let convert: &[&str] = &["convert", model, out, "--to", "marlin"];
    let vectors: &[&str] = &["vectors", "--op", "linear", "--out", out];
    let cases: &[(&[&str], &str, &[&str], &str)] = &[
        (convert, "--threads", &["100000", "0", "-1", "many"], threads),
        (convert, "--max-shard-size", &["-1", "nan", "inf", "0", "1e300"], size),
        (convert, "--tp-size", &["0", "4097", "1e3"], ranks),
        (convert, "--ep-size", &["0", "18446744073709551616"], ranks),
        (convert, "--tp-rank", &["4096", "x"], "from 0 to 4095"),
        (convert, "--ep-rank", &["4096", "0.5"], "from 0 to 4095"),
        (&["inspect", model], "--tp-size", &["0", "4097"], ranks),
        (&["inspect", model], "--capability", &["9", "0.0", "nan", "9.99"], "such as 8.0"),
        (&["run", model], "--threads", &["100000", "0"], threads),
        (&["run", model], "--tokens", &["0", "1048577"], "from 1 to 1048576"),
        (&["run", model], "--repeat", &["0", "1000001"], "from 1 to 1000000"),
        (&["run", model], "--seed", &["x", "18446744073709551616"], "--seed"),
        (vectors, "--count", &["0", "1000000001"], "from 1 to 1000000000"),
        (vectors, "--seed", &["nan"], "from 0 below 2^64"),
        (&["bench", "cpu"], "--threads", &["0", "1025"], "1..=1024"),
        (&["bench", "cpu"], "--tokens", &["0", "65537"], "1..=65536"),
        (&["bench", "cpu"], "--calls", &["0", "1000001"], "1..=1000000"),
        (&["bench", "cpu"], "--seconds", &["nan", "inf", "86401"], "from 0 to 86400"),
        (
            &["bench", "cpu"],
            "--group",
            &["0", "33", "1048608"],
            "multiple of 32 up to 1048576, or `channel`",
        ),
        (&["bench", "gpu"], "--replays", &["0", "1001"], "1..=1000"),
        (&["warm", "--list"], "--capability", &["6.0", "100.0", "9"], "such as 8.0 or 9.0"),
    ];
    let begun = Instant::now();
    let built = [("bench", cfg!(feature = "bench")), ("warm", cfg!(feature = "cuda"))];
    for (command, option, values, range) in cases {
        if built.contains(&(command[0], false)) {
            continue;
        }
        for value in *values {
            let output = run([*command, &[&format!("{option}={value}")]].concat());
            refused(&output, &[option, value, range]);
        }
    }
    assert!(!Path::new(out).exists());
    assert!(begun.elapsed() < Duration::from_secs(60));
}

/// Characters that act on a terminal or hide text.
const HIDDEN: &str = "\u{9b}2J\u{85}\u{7f}\u{202e}\u{2066}\u{2028}\u{200b}\u{feff}\u{e0041}";

#[track_caller]
fn clean(text: &str) {
    let bad = |c: &char| {
        HIDDEN.contains(*c) && !c.is_ascii_graphic() || (c.is_control() && !"\n\t".contains(*c))
    };
    let found = text.chars().find(bad);
    assert_eq!(found, None, "{}", text.escape_debug());
}

#[test]
fn nothing_from_a_file_reaches_the_terminal_raw() {
    let temp = folder();
    // A model whose modules have such names, and a config with such values.
    let model = copied("ct-int-w4a8-moe", temp.path());
    let shard = model.join("model.safetensors");
    let bytes = fs::read(&shard).unwrap();
    let (header, data) = read(&bytes);
    let map = header.as_object().unwrap().iter();
    let renamed: Value = map
        .map(|(name, entry)| (name.replace("model.layers", &format!("m{HIDDEN}")), entry.clone()))
        .collect::<serde_json::Map<_, _>>()
        .into();
    fs::write(&shard, container(&renamed, data)).unwrap();
    let path = model.to_str().unwrap();
    let out = temp.path().join("out");
    let out = out.to_str().unwrap();
    let mut shown = 0;
    for arguments in [
        &["inspect", path][..],
        &["inspect", path, "--json"],
        &["run", path, "--list"],
        &["run", path, "--json", "--tokens", "1"],
        &["run", path, "--tokens", "1"],
        &["convert", path, out, "--to", "kleidiai", "--skip-unsupported"],
        &["convert", path, out, "--to", "flashinfer", "--skip-unsupported", "--json", "--force"],
        &["convert", path, out, "--to", "flashinfer", "--force"],
        &["run", out, "--list"],
    ] {
        let output = run(arguments);
        clean(stdout(&output));
        clean(stderr(&output));
        let both = format!("{}{}", stdout(&output), stderr(&output));
        shown += usize::from(both.contains("9b"));
        if arguments.contains(&"--json") && output.status.success() {
            let value: Value = serde_json::from_str(stdout(&output)).unwrap();
            // A parser reads the file's name unchanged.
            let same = value.to_string().contains(&format!("m{HIDDEN}"));
            assert!(same || arguments[0] == "convert", "{value}");
        }
    }
    assert!(shown >= 6, "{shown}");

    // A case: its name, provenance, config and tensors.
    let bytes = fs::read(golden(support::LINEAR)).unwrap();
    let (header, data) = read(&bytes);
    let mut named = header.clone();
    for key in ["name", "provenance"] {
        named["__metadata__"][key] = json!(format!("x{HIDDEN}"));
    }
    let mut unknown = header.clone();
    let entry = unknown.as_object_mut().unwrap().shift_remove("in.scales").unwrap();
    unknown[format!("in.s{HIDDEN}")] = entry;
    let mut config = header.clone();
    config["__metadata__"]["config"] = json!(json!({ "size_k": format!("x{HIDDEN}") }).to_string());
    for (name, header) in [("named", named), ("unknown", unknown), ("config", config)] {
        let path = temp.path().join(format!("{name}.safetensors"));
        fs::write(&path, container(&header, data)).unwrap();
        let (path, page) = (path.to_str().unwrap(), temp.path().join("page.html"));
        for more in [&[][..], &["--json"], &["--verbose"], &["--report", page.to_str().unwrap()]] {
            let output = run([&["check", path], more].concat());
            clean(stdout(&output));
            clean(stderr(&output));
            if more == ["--json"] {
                for line in stdout(&output).lines() {
                    serde_json::from_str::<Value>(line).unwrap();
                }
            }
        }
        clean(&fs::read_to_string(&page).unwrap());
    }
}

/// Peak resident memory of a command, in bytes; `None` if the system does not report it.
fn peak(arguments: &[&str]) -> Option<(Output, usize)> {
    let script = "ulimit -v 4000000; \"$@\"; code=$?; exit $code";
    let program = env!("CARGO_BIN_EXE_marlinspike");
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script, "sh", program]).args(arguments);
    let mut child = command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .ok()?;
    // The shell's child is the program: its peak is read while it runs.
    let mut most = 0;
    loop {
        if child.try_wait().ok()?.is_some() {
            break;
        }
        let children = format!("/proc/{0}/task/{0}/children", child.id());
        for pid in fs::read_to_string(children).ok()?.split_whitespace() {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
            let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<usize>().ok());
            most = most.max(kib.unwrap_or(0) * 1024);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Some((child.wait_with_output().ok()?, most))
}

#[test]
fn large_json_is_refused_before_it_takes_memory() {
    let temp = folder();
    let model = copied("ct-pack-moe", temp.path());
    let config = model.join("config.json");
    let original = fs::read_to_string(&config).unwrap();
    let path = model.to_str().unwrap();
    let object = original.trim_end().trim_end_matches('}');
    let texts = [
        // 66 MB, which took 4.5 GB.
        (format!("{object},\"x\":[{}0]}}", "{\"\":0},".repeat(9_500_000)), "at most 8388608"),
        // Below the limit of length, above that of memory.
        (format!("{object},\"x\":[{}0]}}", "{\"\":0},".repeat(1_000_000)), "134217728 bytes"),
        (format!("{object},\"x\":[{}0]}}", "0,".repeat(3_900_000)), "134217728 bytes"),
        (format!("{object},\"x\":{}", "[".repeat(5_000_000)), "recursion limit"),
    ];
    for (text, expected) in texts {
        fs::write(&config, &text).unwrap();
        for command in ["inspect", "run"] {
            let Some((output, most)) = peak(&[command, path]) else { return };
            refused(&output, &["config.json", expected]);
            assert!(most < 400 << 20, "{command}: {most} bytes for {}", text.len());
        }
    }
    fs::write(&config, original).unwrap();
    let index = |entries: String| {
        let text = format!("{{\"weight_map\":{{{entries}\"z\":\"model.safetensors\"}}}}");
        fs::write(model.join("model.safetensors.index.json"), text).unwrap();
        peak(&["inspect", path])
    };
    let entry = |i| format!("\"{i:x}\":\"model.safetensors\",");
    let Some((output, most)) = index((0..1_100_000).map(entry).collect()) else { return };
    refused(&output, &["index.json", "more than 1048576 tensors"]);
    assert!(most < 400 << 20, "{most} bytes");
    let Some((output, most)) = index("\"a\":\"model.safetensors\",".repeat(3_000_000)) else {
        return;
    };
    refused(&output, &["index.json", "67108864"]);
    assert!(most < 400 << 20, "{most} bytes");
}

#[test]
fn large_headers_take_memory_in_proportion() {
    let temp = folder();
    let file = temp.path().join("x.safetensors");
    let write = |header: &str| {
        fs::write(&file, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat())
            .unwrap();
        peak(&["check", file.to_str().unwrap()])
    };
    let keys: String = (0..1_000_000).map(|i| format!("\"{i:x}\":\"\",")).collect();
    let empty = "{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}";
    let tensors: String = (0..1_100_000).map(|i| format!("\"{i:x}\":{empty},")).collect();
    let dims = "1,".repeat(10_000_000);
    let cases = [
        (format!("{{\"__metadata__\":{{{keys}\"z\":\"\"}}}}"), "65536 keys of metadata"),
        (format!("{{{tensors}\"z\":{empty}}}"), "1048576 tensors"),
        (
            format!("{{\"a\":{{\"dtype\":\"U8\",\"shape\":[{dims}1],\"data_offsets\":[0,1]}}}}"),
            "at most 64 dimensions",
        ),
    ];
    for (header, expected) in cases {
        let Some((output, most)) = write(&header) else { return };
        refused(&output, &[]);
        let said = format!("{}{}", stdout(&output), stderr(&output));
        assert!(said.contains(expected), "{expected:?} is not in {said}");
        assert!(most < (200 << 20) + 5 * header.len(), "{most} bytes for {}", header.len());
    }
}

#[test]
fn patterns_of_a_config_have_a_budget() {
    let temp = folder();
    let model = copied("gptq-dynamic", temp.path());
    let config = model.join("config.json");
    let mut value: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    let rules = (0..16_384).map(|i| (format!("(?:\\w{{40}}){{3}}{i}"), json!({"bits": 8})));
    value["quantization_config"]["dynamic"] = Value::Object(rules.collect());
    fs::write(&config, value.to_string()).unwrap();
    let begun = Instant::now();
    let Some((output, most)) = peak(&["inspect", model.to_str().unwrap()]) else { return };
    refused(&output, &["config.json", "(?:\\w{40}){3}", "compiled instructions together"]);
    assert!(most < 300 << 20, "{most} bytes");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn a_scale_that_is_no_number_is_not_skipped() {
    let temp = folder();
    let model = copied("ct-nvfp4-moe", temp.path());
    let shard = model.join("model.safetensors");
    let bytes = fs::read(&shard).unwrap();
    let (header, data) = read(&bytes);
    let globals: Vec<_> = header
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| name.contains("experts") && name.ends_with("weight_global_scale"))
        .map(|(name, entry)| (name, entry["data_offsets"][0].as_u64().unwrap() as usize))
        .collect();
    assert!(globals.len() >= 6, "{globals:?}");
    let path = model.to_str().unwrap();
    for (i, (name, at)) in globals.iter().enumerate() {
        let bad = [f32::NAN, f32::INFINITY, 0.0, -1.0][i % 4];
        let mut data = data.to_vec();
        data[*at..at + 4].copy_from_slice(&bad.to_le_bytes());
        fs::write(&shard, container(&header, &data)).unwrap();
        for target in ["marlin", "flashinfer"] {
            let out = temp.path().join(format!("out-{i}-{target}"));
            let out = out.to_str().unwrap();
            let output = run(["convert", path, out, "--to", target, "--skip-unsupported"]);
            let expected = if bad.is_finite() { "a positive number" } else { "a finite number" };
            refused(&output, &["global_scale", &format!("expected {expected}")]);
            assert!(!stderr(&output).contains("--skip-unsupported"), "{name}: {}", stderr(&output));
        }
    }
    fs::write(&shard, &bytes).unwrap();
    let out = temp.path().join("out");
    let out = out.to_str().unwrap();
    let output = run(["convert", path, out, "--to", "flashinfer", "--skip-unsupported"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[cfg(unix)]
#[test]
fn summaries_that_are_pipes_and_kernels_that_are_missing_are_refused() {
    let temp = folder();
    let fifo = temp.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for path in [fifo.to_str().unwrap(), "/dev/zero"] {
        refused(&run(["fuzz", "merge", path]), &[path, "not a regular file"]);
    }
    let kept = temp.path().join("kept");
    let fuzz = ["fuzz", "--op", "linear", "--keep", kept.to_str().unwrap()];
    refused(&run([&fuzz[..], &["--lib", "./a.so"]].concat()), &["./a.so", "o such"]);
    // A program that does not exist is an error. It must not be reported as a crash of the kernel.
    for command in ["./missing -x", "missing-kernel"] {
        let name = command.split(' ').next().unwrap();
        for more in [&["--cases", "1"][..], &["--case", "0"], &["--persistent"]] {
            let output = run([&fuzz[..], &["--cmd", command], more].concat());
            refused(&output, &[name, "program not found"]);
        }
    }
    assert!(!kept.exists());
}

#[test]
fn convert_refuses_a_file_as_its_folder_and_a_model_without_tensors() {
    let temp = folder();
    let (model, file) = (copied("ct-pack-moe", temp.path()), temp.path().join("file"));
    fs::write(&file, "text").unwrap();
    let convert = |out: &Path| {
        run(["convert", model.to_str().unwrap(), out.to_str().unwrap(), "--to", "marlin"])
    };
    refused(&convert(&file), &["file: found a file, expected a folder"]);
    refused(&convert(&file.join("below")), &["below: found a file at", "expected a folder"]);
    #[cfg(unix)]
    for (target, found) in [
        ("absent", "dangling: found a link to `absent`, which does not exist"),
        ("file", "dangling: found a link to the file `file`"),
    ] {
        let link = temp.path().join("dangling");
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(target, &link).unwrap();
        refused(&convert(&link), &[found, "expected a folder or an unused name"]);
    }
    assert_eq!(fs::read(&file).unwrap(), b"text");
    fs::write(model.join("model.safetensors.index.json"), "{\"weight_map\": {}}").unwrap();
    let out = temp.path().join("out");
    refused(&convert(&out), &["ct-pack-moe: no tensor"]);
    assert!(!out.exists());
}

#[test]
fn an_expert_with_a_lone_bias_is_named() {
    let temp = folder();
    let model = copied("ct-pack-moe", temp.path());
    let text = fs::read(model.join("model.safetensors.index.json")).unwrap();
    let mut index: Value = serde_json::from_slice(&text).unwrap();
    let expert = "model.layers.0.mlp.experts.1.gate_proj";
    let shard = index["weight_map"][format!("{expert}.weight_scale")].as_str().unwrap().to_owned();
    let bytes = fs::read(model.join(&shard)).unwrap();
    let (mut header, data) = read(&bytes);
    let size_n = header[format!("{expert}.weight_scale")]["shape"][0].as_u64().unwrap() as usize;
    let offsets = [data.len(), data.len() + 2 * size_n];
    let bias = format!("{expert}.bias");
    header[&bias] = json!({"dtype": "BF16", "shape": [size_n], "data_offsets": offsets});
    let data = [data, &vec![0; 2 * size_n]].concat();
    fs::write(model.join(&shard), container(&header, &data)).unwrap();
    index["weight_map"][&bias] = json!(shard);
    fs::write(model.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let output = run(["inspect", model.to_str().unwrap()]);
    refused(&output, &[&bias, "experts.0.gate_proj", "experts must be alike"]);
}

/// A name of any length takes no more of a message than a long line, and what follows it is kept.
#[test]
fn an_overlong_name_is_cut() {
    let temp = folder();
    let name = "n".repeat(2_000_000);
    let entry = json!({"dtype": "U8", "shape": [2], "data_offsets": [0, 1]});
    let bytes = container(&json!({ &name: entry }), &[0]);
    let file = temp.path().join("long.safetensors");
    fs::write(&file, &bytes).unwrap();
    let file = file.to_str().unwrap();
    let model = copied("ct-pack-moe", temp.path());
    fs::remove_file(model.join("model.safetensors.index.json")).ok();
    fs::write(model.join("model.safetensors"), &bytes).unwrap();
    let model = model.to_str().unwrap();
    for arguments in [
        &["check", file][..],
        &["check", file, "--json"],
        &["inspect", model],
        &["inspect", model, "--json"],
        &["run", model, "--list"],
    ] {
        let output = run(arguments);
        let text = format!("{}{}", stdout(&output), stderr(&output));
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text.len() < 10_000, "{arguments:?}: {} bytes", text.len());
        assert!(text.contains("nnn[") && text.contains(" bytes left out]nnn"), "{text}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn paths_that_are_not_utf_8_are_paths() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    let temp = folder();
    let at = |name: &[u8]| temp.path().join(OsStr::from_bytes(name));
    let model = at(b"model\xff");
    fs::rename(copied("ct-pack-moe", temp.path()), &model).unwrap();
    let case = at(b"case\xff.safetensors");
    fs::copy(golden(support::PASSING), &case).unwrap();
    let (cases, packed, kept) = (at(b"cases\xff"), at(b"packed\xff"), at(b"kept\xff"));
    let word = OsStr::new;
    let vectors = ["vectors", "--op", "linear", "--seed", "1", "--json", "--out"].map(word);
    let fuzz = ["fuzz", "--op", "int4_fp8_preprocess", "--cases", "1", "--json", "--cmd", "true"];
    let fuzz = [&fuzz.map(word)[..], &[word("--keep"), kept.as_os_str()]].concat();
    let json = word("--json");
    let lines: Vec<(Vec<&OsStr>, i32)> = vec![
        (vec![word("inspect"), model.as_os_str(), json], 0),
        (vec![word("run"), model.as_os_str(), word("--list")], 0),
        (vec![word("check"), case.as_os_str(), json], 0),
        ([&vectors[..], &[cases.as_os_str()]].concat(), 0),
        (fuzz, 1),
        (
            ["convert", "--json", "--skip-unsupported", "--to", "marlin"]
                .map(word)
                .into_iter()
                .chain([model.as_os_str(), packed.as_os_str()])
                .collect(),
            0,
        ),
        (vec![word("convert"), word("--verify"), packed.as_os_str(), json], 0),
        (vec![word("inspect"), packed.as_os_str(), json], 0),
    ];
    for (arguments, code) in lines {
        let output = run(&arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", stderr(&output));
        if arguments.contains(&json) {
            for line in stdout(&output).lines() {
                serde_json::from_str::<Value>(line).unwrap();
            }
        }
    }
}
