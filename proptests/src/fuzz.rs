//! Fuzz targets. No input may panic, and every accepted input must be consistent. `tools/fuzz/` calls
//! them under libFuzzer; the tests on stable Rust replay a corpus and mutations of it.

pub mod corpus;
pub mod mutate;

use std::collections::BTreeMap;
use std::path::Path;

use marlinspike::Result;
use marlinspike::case::{ActivationRounding, Case};
use marlinspike::check::check_case;
use marlinspike::config::{ConfigError, QuantConfig};
use marlinspike::container::{Container, ContainerError, IndexError, ShardIndex};
use marlinspike::num::array::rows_of;
use marlinspike::w4a8::moe::{Mode, MoeLayer};
use marlinspike::w4a8::stored::{self, Description};
use marlinspike::w4a8::{self, Linear, LinearWorkspace, Values};

/// Fuzzes the safetensors reader. The tensors of an accepted container lie inside the file, one
/// after the other, with the lengths of their shapes.
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

/// Largest size at which a fuzzed case is recomputed; larger ones are only parsed.
const CHECKED_BYTES: usize = 1 << 20;

/// Fuzzes the case reader and the checker. An accepted case must survive writing and reading;
/// checking it must give a verdict or an error.
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
        let reported = |name: &String| report.outputs.iter().filter(|o| o.name == *name).count();
        assert!(case.outputs.keys().all(|name| reported(name) == 1));
        // Quantized activations are inputs that a report judges, too.
        let known = |name| case.outputs.contains_key(name) || case.inputs.contains_key(name);
        assert!(report.outputs.iter().all(|output| known(output.name.as_str())));
        for output in &report.outputs {
            let compared = output.equal_bits.is_some();
            assert!(compared || output.note.is_some(), "{}", output.name);
            assert!(output.mismatches <= output.elements, "{}", output.name);
        }
    }
    Ok(())
}

/// The reason why a config was rejected.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigFailure {
    /// Not JSON.
    #[error("not JSON: {0}")]
    Json(String),
    /// A defect of the config.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Fuzzes the config parsers and looks up a few modules. Equal lookups must give equal results.
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

/// Fuzzes the reader of `model.safetensors.index.json`. The files of an accepted index must lie
/// directly in the model's folder, and a second read must give the same index.
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

/// Largest size at which the layers of a fuzzed packed file are run; larger ones are only loaded.
const RUN_BYTES: usize = 1 << 16;

/// Fuzzes packed files of the int4 path. An accepted description must survive writing and reading.
/// A layer that loads must run without a panic, and every kernel of this CPU must give the same
/// finite values.
///
/// # Errors
/// The container's, the first description's or the first layer's.
pub fn packed(data: &[u8]) -> Result<()> {
    let file = Container::parse(data)?;
    for module in stored::modules(&file) {
        let described = Description::read(&file, module)?;
        let text = described.to_json().to_string();
        let header = serde_json::json!({ "__metadata__": { stored::key(module): text } });
        let header = header.to_string();
        let again = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        let again = Container::parse(&again).expect("a file without tensors is readable");
        assert_eq!(Description::read(&again, module).as_ref(), Ok(&described), "{module}");
        let rounding = ActivationRounding::HalfAway;
        let outputs: Vec<Vec<f32>> = w4a8::kernels()
            .into_iter()
            .map(|kernel| match &described {
                Description::Linear(_) => {
                    run_linear(&Linear::load(&file, module, rounding)?.with_kernel(kernel), data)
                }
                Description::Moe(_) => {
                    let layer = MoeLayer::load(&file, module, rounding, Mode::Extended)?;
                    run_experts(&layer.with_kernel(kernel), data)
                }
            })
            .collect::<Result<_>>()?;
        for other in &outputs[1..] {
            let mut pairs = outputs[0].iter().zip(other);
            let same = pairs.all(|(a, b)| !a.is_finite() || a.to_bits() == b.to_bits());
            assert!(same && other.len() == outputs[0].len(), "{module}: kernels differ");
        }
    }
    Ok(())
}

/// A few rows of numbers between -1 and 1.
fn rows(len: usize) -> Values {
    Values::F32((0..len).map(|i| (i * 37 % 64) as f32 / 32.0 - 1.0).collect())
}

fn run_linear(layer: &Linear<'_>, data: &[u8]) -> Result<Vec<f32>> {
    let shape = layer.weight().layout().shape();
    if data.len() > RUN_BYTES {
        return Ok(Vec::new());
    }
    let mut y = Values::F32(vec![0.0; 2 * shape.size_n]);
    let x = rows(2 * shape.size_k);
    let (x, out) = (x.view(shape.size_k)?, y.view_mut(shape.size_n)?);
    layer.forward(x, &mut LinearWorkspace::default(), out)?;
    Ok(y.to_f32())
}

fn run_experts(layer: &MoeLayer<'_>, data: &[u8]) -> Result<Vec<f32>> {
    // Without experts on this rank, no bytes determine the sizes, so they may be arbitrary.
    let width = layer.hidden_size().max(layer.intermediate_size()).max(layer.config().num_experts);
    if data.len() > RUN_BYTES || width > RUN_BYTES {
        return Ok(Vec::new());
    }
    let (x, experts) = (rows(2 * layer.hidden_size()), layer.config().num_experts);
    let logits: Vec<f32> = (0..2 * experts).map(|i| (i * 29 % 64) as f32 / 8.0).collect();
    let logits = rows_of("router_logits", &logits, experts)?;
    let mut y = Values::F32(vec![0.0; 2 * layer.hidden_size()]);
    let mut workspace = layer.workspace(2);
    let (x, out) = (x.view(layer.hidden_size())?, y.view_mut(layer.hidden_size())?);
    layer.forward(x, logits, &mut workspace, out)?;
    Ok(y.to_f32())
}
