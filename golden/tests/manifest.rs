//! The committed data are complete and untouched, and a change is noticed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use marlinspike_golden::{GoldenError, MAX_DATA_BYTES, Manifest};

fn committed() -> Manifest {
    Manifest::load_from(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// A golden folder with one case, in cargo's own folder for test files.
fn copy_of_one_case(test: &str) -> (Manifest, PathBuf) {
    let source = committed();
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    if root.exists() {
        fs::remove_dir_all(&root).unwrap();
    }
    fs::create_dir_all(root.join("data/cases")).unwrap();
    let case = source.cases().iter().find(|case| case.op == "router").unwrap();
    fs::copy(source.path(&case.path), root.join(&case.path)).unwrap();
    let text = serde_json::json!({"version": 1, "cases": [case], "tables": [], "checkpoints": []});
    fs::write(root.join("manifest.json"), text.to_string()).unwrap();
    let manifest = Manifest::load_from(&root).unwrap();
    manifest.verify().unwrap();
    let file = manifest.path(&case.path);
    (manifest, file)
}

/// The JSON header of a safetensors file.
fn header(path: &Path) -> serde_json::Value {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    serde_json::from_slice(&bytes[8..8 + length]).unwrap()
}

/// Loads a copy's manifest after `change`.
fn reload(
    root: &Path,
    change: impl FnOnce(&mut serde_json::Value),
) -> Result<Manifest, GoldenError> {
    let path = root.join("manifest.json");
    let mut json = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(&path, json.to_string()).unwrap();
    Manifest::load_from(root)
}

#[test]
fn every_file_is_listed_and_every_hash_matches() {
    let seen = committed().verify().unwrap();
    assert!(seen.files > 90, "only {} files", seen.files);
    assert!(seen.bytes < MAX_DATA_BYTES, "{} bytes", seen.bytes);
}

/// The fragments, from which the manifest is rebuilt, describe the committed files.
#[test]
fn fragments_agree_with_the_manifest() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &Path| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    };
    let manifest = read(&root.join("manifest.json"));
    let mut folders = vec![root.join("fragments")];
    let mut seen = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let fragment = read(&path);
            let listed = ["checkpoints", "models"]
                .iter()
                .any(|list| manifest[list].as_array().unwrap().contains(&fragment));
            assert!(listed, "{} is not in manifest.json", path.display());
            seen += 1;
        }
    }
    assert!(seen > 15, "only {seen} fragments");
}

#[test]
fn the_metadata_of_each_case_agree_with_its_entry() {
    let manifest = committed();
    for case in manifest.cases() {
        let metadata = &header(&manifest.path(&case.path))["__metadata__"];
        assert_eq!(metadata["format"], "marlinspike-case", "{}", case.path);
        assert_eq!(metadata["op"], case.op.as_str(), "{}", case.path);
        assert_eq!(metadata["name"], case.name.as_str(), "{}", case.path);
        assert_eq!(metadata["provenance"], case.provenance.as_str(), "{}", case.path);
        assert!(case.provenance.contains(&case.version), "{}", case.path);
    }
}

#[test]
fn every_operation_has_cases() {
    let manifest = committed();
    let mut counts = BTreeMap::new();
    for case in manifest.cases() {
        *counts.entry(case.op.as_str()).or_insert(0) += 1;
    }
    let known: BTreeSet<_> = counts.keys().copied().collect();
    assert_eq!(
        known,
        BTreeSet::from([
            "convert_to_nvfp4_moe_kernel_format",
            "cutlass_scaled_mm",
            "cutlass_scaled_mm_azp",
            "cutlass_w4a8_mm",
            "dyn_quant_linear",
            "dynamic_scaled_int8_quant",
            "fused_experts_fp8_w8a8",
            "fused_experts_int8_w8a8",
            "int4_fp8_preprocess",
            "linear",
            "moe",
            "moe_align_block_size",
            "normalize_e4m3fn_to_e4m3fnuz",
            "per_token_group_fp8_quant",
            "process_fp8_weight_tensor_strategy_moe",
            "router",
            "static_scaled_int8_quant",
            "swizzle_blockscale",
        ])
    );
    for (op, count) in counts {
        let paths = manifest.case_paths(op);
        assert_eq!(paths.len(), count);
        assert!(paths.iter().all(|path| path.is_file()));
    }
    assert!(manifest.case_paths("no such operation").is_empty());
}

