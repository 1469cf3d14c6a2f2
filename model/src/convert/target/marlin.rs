//! Marlin: a rank's part of a stack, whether the kernels take it, and the outputs.

mod pieces;
mod unpack;

use std::ops::Range;

use marlinspike::config::Scheme;
use marlinspike::formats;
use marlinspike::layouts::marlin::{
    InputDtype, Options, ScalePermutation, WeightLayout, e4m3_scale_factor, prepare,
};
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::DType;
use marlinspike::prepare::gate_up::GateUp;
use marlinspike::prepare::pad::PaddedKernel;
use marlinspike::prepare::padded_shard::PaddedShard;
use marlinspike::select::{Platform, Selection};
use marlinspike::weight::{Table, Weight};
use marlinspike::{Error, Result};
use serde_json::{Value, json};

use super::kept::expect_kept;
use super::{Context, Descriptor, Format, Planned, Target, notes};
use crate::convert::entry::Entry;
use crate::convert::job::Job;
use crate::convert::names::TensorKind;
use crate::convert::parallel::Ranks;
use crate::convert::piece::{Constants, Piece};
use crate::convert::settings::Settings;
use crate::convert::stack::info::{StackInfo, cut, cut_blocks, kv_heads, several_sizes};
use crate::convert::stack::part::Jobs;
use crate::convert::stack::{RankSlice, ScaleGroups, StackPlan};
use crate::convert::verdict;
use crate::load;
use crate::model::bind;
use crate::model::layers::{Role, Stack};
use crate::model::{Model, ModelError};

/// Marlin's format.
pub const FORMAT: Format = Format::new(&Descriptor {
    name: "marlin",
    title: "Marlin",
    about: || "Marlin's weight tiles, with permuted scales and biases".to_owned(),
    column: "Marlin",
    tensors,
    takes: String::new,
    examples: &[
        ["./Qwen3-30B-A3B-GPTQ ./out", ""],
        ["model out", "--tp-size 2 --tp-rank 1"],
        ["model out", "--input-dtype int8"],
    ],
    model_dtype: true,
    choice: None,
});

/// The names of the tensors, by format.
fn tensors() -> String {
    let integers = formats::titles(|f| matches!(f, formats::Format::Int(_)));
    let blocks =
        |global| move |f| matches!(f, formats::Format::Block(b) if b.has_global_scale() == global);
    let (own_scales, global_scales) =
        (formats::titles(blocks(false)), formats::titles(blocks(true)));
    format!(
        "  {integers:<21}qweight, scales, qzeros, g_idx, g_idx_sort_indices, bias
  compressed-tensors   weight_packed, weight_scale, weight_zero_point, weight_g_idx,
    integers           g_idx_sort_indices, bias
  FP8                  weight, weight_scale (blocks of quant_method fp8: weight_scale_inv), bias
  {own_scales:<21}weight, weight_scale, bias
  {global_scales:<21}weight, weight_scale, weight_global_scale (experts: weight_scale_2), bias
  int8 activations     also input_global_scale"
    )
}

/// Marlin's weight tiles, with permuted scales and biases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Marlin;

/// The name of the activations' type.
fn input_name(settings: &Settings) -> &'static str {
    match settings.input {
        InputDtype::Model => "model",
        InputDtype::Int8 => "int8",
        InputDtype::Fp8 => "fp8",
    }
}

/// Order of the scales' columns.
fn permutation(plan: &StackPlan, settings: &Settings) -> ScalePermutation {
    ScalePermutation::choose(plan.groups.size, plan.slice.shape.k(), settings.input.activations())
}

impl Target for Marlin {
    fn options(&self, settings: &Settings) -> Vec<(&'static str, Value)> {
        vec![("dtype", json!(settings.dtype.name())), ("input_dtype", json!(input_name(settings)))]
    }

    fn section(&self, settings: &Settings) -> Vec<(&'static str, Value)> {
        self.options(settings)
    }

    fn layer(&self, plan: &StackPlan, settings: &Settings) -> Vec<(&'static str, Value)> {
        let name = match permutation(plan, settings) {
            ScalePermutation::Grouped => "grouped",
            ScalePermutation::Single => "single",
        };
        vec![("scale_permutation", json!(name))]
    }

    fn plan(&self, stack: &Stack, info: StackInfo, context: Context<'_>) -> Planned {
        stack_plan(stack, info, context)
    }

    fn notes(
        &self,
        plan: &StackPlan,
        context: Context<'_>,
    ) -> Result<Result<Vec<String>, String>, ModelError> {
        notes::notes(plan, context)
    }

