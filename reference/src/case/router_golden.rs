//! Reads files with one small MoE block of a model, computed by transformers, as cases of the
//! block: its routing, and if its experts have a known form, its logits and outputs.

use serde_json::Value;

use crate::container::Container;
use crate::moe::block::{Block, Stage};
use crate::moe::families::{
    self, BlockNumbers, BlockTensors, ExpertsRule, FoundStage, SharedRule, tensor_below,
};
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
    let rule = resolved.rule.clone();
    let (own, numbers) = families::block_rule(&json, &module)?;
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
        let found = tensor_below(&get, &name);
        let found = found.ok_or_else(|| Error::missing(format!("in.{name}"), "the routing"))?;
        case.add_input("expert_scale", widened(found)?);
    }
    if let Some(name) = &rule.token_table {
        let found = tensor_below(&get, name);
        let found = found.ok_or_else(|| Error::missing(format!("in.{name}"), "the routing"))?;
        case.add_input("token_table", as_i32(found)?);
        case.add_input("token_ids", as_i32(tensor("in.token_ids")?)?);
    }
    if rule.token_groups > 1 {
        case.add_input("token_types", as_i32(tensor("in.token_types")?)?);
    }
    for name in ["topk_ids", "topk_weights"] {
        case.add_output(name, tensor(&format!("out.{name}"))?);
    }
    if let Some(tensors) = block {
        add_block(&mut case, file, hidden, tensors, (own, numbers))?;
    }
    case.validate()?;
    Ok(case)
}

/// Adds the block's config, tensors and outputs.
fn add_block<'a>(
    case: &mut Case<'a>,
    file: &Container<'a>,
    hidden: Tensor<'a>,
    mut tensors: BlockTensors,
    (own, numbers): (ExpertsRule, BlockNumbers),
) -> Result<()> {
    let ([experts, _, size_i], CaseConfig::Router(config)) =
        (tensors.w2.dims3()?, &mut case.config)
    else {
        return Ok(());
    };
    let mut block = Block::new(hidden.dims2()?[1], size_i, experts);
    block.interleaved = tensors.interleaved;
    match own.shared {
        SharedRule::Same => {}
        SharedRule::Plain => block.shared_is_plain = true,
        SharedRule::Step(limit) => block.shared_swiglustep_limit = limit,
        SharedRule::Averaged => block.shared_is_averaged = tensors.shared.is_some(),
    }
    // Without every part, the output cannot be judged.
    let mut names = file.tensors().filter_map(Result::ok).map(|t| t.name().to_owned());
    let unread = tensors.shared.is_none() && names.any(|name| name.contains("shared_"));
    let judged: &[&str] = match unread {
        true => &["router_logits", "y_experts"],
        false => &["router_logits", "y_experts", "y"],
    };
    block.logit_softcap = numbers.logit_softcap;
    block.logit_multiplier = numbers.logit_multiplier;
    (block.gate_softcap, block.up_softcap) = (numbers.gate_softcap, numbers.up_softcap);
    for (name, _) in tensors.stages.iter_mut().flatten().flat_map(|s| &mut s.tensors) {
        *name = input_name(name);
    }
    let [router_input, expert_input, expert_output, routed_output, output] = &tensors.stages;
    let made = |stages: &[FoundStage]| -> Vec<Stage> {
        stages.iter().map(|found| Stage::of(found, &numbers, block.hidden_size)).collect()
    };
    let (inputs, outputs) =
        ([made(router_input), made(expert_input)], [made(expert_output), made(routed_output)]);
    let whole = made(output);
    [block.router_input, block.expert_input] = inputs;
    [block.expert_output, block.routed_output] = outputs;
    block.output = whole;
    if let Some([_, w2]) = &tensors.shared {
        block.shared_intermediate_size = w2.dims2()?[1];
    }
    for (name, tensor) in tensors.stages.into_iter().flatten().flat_map(|s| s.tensors) {
        let tensor = tensor.renamed(format!("in.{name}"));
        case.inputs.insert(name, tensor);
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

/// The name of a stage's tensor among the inputs of a case.
fn input_name(name: &str) -> String {
    name.replace('.', "_")
}

/// Integers as i32.
fn as_i32(tensor: Tensor<'_>) -> Result<Tensor<'_>> {
    if tensor.dtype() == DType::I32 {
        return Ok(tensor);
    }
    tensor.expect_dtype(&[DType::I64])?;
    let wide = tensor.bytes().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()));
    let narrow = wide.enumerate().map(|(i, x)| {
        i32::try_from(x).map_err(|_| Error::value(tensor.name(), &[i], x, "a number below 2^31"))
    });
    let values = narrow.collect::<Result<Vec<i32>>>()?;
    Tensor::from_vec(tensor.name(), DType::I32, tensor.shape().to_vec(), values)
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
