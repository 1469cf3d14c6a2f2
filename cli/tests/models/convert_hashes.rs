//! The hashes of a converted folder's manifest, compared with `sha256sum`, which shares no code
//! with this program.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_marlinspike")).args(arguments).output().unwrap()
}

/// The hash of a file by coreutils; `None` if the machine has no `sha256sum`.
fn sha256sum(path: &Path) -> Option<String> {
    let done = Command::new("sha256sum").arg("-b").arg(path).output().ok()?;
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some(String::from_utf8(done.stdout).unwrap().split_whitespace().next()?.to_owned())
}

#[test]
fn the_manifest_has_the_hashes_of_sha256sum() {
    let temp = tempfile::tempdir().unwrap();
    let model =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/checkpoints/ct-pack-moe");
    for to in ["marlin", "kleidiai", "flashinfer"] {
        let out = temp.path().join(to);
        let [from, dir] = [&model, &out].map(|p| p.to_str().unwrap());
        let more = ["--to", to, "--skip-unsupported", "--max-shard-size", "0.00003"];
        let done = run(&[&["convert", from, dir][..], &more].concat());
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let manifest = fs::read(out.join("marlinspike-manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let files = manifest["files"].as_array().unwrap();
        let inputs = manifest["inputs"].as_array().unwrap();
        assert!(files.len() > 3 && inputs.len() > 1, "{manifest}");
        let records = files.iter().map(|f| (&out, f)).chain(inputs.iter().map(|i| (&model, i)));
        for (folder, record) in records {
            let path = folder.join(record["name"].as_str().unwrap());
            let Some(expected) = sha256sum(&path) else {
                println!("SKIPPED (no sha256sum): the_manifest_has_the_hashes_of_sha256sum");
                return;
            };
            assert_eq!(record["sha256"], expected, "{}", path.display());
            assert_eq!(record["bytes"], fs::metadata(&path).unwrap().len(), "{}", path.display());
        }
        assert!(run(&["convert", "--verify", dir]).status.success());
        // Every flipped bit is detected, and the file is named.
        for record in files {
            let name = record["name"].as_str().unwrap();
            let mut bytes = fs::read(out.join(name)).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(out.join(name), &bytes).unwrap();
            let damaged = run(&["convert", "--verify", dir]);
            assert_eq!(damaged.status.code(), Some(1), "{to} {name}");
            let found = sha256sum(&out.join(name)).unwrap();
            let text = String::from_utf8_lossy(&damaged.stdout).into_owned();
            assert!(text.contains(name) && text.contains(&found), "{text}");
            bytes[middle] ^= 1;
            fs::write(out.join(name), &bytes).unwrap();
        }
        assert!(run(&["convert", "--verify", dir]).status.success());
    }
}