    fn constants(&self, plan: &StackPlan, context: Context<'_>) -> Result<Constants> {
        let Context { model, settings, .. } = context;
        let mut constants = Constants::default();
        let has_global = plan.output(TensorKind::GlobalScale).is_some();
        let int8 = plan.output(TensorKind::InputGlobalScale).is_some();
        if !has_global && !int8 {
            return Ok(constants);
        }
        let mut largest_code = 0u8;
        let mut max = f64::NEG_INFINITY;
        for matrices in &plan.experts {
            let scale =
                load::merged(model, matrices, bind::Part::Scale, &plan.slice.k, &plan.slice.n)?;
            let Some(scale) = scale else {
                return Err(Error::missing(format!("{}: scales", plan.module), "its scheme"));
            };
            if has_global {
                scale.expect_dtype(&[DType::F8E4M3])?;
                // Positive e4m3 values are ordered as their codes; 0x7f is NaN and refused later.
                let codes = scale.bytes().iter().copied().filter(|&b| b < 0x7f);
                largest_code = largest_code.max(codes.max().unwrap_or(0));
            }
            if int8 {
                let ty = marlinspike::formats::float_type(scale.dtype());
                let Some(ty) = ty else {
                    let found = scale.dtype();
                    return Err(Error::dtype(scale.name(), found, "a floating-point type"));
                };
                let table = Table::from_tensor(&scale, ty)?;
                let values = table.iter_bits().map(|b| ty.to_f64(b));
                max = values.filter(|v| v.is_finite()).fold(max, f64::max);
            }
        }
        if has_global {
            constants.scale_factor = Some(e4m3_scale_factor([largest_code], settings.dtype));
        }
        if int8 {
            // Rounding keeps the order, so the largest rounded scale is the largest one, rounded.
            let ty = settings.dtype;
            constants.int8_scale_max = Some(ty.to_f64(ty.encode_rne(max)) as f32);
        }
        Ok(constants)
    }

    fn pack(&self, job: &Job<'_>, weight: Weight<'_>) -> Result<Vec<Piece>> {
        let Job { plan, settings, constants, .. } = *job;
        let weight = match (&plan.slice.padding, plan.role) {
            (None, _) => weight,
            (Some(shard), Role::W13) => shard.w13(&weight, GateUp::Interleaved)?,
            (Some(shard), _) => shard.w2(&weight)?,
        };
        let options = Options {
            dtype: settings.dtype,
            input_dtype: settings.input,
            scale_factor: constants.scale_factor,
            int8_scale_max: constants.int8_scale_max.filter(|_| settings.input == InputDtype::Int8),
            perms: None,
            scale_permutation: Some(permutation(plan, settings)),
        };
        let prepared = prepare(std::slice::from_ref(&weight), options)?;
        expect_kept(&weight, &prepared, settings)?;
        pieces::pieces(plan, prepared, job.expert, job.part)
    }

    fn keeps_activations(&self) -> bool {
        true
    }

