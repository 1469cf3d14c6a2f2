//! Entry points for fuzzers: whatever the bytes, no panic, and what was accepted is consistent.
//! `fuzz/` calls them under libFuzzer; the stable tests replay a corpus and its mutations.

use std::collections::BTreeMap;
use std::path::Path;

use marlinspike::Result;
use marlinspike::case::Case;
use marlinspike::check::check_case;
use marlinspike::config::{ConfigError, QuantConfig};
use marlinspike::container::{Container, ContainerError, IndexError, ShardIndex};

/// The safetensors door. A container that is accepted has its tensors inside the file, one after
/// the other, each as long as its shape says.
///
/// # Errors
/// The container's.
pub fn container(data: &[u8]) -> Result<(), ContainerError> {
    let container = Container::parse(data)?;
    let mut covered = 0;
    for entry in container.header().entries() {
        let range = entry.file_range();
        assert!(range.start <= range.end && range.end <= data.len() as u64, "{}", entry.name());
        covered += range.end - range.start;
        let tensor = container.tensor(entry.name()).expect("an accepted tensor is readable");
        let elements: usize = tensor.shape().iter().product();
        assert_eq!(tensor.bytes().len(), elements * tensor.dtype().bytes(), "{}", entry.name());
        assert_eq!(tensor.bytes().len() as u64, range.end - range.start, "{}", entry.name());
    }
    assert!(covered <= data.len() as u64);
    assert_eq!(container.tensors().count(), container.len());
    Ok(())
}

/// Bytes above which a fuzzer's case is parsed but not recomputed.
const CHECKED_BYTES: usize = 1 << 20;

/// The case reader and the checker. A case that is accepted is the same after writing and reading
/// again; checking it gives a verdict or an error.
///
/// # Errors
/// The reader's.
pub fn case(data: &[u8]) -> Result<()> {
    let case = Case::parse(data)?;
    let written = case.to_bytes().expect("an accepted case can be written");
    let again = Case::parse(&written).expect("a written case can be read");
    assert_eq!(again.config, case.config);
    assert_eq!((&again.name, &again.provenance), (&case.name, &case.provenance));
    assert_eq!((&again.inputs, &again.outputs), (&case.inputs, &case.outputs));
    assert_eq!(again.to_bytes().expect("a case can be written"), written);
    if data.len() <= CHECKED_BYTES
        && let Ok(report) = check_case(&case)
    {
        assert_eq!(report.outputs.len(), case.outputs.len());
        for output in &report.outputs {
            let compared = output.equal_bits.is_some();
            assert!(compared || output.note.is_some(), "{}", output.name);
            assert!(output.mismatches <= output.elements, "{}", output.name);
        }
    }
    Ok(())
}

/// Why a config was not accepted.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigFailure {
    /// Not JSON.
    #[error("not JSON: {0}")]
    Json(String),
    /// A defect of the config.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// The config parsers, with a few modules asked about. The same question has the same answer.
///
/// # Errors
/// The parsers'.
pub fn config(data: &[u8]) -> Result<(), ConfigFailure> {
    let value: serde_json::Value =
        serde_json::from_slice(data).map_err(|e| ConfigFailure::Json(e.to_string()))?;
    let config = match QuantConfig::from_model_config(&value)? {
        Some(config) => config,
        None => QuantConfig::from_value(&value)?,
    };
    assert!(!config.method().is_empty());
    for module in [
        "",
        "lm_head",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.17.self_attn.qkv_proj",
        "model.layers.3.mlp.experts.11.down_proj",
        "model.layers.3.mlp.experts",
    ] {
        let scheme = config.scheme_for(module);
        assert_eq!(scheme, config.scheme_for(module), "{module}");
        if let Ok(scheme) = scheme {
            assert!(!scheme.label().is_empty());
        }
    }
    Ok(())
}

/// The reader of `model.safetensors.index.json`. Joined to any folder, an accepted index's files
/// lie directly in it; read a second time it is the same.
///
/// # Errors
/// The reader's.
pub fn index(data: &[u8]) -> Result<(), IndexError> {
    let index = ShardIndex::parse(data)?;
    let folder = Path::new("folder");
    for file in index.files() {
        let path = folder.join(file);
        assert_eq!(path.parent(), Some(folder), "{file:?}");
        assert_eq!(path.components().count(), 2, "{file:?}");
        assert_eq!(path.extension(), Some("safetensors".as_ref()), "{file:?}");
        assert!(index.tensors().any(|(_, f)| f == file), "{file:?}");
    }
    let map: BTreeMap<_, _> = index.tensors().collect();
    assert_eq!(map.len(), index.tensors().len());
    let written = serde_json::json!({ "weight_map": map }).to_string();
    assert_eq!(ShardIndex::parse(written.as_bytes()).as_ref(), Ok(&index));
    Ok(())
}
