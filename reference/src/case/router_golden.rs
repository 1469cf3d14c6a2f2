//! Reads files with one small MoE block of a model, computed by transformers, as cases of the
//! block: its routing, and if its experts have a known form, its logits and outputs.

use serde_json::Value;

use crate::container::Container;
use crate::moe::block::Block;
use crate::moe::families::{self, BlockTensors, ExpertsRule, SharedRule};
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

/// Reads such a file as a case.
pub(super) fn parse<'a>(file: &Container<'a>) -> Result<Case<'a>> {
    let text = |key: &str| file.metadata().get(key).map(String::as_str).unwrap_or_default();
    let json = serde_json::from_str::<Value>(text("config.json"))
        .map_err(|e| CaseError::ConfigJson { problem: format!("config.json: {e}") })?;
    let module = format!("{}.experts", text("module"));
    let resolved = families::resolve(&json, &module)?;
    let provenance = format!("transformers {}, {}", text("transformers"), resolved.model_type);
    let scale = resolved.rule.expert_scale.clone();
    let bias = resolved.rule.correction_bias.is_some();
    let (own, softcap) = families::block_rule(&json, &module)?;
    let hidden = file.tensor("in.hidden_states")?;
    let get = |name: &str| file.tensor(&format!("in.{name}")).ok();
    let block = match BlockTensors::read(&get, hidden.dims2()?[1], resolved.num_experts, own) {
        Ok(tensors) => Some(tensors),
        Err(Error::Unsupported { .. }) => None,
        Err(error) => return Err(error),
    };
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
    if let Some(tensors) = block {
        add_block(&mut case, file, hidden, tensors, (own, softcap))?;
    }
    case.validate()?;
    Ok(case)
}

/// Adds the block's config, tensors and outputs.
fn add_block<'a>(
    case: &mut Case<'a>,
    file: &Container<'a>,
    hidden: Tensor<'a>,
    tensors: BlockTensors,
    (own, softcap): (ExpertsRule, Option<f32>),
) -> Result<()> {
    let ([experts, size_h, size_i], CaseConfig::Router(config)) =
        (tensors.w2.dims3()?, &mut case.config)
    else {
        return Ok(());
    };
    let mut block = Block::new(size_h, size_i, experts);
    block.interleaved = own.interleaved;
    match own.shared {
        SharedRule::Same => {}
        SharedRule::Plain => block.shared_is_plain = true,
        SharedRule::Step(limit) => block.shared_swiglustep_limit = limit,
        SharedRule::Averaged => block.shared_is_averaged = tensors.shared.is_some(),
    }
    // Without every part, the output cannot be judged.
    let mut names = file.tensors().filter_map(Result::ok).map(|t| t.name().to_owned());
    let unread = tensors.shared.is_none() && names.any(|name| name.contains("shared_"));
    let judged: &[&str] = match unread || own.has_output_norm {
        true => &["router_logits", "y_experts"],
        false => &["router_logits", "y_experts", "y"],
    };
    block.logit_softcap = softcap;
    if let Some([_, w2]) = &tensors.shared {
        block.shared_intermediate_size = w2.dims2()?[1];
    }
    config.block = Some(block);
    case.add_input("hidden_states", hidden);
    let (shared_w13, shared_w2) = tensors.shared.map(|[w13, w2]| (w13, w2)).unzip();
    let inputs = [
        ("router_weight", tensors.router_weight),
        ("router_bias", tensors.router_bias),
        ("w13", Some(tensors.w13)),
        ("w13_bias", tensors.w13_bias),
        ("w2", Some(tensors.w2)),
        ("w2_bias", tensors.w2_bias),
        ("shared_w13", shared_w13),
        ("shared_w2", shared_w2),
        ("shared_gate", tensors.shared_gate),
        ("output_bias", tensors.output_bias),
    ];
    for (name, tensor) in inputs {
        if let Some(tensor) = tensor {
            case.add_input(name, tensor);
        }
    }
    for name in judged {
        let full = format!("out.{name}");
        if file.get(&full).is_some() {
            case.add_output(name, file.tensor(&full)?);
        }
    }
    Ok(())
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
