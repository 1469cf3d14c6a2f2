//! Reads files with one small MoE block of a model, computed by transformers, as cases of the
//! block's routing.

use serde_json::Value;

use crate::container::Container;
use crate::moe::families;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::CaseConfig;
use crate::ops::case::Case;
use crate::ops::router::from_rule;
use crate::ops::schema::CaseError;
use crate::{Error, Result};

/// Whether a file holds a block of a model: `config.json` and `module` instead of a case's
/// metadata.
pub(super) fn is_router_golden(file: &Container<'_>) -> bool {
    let has = |key: &str| file.metadata().contains_key(key);
    !has("format") && has("config.json") && has("module") && has("model_type")
}

/// Reads the routing of such a file as a case; its other tensors are not judged.
pub(super) fn parse<'a>(file: &Container<'a>) -> Result<Case<'a>> {
    let text = |key: &str| file.metadata().get(key).map(String::as_str).unwrap_or_default();
    let json = serde_json::from_str::<Value>(text("config.json"))
        .map_err(|e| CaseError::ConfigJson { problem: format!("config.json: {e}") })?;
    let resolved = families::resolve(&json, &format!("{}.experts", text("module")))?;
    let provenance = format!("transformers {}, {}", text("transformers"), resolved.model_type);
    let scale = resolved.rule.expert_scale.clone();
    let bias = resolved.rule.correction_bias.is_some();
    let mut case =
        Case::new(text("family"), CaseConfig::Router(from_rule(resolved.rule)), provenance);
    let tensor = |name: &str| file.tensor(name);
    case.add_input("router_logits", tensor("out.router_logits")?);
    if bias {
        case.add_input("e_score_correction_bias", widened(tensor("in.correction_bias")?)?);
    }
    if let Some(name) = scale {
        case.add_input("expert_scale", widened(tensor(&format!("in.{name}"))?)?);
    }
    for name in ["topk_ids", "topk_weights"] {
        case.add_output(name, tensor(&format!("out.{name}"))?);
    }
    case.validate()?;
    Ok(case)
}

/// A 1-D tensor as f32.
fn widened(tensor: Tensor<'_>) -> Result<Tensor<'_>> {
    let ty = match tensor.dtype() {
        DType::F32 => return Ok(tensor),
        DType::BF16 => ScalarType::BFLOAT16,
        DType::F16 => ScalarType::FLOAT16,
        other => return Err(Error::dtype(tensor.name(), other, "F32, BF16 or F16")),
    };
    let values: Vec<f32> =
        tensor.elements::<u16>().iter().map(|&b| ty.to_f64(b.into()) as f32).collect();
    Tensor::from_vec(tensor.name(), DType::F32, tensor.shape().to_vec(), values)
}