    fn unpack(&self, entry: &Entry<'_>) -> Result<Vec<Weight<'static>>> {
        unpack::stack(entry)
    }
}

/// The selection for this rank's part of `stack`; `None` if the stack cannot be cut, with the
/// reasons.
///
/// # Errors
/// [`ModelError`] for tensors that do not fit together.
pub(crate) fn ask(
    model: &Model<'_>,
    stack: &Stack,
    settings: &Settings,
) -> Result<(Option<Selection>, Vec<String>), ModelError> {
    if let Some(reason) = several_sizes(model, stack)? {
        return Ok((None, vec![reason]));
    }
    let ids: Vec<usize> = (0..stack.experts.len()).collect();
    let info = StackInfo::bind(model, stack, &ids)?;
    let mut reasons = Vec::new();
    let shape = match padding(stack, &info, settings) {
        Err(reason) => return Ok((None, vec![reason])),
        Ok(Some((_, shape))) => shape,
        Ok(None) => match cut(stack, &info, kv_heads(model), settings) {
            Err(reason) => return Ok((None, vec![reason])),
            Ok((k, n)) => {
                reasons = cut_blocks(&info, &n, settings.tp.size);
                Shape::new(k.len(), n.iter().map(Range::len).sum())
            }
        },
    };
    Ok((Some(verdict::selection(stack, shape, info.size_k, settings)), reasons))
}

/// gpt-oss's experts on this rank, if their sizes are to be rounded up: the rank, and the shape of
/// each expert's matrix in the kernel.
///
/// # Errors
/// The reason why a size cannot be cut or rounded.
fn padding(
    stack: &Stack,
    info: &StackInfo,
    settings: &Settings,
) -> Result<Option<(PaddedShard, Shape)>, String> {
    let stacked =
        matches!(stack.scheme, Scheme::Block { container, .. } if container.stacks_experts());
    if !stacked || !settings.preparation.padding {
        return Ok(None);
    }
    let ranks = if settings.ep.size > 1 { Ranks::ONE } else { settings.tp };
    let size_n = info.sizes_n.iter().sum::<usize>();
    let [hidden_size, intermediate_size] = match stack.role {
        Role::W13 => [info.size_k, size_n / 2],
        _ => [size_n, info.size_k],
    };
    let shard = PaddedShard {
        hidden_size,
        intermediate_size,
        tp_size: ranks.size,
        tp_rank: ranks.rank,
        backend: PaddedKernel::Marlin,
        platform: Platform::Cuda,
    };
    let [hidden, inner] = shard.sizes().map_err(|e| e.to_string())?;
    let shape = match stack.role {
        Role::W13 => Shape::new(hidden, 2 * inner),
        _ => Shape::new(inner, hidden),
    };
    Ok(Some((shard, shape)))
}

fn stack_plan(stack: &Stack, info: StackInfo, context: Context<'_>) -> Planned {
    let Context { kv_heads, settings, .. } = context;
    let padded = padding(stack, &info, settings).map_err(|e| vec![e])?;
    let (k, n) = match padded {
        // The rank's part is cut with its padding.
        Some(_) => (0..info.size_k, info.sizes_n.iter().map(|&n| 0..n).collect::<Vec<_>>()),
        None => cut(stack, &info, kv_heads, settings).map_err(|e| vec![e])?,
    };
    let shape = match padded {
        Some((_, shape)) => shape,
        None => Shape::new(k.len(), n.iter().map(Range::len).sum()),
    };
    let mut reasons = verdict::reasons(stack, shape, info.size_k, settings);
    let scheme = &stack.scheme;
    let group_size = bind::group_size(scheme, info.size_k);
    let act_order = bind::act_order(scheme);
    let row_parallel = padded.is_none() && k.len() != info.size_k;
    let groups = match act_order {
        true => info.file_groups,
        false => match group_size.groups(shape.k()) {
            Ok(g) => g,
            Err(e) => {
                reasons.push(e.to_string());
                1
            }
        },
    };
    reasons.extend(cut_blocks(&info, &n, settings.tp.size));
    let activations = settings.input.activations();
    let bits = scheme.bits().unwrap_or(8);
    if let Err(e) = WeightLayout::new(shape, bits, activations) {
        reasons.push(e.to_string());
    }
    if !reasons.is_empty() {
        reasons.dedup();
        return Err(reasons);
    }
    let mut plan = StackPlan {
        module: stack.module.clone(),
        role: stack.role,
        scheme: scheme.clone(),
        experts: info.experts,
        slice: RankSlice { k, n, shape, padding: padded.map(|(shard, _)| shard) },
        groups: ScaleGroups {
            size: group_size,
            count: groups,
            act_order,
            is_k_full: !(act_order && row_parallel),
        },
        // Padding changes sizes: an expert is one piece of work.
        jobs: if padded.is_some() { Jobs::Experts } else { Jobs::Rows },
        outputs: Vec::new(),
    };
    outputs(&mut plan, info.has_bias, settings);
    Ok(plan)
}

/// The stored type of scales in the kernel's format.
fn scale_dtype(scheme: &Scheme, model: DType) -> DType {
    match scheme {
        Scheme::Block { format, .. } => format.kernel_scale_dtype(),
        _ => model,
    }
}

fn outputs(plan: &mut StackPlan, has_bias: bool, settings: &Settings) {
    let model = if settings.dtype == ScalarType::FLOAT16 { DType::F16 } else { DType::BF16 };
    let pack = 32 / plan.code_bits() as usize;
    let Shape { size_k, size_n } = plan.slice.shape;
    let (role, experts, groups) = (plan.role, plan.experts.len(), plan.groups.count);
    let zeros = matches!(&plan.scheme, Scheme::Wna16(w) if !w.symmetric());
    let global = matches!(plan.scheme, Scheme::Block { format, .. } if format.has_global_scale());
    let (scales, act_order) = (scale_dtype(&plan.scheme, model), plan.groups.act_order);
    let mut push = |kind, dtype, shape: Vec<usize>| {
        let mut full = Vec::with_capacity(3);
        if role != Role::Dense && kind != TensorKind::InputGlobalScale {
            full.push(experts);
        }
        full.extend(shape);
        // One scale of one dense layer.
        if full.is_empty() {
            full.push(1);
        }
        plan.push(kind, dtype, full);
    };
    push(TensorKind::Weight, DType::I32, vec![size_k / 16, size_n * 16 / pack]);
    push(TensorKind::Scales, scales, vec![groups, size_n]);
    if zeros {
        push(TensorKind::Zeros, DType::I32, vec![groups, size_n / pack]);
    }
    if act_order {
        push(TensorKind::GIdx, DType::I32, vec![size_k]);
        push(TensorKind::SortIndices, DType::I32, vec![size_k]);
    }
    if has_bias {
        push(TensorKind::Bias, model, vec![size_n]);
    }
    if global {
        push(TensorKind::GlobalScale, DType::F32, vec![]);
    }
    if settings.input == InputDtype::Int8 && groups > 1 {
        push(TensorKind::InputGlobalScale, DType::F32, vec![1]);
    }
}
