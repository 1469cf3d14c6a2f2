//! Experts for FlashInfer's and CUTLASS's kernels, 4-bit ones and those of FP8 blocks: supported stacks,
//! outputs, and descriptions in the files. [`target`] has the names.

mod blocks;

use std::collections::BTreeMap;

use marlinspike::config::Scheme;
use marlinspike::formats::{self, compressed_tensors, global_scale};
use marlinspike::layers::ExpertMap;
use marlinspike::layouts::Layout as _;
use marlinspike::layouts::experts::{
    BLOCK_K_BYTES, ExpertBackend, ExpertLayout, Fp8BlockBackend, Fp8BlockExpert, PackedExperts,
    Projection, target,
};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::DType;
use marlinspike::prepare::fp8::largest_scale;
use marlinspike::weight::{Groups, Table, Weight};
use marlinspike::{Error, Result};
use serde_json::{Value, json};

use super::{Choice, Context, Described, Descriptor, Format, Planned, Target, fp8_blocks, notes};
use crate::convert::entry::Entry;
use crate::convert::job::Job;
use crate::convert::names::TensorKind;
use crate::convert::piece::{Bytes, Constants, Piece};
use crate::convert::settings::Settings;
use crate::convert::stack::StackPlan;
use crate::convert::stack::info::StackInfo;
use crate::load;
use crate::model::bind::Part;
use crate::model::layers::{Layers, Role, Stack};
use crate::model::{Model, ModelError, values};

/// A layout of these kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertForm {
    /// int4 with a bf16 scale for each 32 k, for `trtllm_mxint4_block_scale_moe`.
    Mxint4,
    /// 4-bit floats with a global scale (NVFP4), for this backend.
    Scaled(ExpertBackend),
}

impl ExpertForm {
    /// The layout of a projection whose matrices are `shape`.
    ///
    /// # Errors
    /// As [`ExpertLayout::mxint4`] and [`ExpertLayout::for_backend`]; [`Error::Unsupported`] for a linear
    /// layer.
    pub fn layout(self, role: Role, shape: Shape) -> Result<ExpertLayout> {
        let projection = projection(role)?;
        let (hidden, inner) = match projection {
            Projection::W13 => (shape.size_k, shape.size_n / 2),
            Projection::W2 => (shape.size_n, shape.size_k),
        };
        match self {
            Self::Mxint4 => ExpertLayout::mxint4(projection, hidden, inner),
            Self::Scaled(backend) => {
                ExpertLayout::for_backend(backend, projection, hidden, inner, true)
            }
        }
    }

    /// Shape of one expert's codes as bytes: `[K / 256, N, 128]` of mxint4, `[N, K / 2]` of NVFP4.
    fn weight_shape(self, layout: &ExpertLayout) -> Vec<usize> {
        let [lines, bytes] = layout.weights().packed_shape();
        let size_n = layout.weights().shape().size_n;
        match self {
            Self::Mxint4 => vec![lines / size_n, size_n, bytes],
            Self::Scaled(_) => vec![lines, bytes],
        }
    }

    /// The layout of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let backend = || ExpertBackend::NAMED.iter().find(|(n, _)| *n == name);
        match name {
            "mxint4" => Some(Self::Mxint4),
            _ => backend().map(|(_, backend)| Self::Scaled(*backend)),
        }
    }

    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mxint4 => "mxint4",
            Self::Scaled(backend) => ExpertBackend::NAMED
                .iter()
                .find(|(_, b)| *b == backend)
                .map_or("", |(name, _)| name),
        }
    }
}

/// The projection of an expert's stack.
fn projection(role: Role) -> Result<Projection> {
    match role {
        Role::W13 => Ok(Projection::W13),
        Role::W2 => Ok(Projection::W2),
        Role::Dense => Err(Error::unsupported("a linear layer", "only experts are supported")),
    }
}

