//! Cases of the routing of real families: the op `router` with a `model_type`, and files that hold
//! one tiny MoE block of a model as transformers computed it.

use serde_json::{Map, Value};

use super::config::{CaseConfig, RouterConfig};
use super::{Case, CaseError};
use crate::container::Container;
use crate::moe::ScoringFunc;
use crate::moe::families::{self, RoutingRule};
use crate::scalar::ScalarType;
use crate::tensor::{DType, Tensor};
use crate::{Error, Result};

/// The rule that a config states: by `routing`, an object of a routing file's keys, or by
/// `model_type` and the keys that its family reads, with `layer` where they are lists.
pub(super) fn stated(map: &Map<String, Value>) -> Result<Option<RoutingRule>, CaseError> {
    let refuse = |key: &str, e: Error| CaseError::ConfigValue {
        key: key.to_owned(),
        found: map.get(key).map_or("none".to_owned(), |v| v.to_string().chars().take(60).collect()),
        expected: format!("a routing that is known ({e})"),
    };
    if let Some(value) = map.get("routing") {
        return RoutingRule::from_json(value).map(Some).map_err(|e| refuse("routing", e));
    }
    if !map.contains_key("model_type") {
        return Ok(None);
    }
    let layer = map.get("layer").and_then(Value::as_u64).unwrap_or(0);
    let module = format!("model.layers.{layer}.mlp.experts");
    let resolved = families::resolve(&Value::Object(map.clone()), &module);
    resolved.map(|r| Some(r.rule)).map_err(|e| refuse("model_type", e))
}

/// The config of a case with this rule.
pub(super) fn config(rule: RoutingRule) -> RouterConfig {
    RouterConfig {
        scoring_func: ScoringFunc::Softmax,
        top_k: rule.top_k,
        renormalize: false,
        grouped: None,
        rule: Some(rule),
    }
}

/// Whether a file is a block of a model: no case, but a `config.json` and its `module`.
pub(super) fn is_router_golden(file: &Container<'_>) -> bool {
    let has = |key: &str| file.metadata().contains_key(key);
    !has("format") && has("config.json") && has("module") && has("model_type")
}

/// The routing of such a file as a case; its other tensors are not judged.
pub(super) fn parse<'a>(file: &Container<'a>) -> Result<Case<'a>> {
    let text = |key: &str| file.metadata().get(key).map(String::as_str).unwrap_or_default();
    let json = serde_json::from_str::<Value>(text("config.json"))
        .map_err(|e| CaseError::ConfigJson { problem: format!("config.json: {e}") })?;
    let resolved = families::resolve(&json, &format!("{}.experts", text("module")))?;
    let provenance = format!("transformers {}, {}", text("transformers"), resolved.model_type);
    let scale = resolved.rule.expert_scale.clone();
    let bias = resolved.rule.correction_bias.is_some();
    let mut case = Case::new(text("family"), CaseConfig::Router(config(resolved.rule)), provenance);
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

/// A list of numbers as f32.
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