/// Every format that the library reads has a checkpoint by a public tool. One is sharded, and each
/// has a module with the producer's dequantized float32 weights.
#[test]
fn every_format_has_a_checkpoint_with_expected_weights() {
    let manifest = committed();
    let formats: BTreeSet<_> =
        manifest.checkpoints().iter().map(|entry| entry.format.as_str()).collect();
    assert_eq!(
        formats,
        BTreeSet::from([
            "awq",
            "float-quantized",
            "fp8",
            "gptq",
            "int-quantized",
            "mxfp4",
            "mxfp4-pack-quantized",
            "mxfp8-quantized",
            "nvfp4-pack-quantized",
            "pack-quantized"
        ])
    );
    assert!(
        manifest.checkpoints().iter().any(|entry| entry
            .files
            .iter()
            .any(|file| file.path.ends_with("model.safetensors.index.json"))),
        "no sharded checkpoint"
    );
    for entry in manifest.checkpoints() {
        let config = fs::read(manifest.path(&entry.dir).join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        assert!(config["quantization_config"]["quant_method"].is_string(), "{}", entry.name);
        let expected = header(&manifest.path(&entry.expected[0].path));
        let weights: Vec<_> =
            expected.as_object().unwrap().iter().filter(|(k, _)| k.ends_with(".weight")).collect();
        assert!(!weights.is_empty(), "{}", entry.name);
        assert!(weights.iter().all(|(_, tensor)| tensor["dtype"] == "F32"), "{}", entry.name);
    }
}

#[test]
fn a_flipped_bit_is_a_hash_error() {
    let (manifest, file) = copy_of_one_case("flipped");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    assert!(matches!(manifest.verify(), Err(GoldenError::Hash { path, .. }) if path == file));
}

#[test]
fn a_truncated_file_is_a_length_error() {
    let (manifest, file) = copy_of_one_case("truncated");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    assert!(matches!(manifest.verify(),
        Err(GoldenError::Length { path, found, expected }) if path == file && found + 1 == expected));
}

#[test]
fn missing_and_unlisted_files_are_named() {
    let (manifest, file) = copy_of_one_case("missing");
    let extra = manifest.path("data/cases/extra.safetensors");
    fs::write(&extra, b"").unwrap();
    assert!(matches!(manifest.verify(), Err(GoldenError::Unlisted { path }) if path == extra));
    fs::remove_file(&file).unwrap();
    assert!(matches!(manifest.verify(), Err(GoldenError::Missing { path }) if path == file));
}

#[test]
fn manifests_that_cannot_be_trusted_are_refused() {
    let (manifest, _) = copy_of_one_case("refused");
    let root = manifest.root();
    for path in ["../manifest.json", "/etc/passwd", "data/../../x", "manifest.json", "data\\x"] {
        let result = reload(root, |json| json["cases"][0]["path"] = path.into());
        assert!(matches!(result, Err(GoldenError::UnsafePath { path: p }) if p == path));
    }
    let result = reload(root, |json| {
        json["cases"][0]["path"] = "data/cases/a".into();
        let case = json["cases"][0].clone();
        json["cases"].as_array_mut().unwrap().push(case);
    });
    assert!(matches!(result, Err(GoldenError::DuplicatePath { path }) if path == "data/cases/a"));
    let result = reload(root, |json| json["version"] = 2.into());
    assert!(matches!(result, Err(GoldenError::ManifestVersion { found: 2, expected: 1, .. })));
    let result = reload(root, |json| json["surprise"] = 1.into());
    assert!(matches!(result, Err(GoldenError::ManifestSyntax { .. })));
    fs::remove_file(root.join("manifest.json")).unwrap();
    assert!(matches!(Manifest::load_from(root), Err(GoldenError::Io { .. })));
}

#[test]
fn checkpoints_are_found_by_name() {
    let manifest = committed();
    for entry in manifest.checkpoints() {
        assert_eq!(manifest.checkpoint(&entry.name).unwrap(), entry);
        let dir = manifest.path(&entry.dir);
        assert!(dir.join("config.json").is_file(), "{}", entry.name);
        for file in &entry.files {
            assert!(manifest.path(&file.path).starts_with(&dir), "{}", file.path);
        }
        for file in &entry.expected {
            assert!(!manifest.path(&file.path).starts_with(&dir), "{}", file.path);
        }
    }
    assert!(matches!(manifest.checkpoint("none"),
        Err(GoldenError::UnknownCheckpoint { name, .. }) if name == "none"));
}