/// The layout for a stack, or the reason why none takes it.
fn choose(role: Role, scheme: &Scheme, backend: ExpertBackend) -> Result<ExpertForm, String> {
    if role == Role::Dense {
        return Err("found a linear layer, expected experts".to_owned());
    }
    match scheme {
        Scheme::Block { format, .. } if format.has_global_scale() => {
            Ok(ExpertForm::Scaled(backend))
        }
        Scheme::Wna16(w) => {
            let found =
                format!("{} {} in groups of {}", w.checkpoint_format, w.weight_type, w.group_size);
            let fits = *w.checkpoint_format == compressed_tensors::PACKED
                && w.weight_type == ScalarType::UINT4B8
                && w.group_size == GroupSize::Of(32)
                && !w.desc_act;
            match fits {
                true => Ok(ExpertForm::Mxint4),
                false => Err(format!(
                    "found {found}{}, expected compressed-tensors pack-quantized uint4b8 in groups of 32",
                    if w.desc_act { " with act-order" } else { "" }
                )),
            }
        }
        other => Err(format!(
            "found {}, expected {}, 4-bit integers or fp8 block 128x128",
            other.label(),
            formats::names(formats::Format::has_global_scale)
        )),
    }
}

/// The format of the experts of kernel libraries.
pub const FORMAT: Format = Format::new(&Descriptor {
    name: target::NAME,
    title: target::TITLE,
    about: || target::about(&scaled()),
    column: target::TITLE,
    tensors: || target::tensors(&scaled()),
    takes: || target::takes(&scaled()),
    examples: &[["model out", target::EXAMPLE]],
    model_dtype: false,
    choice: Some(EXPERT_BACKEND),
});

/// The option that names the kernel of experts; `run` has it, too.
pub const EXPERT_BACKEND: Choice = Choice {
    name: target::OPTION,
    about: || target::option_about(&scaled()),
    values: &ExpertBackend::NAMES,
};

/// Titles of the formats with a global scale.
fn scaled() -> String {
    formats::titles(formats::Format::has_global_scale)
}

/// Experts with a global scale and of FP8 blocks for the kernel `backend`, and int4 ones.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Experts {
    backend: ExpertBackend,
}

impl Experts {
    /// For the option's value of this index.
    pub(crate) fn new(chosen: usize) -> Self {
        Self { backend: ExpertBackend::NAMED[chosen].1 }
    }

    fn layout(&self, plan: &StackPlan) -> Result<(ExpertForm, ExpertLayout), String> {
        let kind = choose(plan.role, &plan.scheme, self.backend)?;
        let layout = kind.layout(plan.role, plan.slice.shape).map_err(|e| e.to_string())?;
        Ok((kind, layout))
    }

    /// The layout's name, the tile of its scales, and the description of the stack.
    fn description(&self, plan: &StackPlan) -> Option<(&'static str, Value, Value)> {
        if fp8_blocks(plan.role, &plan.scheme).is_some() {
            let backend = blocks::backend(self.backend).ok()?;
            let layout = blocks::layout(backend, plan.role, plan.slice.shape).ok()?;
            return Some((blocks::name(backend), Value::Null, blocks::description(&layout)));
        }
        let (kind, layout) = self.layout(plan).ok()?;
        let padded = layout.weights().shape();
        let steps: Vec<_> =
            layout.weights().rows().steps().iter().map(ToString::to_string).collect();
        let stack = json!({
            "size_k": padded.size_k,
            "size_n": padded.size_n,
            "rows": steps,
            "block_k_bytes": (kind == ExpertForm::Mxint4).then_some(BLOCK_K_BYTES),
        });
        Some((kind.name(), json!("128x4"), stack))
    }
}

/// Whether the activations' scales of experts of FP8 blocks are powers of two; `None` of other
/// stacks.
fn fp8_blocks(role: Role, scheme: &Scheme) -> Option<bool> {
    fp8_blocks::accept(scheme).ok().filter(|_| role != Role::Dense)
}

impl Target for Experts {
    fn options(&self, _settings: &Settings) -> Vec<(&'static str, Value)> {
        vec![(target::OPTION_KEY, json!(self.backend.name()))]
    }

    fn layer(&self, plan: &StackPlan, _settings: &Settings) -> Vec<(&'static str, Value)> {
        if let (Some(ue8m0), Ok(backend)) =
            (fp8_blocks(plan.role, &plan.scheme), blocks::backend(self.backend))
        {
            let name = json!(blocks::name(backend));
            return vec![("kernel_layout", name), fp8_blocks::activations(ue8m0)];
        }
        let layout = self.layout(plan).ok();
        layout.map(|(kind, _)| ("kernel_layout", json!(kind.name()))).into_iter().collect()
    }

    fn plan(&self, stack: &Stack, info: StackInfo, context: Context<'_>) -> Planned {
        let Context { kv_heads, settings, .. } = context;
        if fp8_blocks(stack.role, &stack.scheme).is_some() {
            let backend = blocks::backend(self.backend).map_err(|e| vec![e])?;
            if info.has_bias {
                return Err(vec!["found biases of experts, expected none".to_owned()]);
            }
            let plan = StackPlan::cut(stack, info, kv_heads, settings).map_err(|e| vec![e])?;
            return blocks::outputs(backend, plan);
        }
        let scales = info.experts[0].iter().all(|b| b.get(Part::InputScale).is_some());
        let plan = || StackPlan::cut(stack, info, kv_heads, settings);
        let chosen = choose(stack.role, &stack.scheme, self.backend);
        let mut plan = chosen.and_then(|_| plan()).map_err(|e| vec![e])?;
        let (kind, layout) = self.layout(&plan).map_err(|e| vec![e])?;
        plan.groups.count =
            plan.groups.size.groups(plan.slice.shape.k()).map_err(|e| vec![e.to_string()])?;
        let experts = plan.experts.len();
        let codes = [&[experts], kind.weight_shape(&layout).as_slice()].concat();
        plan.push(TensorKind::Weight, DType::U8, codes);
        let [rows, cols] = layout.scales().packed_shape();
        let scale = match kind {
            ExpertForm::Mxint4 => DType::BF16,
            ExpertForm::Scaled(_) => DType::F8E4M3,
        };
        plan.push(TensorKind::Scales, scale, vec![experts, rows, cols]);
        if let ExpertForm::Scaled(_) = kind {
            plan.push(TensorKind::GlobalScale, DType::F32, vec![experts]);
            if matches!(stack.scheme, Scheme::Block { weight_only: false, .. }) && scales {
                plan.push(TensorKind::InputScale, DType::F32, vec![experts]);
            }
        }
        Ok(plan)
    }

    fn notes(
        &self,
        plan: &StackPlan,
        context: Context<'_>,
    ) -> Result<Result<Vec<String>, String>, ModelError> {
        notes::notes(plan, context)
    }

    fn describe(
        &self,
        _layers: &Layers,
        planned: &mut [Planned],
        _maps: &BTreeMap<String, ExpertMap>,
        _context: Context<'_>,
    ) -> BTreeMap<String, Described> {
        let mut all: BTreeMap<String, Value> = BTreeMap::new();
        for plan in planned.iter().flatten() {
            let Some((name, scale_tile, stack)) = self.description(plan) else { continue };
            let value = all.entry(plan.module.clone()).or_insert_with(|| {
                json!({
                    "version": 1,
                    "layer": "moe",
                    "layout": name,
                    "num_experts": plan.experts.len(),
                    "group_size": plan.groups.size.to_config(),
                    "scale_tile": scale_tile,
                })
            });
            if plan.role == Role::W13 {
                value["hidden_size"] = json!(plan.slice.shape.size_k);
                value["intermediate_size"] = json!(plan.slice.shape.size_n / 2);
            }
            value[plan.role.prefix().trim_end_matches('_')] = stack;
        }
        let described = |(module, value): (String, Value)| {
            let key = key(&module);
            (module, Described { key, value, int4: None })
        };
        all.into_iter().map(described).collect()
    }

    fn constants(&self, plan: &StackPlan, context: Context<'_>) -> Result<Constants> {
        let mut constants = Constants::default();
        if plan.output(TensorKind::InputScale).is_some() && self.backend.shares_activation_scale() {
            let of = |e| input_multipliers(context.model, plan, e);
            let all = (0..plan.experts.len()).map(of).collect::<Result<Vec<_>>>()?;
            constants.input_scale = self.backend.activation_scales(&all)?.first().copied();
        }
        Ok(constants)
    }

    fn pack(&self, job: &Job<'_>, weight: Weight<'_>) -> Result<Vec<Piece>> {
        let Job { model, plan, constants, expert, .. } = *job;
        if fp8_blocks(plan.role, &plan.scheme).is_some() {
            let backend = blocks::backend(self.backend);
            let backend = backend.map_err(|e| Error::unsupported(&plan.module, e))?;
            return blocks::pack(backend, plan, expert, &weight);
        }
        let (_, layout) = self.layout(plan).map_err(|e| Error::unsupported(&plan.module, e))?;
        let packed = layout.pack(std::slice::from_ref(&weight))?;
        let whole = |kind, bytes: Bytes| {
            let at = expert as u64 * bytes.get().len() as u64;
            Piece::whole(kind, at, bytes)
        };
        let mut list = vec![
            whole(TensorKind::Weight, Bytes::B8(packed.weights)),
            whole(TensorKind::Scales, Bytes::of(&packed.scales)),
        ];
        if let Some(global) = weight.global_scale {
            list.push(whole(TensorKind::GlobalScale, Bytes::F32(vec![global])));
        }
        if plan.output(TensorKind::InputScale).is_some() {
            let scale = match constants.input_scale {
                Some(shared) => shared,
                None => largest_scale(&input_multipliers(model, plan, expert)?),
            };
            list.push(whole(TensorKind::InputScale, Bytes::F32(vec![scale])));
        }
        Ok(list)
    }

    fn unpack(&self, entry: &Entry<'_>) -> Result<Vec<Weight<'static>>> {
        if let Some(backend) = entry.text("kernel_layout").and_then(blocks::from_name) {
            return blocks::unpack(backend, entry);
        }
        let kind = entry.text("kernel_layout").and_then(ExpertForm::from_name);
        let kind = kind.ok_or_else(|| entry.bad("kernel_layout", "mxint4 or a backend"))?;
        let layout = kind.layout(entry.role, entry.shape()?)?;
        let experts = entry.experts()?;
        let (weight, scales) = (entry.need("weight")?, entry.need("scales")?);
        let globals = entry.floats("global_scale", experts)?;
        let packed = PackedExperts {
            experts,
            weights: weight.bytes().to_vec(),
            scales: Table::from_tensor(&scales, layout.scales().ty())?,
        };
        let (ty, group_size) = (entry.ty()?, entry.group_size()?);
        let stack = entry.role.prefix().trim_end_matches('_');
        let unpacked = layout.unpack(&packed)?.into_iter().enumerate().map(|(e, expert)| Weight {
            name: format!("{}.{stack}[{e}]", entry.module),
            ty,
            codes: expert.codes,
            scales: expert.scales,
            zeros: None,
            groups: Groups::Uniform(group_size),
            global_scale: globals.as_ref().map(|g| g[e]),
            bias: None,
        });
        Ok(unpacked.collect())
    }
}

/// The multipliers of the quantized activations of an expert's matrices.
fn input_multipliers(model: &Model<'_>, plan: &StackPlan, expert: usize) -> Result<Vec<f32>> {
    let matrices = &plan.experts[expert];
    let part = Part::InputScale;
    let Some(tensor) = load::merged(model, matrices, part, &plan.slice.k, &plan.slice.n)? else {
        let what = format!("{}: the scale of its activations", matrices[0].name);
        return Err(Error::missing(what, plan.scheme.label()));
    };
    match &plan.scheme {
        Scheme::Block { container, .. } => {
            global_scale::multipliers(&tensor, container.global_scale())
        }
        _ => values::floats(&tensor),
    }
}

/// The key under which a file's metadata describes a layer.
pub fn key(module: &str) -> String {
    format!("{}.{module}", target::METADATA)
}
