//! The int4 path: supported stacks, outputs, and descriptions of layers in the files.
//!
//! It takes 4-bit codes: compressed-tensors with dynamic 8-bit activations, compressed-tensors with
//! 16-bit activations (which the path quantizes), and GPTQ. Zero points and the order of rows of
//! act-order are tables after a matrix's blocks. Experts of e2m1 codes with a power of two
//! for each 32 k are packed in their own format ([`CPU_E2M1`]), as are 8-bit codes with 8-bit activations
//! ([`CPU_INT8`]).

use std::borrow::Cow;
use std::collections::BTreeMap;

use marlinspike::Result;
use marlinspike::config::Scheme;
use marlinspike::container::TensorSpec;
use marlinspike::layers::ExpertMap;
use marlinspike::layouts::cpu::{CpuFormat, CpuSizes, CpuTables};
use marlinspike::layouts::{CPU_E2M1, CPU_INT4, CPU_INT8};
use marlinspike::moe::ScoringFunc;
use marlinspike::moe::activation::{Activation, Columns, Definition};
use marlinspike::moe::families::Renormalize;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::tensor::DType;
use marlinspike::prepare::gate_up::{GateUp, reorder};
use marlinspike::w4a8::FamilyRouting;
use marlinspike::w4a8::moe::GatedActivation;
use marlinspike::w4a8::packed::{ABOUT, NAME, RhsLayout, TITLE, operator_scales};
use marlinspike::w4a8::stored::{
    self, Description, LinearDescription, MoeDescription, OperatorRouting, StoredRouting,
};
use marlinspike::weight::Weight;
use serde_json::{Value, json};

mod order;
mod reasons;

use order::unordered;
use reasons::reasons;

use super::{Choice, Context, Described, Descriptor, Format, Planned, Target};
use crate::convert::job::Job;
use crate::convert::names::TensorKind;
use crate::convert::piece::{Bytes, Constants, Piece};
use crate::convert::settings::Settings;
use crate::convert::stack::info::StackInfo;
use crate::convert::stack::part::Jobs;
use crate::convert::stack::{Output, StackPlan};
use crate::model::bind;
use crate::model::layers::{Layers, Role, Stack};
use crate::model::routing::MoeRouting;
use crate::model::{Model, ModelError};

/// Columns of a job, if memory allows: files with N as the last dimension are then read in runs of
/// a few cache lines.
const COLUMNS: usize = 64;

/// The format of the int4 path.
pub const FORMAT: Format = Format::new(&Descriptor {
    name: NAME,
    title: TITLE,
    about: || ABOUT.to_owned(),
    column: "CPU 4-bit",
    tensors: || {
        format!(
            "  --to {NAME:<16}dense rhs_packed; experts w13_packed, w2_packed (bytes; scales, sums and
                       biases inside)"
        )
    },
    takes: || {
        "\
4-bit weights: compressed-tensors W4A8 (int-quantized or pack-quantized) and
W4A16, GPTQ and others. Zero points and act-order become tables after a matrix's blocks. Layers may
also be compressed-tensors W8A8-int8 with dynamic symmetric activations, and experts e2m1 with a power
of two for each 32 values. Each file describes its layers in its metadata, so `marlinspike run` needs
only the file."
            .to_owned()
    },
    examples: &[["model out", ""]],
    model_dtype: false,
    choice: Some(Choice {
        name: "nr",
        about: || "columns of a block [default: 8, as PyTorch packs]".to_owned(),
        values: &["8", "4"],
    }),
});

/// Columns of a block, by the index of the option's value.
const BLOCK_COLUMNS: [usize; 2] = [8, 4];

/// Blocks of `nr` columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Int4 {
    nr: usize,
}

impl Int4 {
    /// For the option's value of this index.
    pub(crate) fn new(chosen: usize) -> Self {
        Self { nr: BLOCK_COLUMNS[chosen] }
    }

    /// The format of weights of `scheme`, and the columns of its blocks.
    fn format(&self, scheme: &Scheme) -> (&'static CpuFormat, usize) {
        match scheme {
            Scheme::Block { .. } => (&CPU_E2M1, CPU_E2M1.nr[0]),
            Scheme::W8A8Int8 { .. } => (&CPU_INT8, CPU_INT8.nr[0]),
            _ => (&CPU_INT4, self.nr),
        }
    }

    fn sizes(&self, plan: &StackPlan) -> Result<CpuSizes> {
        let (format, nr) = self.format(&plan.scheme);
        (format.sizes)(plan.slice.shape, plan.groups.size, nr, tables(plan))
    }

    /// The layout of int4 weights of `shape`, a part of a matrix or all of it.
    fn layout(&self, plan: &StackPlan, shape: Shape) -> Result<RhsLayout> {
        RhsLayout::new(shape, plan.groups.size, self.nr)?.with_tables(tables(plan))
    }

    /// Packs the columns of a job.
    fn packed(&self, plan: &StackPlan, mut weight: Weight<'_>) -> Result<Vec<u8>> {
        let (format, nr) = self.format(&plan.scheme);
        if *format == CPU_INT4 {
            let grouped = plan.role != Role::Dense && plan.groups.size != GroupSize::Channel;
            weight.scales = operator_scales(&weight, grouped)?;
            let own = self.layout(plan, weight.shape())?;
            return Ok(own.pack_weight(&weight)?.into_bytes());
        }
        // The ranks' rows are added: only the first one's have the bias.
        if plan.role == Role::W2 && plan.slice.k.start > 0 {
            weight.bias = None;
        }
        match alternates(&plan.scheme, plan.role) {
            true => (format.pack)(&reorder(&weight, GateUp::Interleaved, GateUp::Halves)?, nr),
            false => (format.pack)(&weight, nr),
        }
    }
}

/// The tables after each matrix's blocks.
fn tables(plan: &StackPlan) -> CpuTables {
    let zero_points = matches!(&plan.scheme, Scheme::Wna16(w) if !w.symmetric());
    CpuTables { zero_points, act_order: plan.groups.act_order }
}

/// Whether gate and up alternate in the columns of the file's w13.
fn alternates(scheme: &Scheme, role: Role) -> bool {
    let stacked = matches!(scheme, Scheme::Block { container, .. } if container.stacks_experts());
    stacked && role == Role::W13
}

/// The entry of a stack's module in the files' metadata.
fn described(stack: &Stack, description: Description) -> Described {
    let (key, value) = (stored::key(&stack.module), description.to_json());
    Described { key, value, int4: Some(description) }
}

impl Target for Int4 {
    fn options(&self, _settings: &Settings) -> Vec<(&'static str, Value)> {
        vec![("nr", json!(self.nr))]
    }

    fn layer(&self, plan: &StackPlan, _settings: &Settings) -> Vec<(&'static str, Value)> {
        vec![("nr", json!(self.format(&plan.scheme).1))]
    }

    fn stack<'s>(&self, model: &Model<'_>, stack: &'s Stack) -> Result<Cow<'s, Stack>, ModelError> {
        unordered(model, stack)
    }

    fn plan(&self, stack: &Stack, info: StackInfo, context: Context<'_>) -> Planned {
        let Context { kv_heads, settings, .. } = context;
        let size_k = info.size_k;
        let cut = StackPlan::cut(stack, info, kv_heads, settings);
        let reasons = reasons(&stack.scheme, stack.role);
        let mut plan = match cut {
            Err(reason) => return Err(vec![reason]),
            Ok(_) if !reasons.is_empty() => return Err(reasons),
            Ok(plan) => plan,
        };
        plan.groups.act_order = bind::act_order(&stack.scheme);
        if plan.groups.act_order && plan.slice.shape.size_k != size_k {
            // Its rows may belong to any group.
            let found = format!("act-order: found {} of {size_k} rows", plan.slice.shape.size_k);
            return Err(vec![format!("{found} on this rank, expected all of them")]);
        }
        let sizes = self.sizes(&plan).map_err(|e| vec![e.to_string()])?;
        let alternates = alternates(&plan.scheme, plan.role);
        if let Some(n) = plan.slice.n.iter().find(|n| alternates && n.len() % 2 != 0) {
            return Err(vec![format!("columns {n:?} do not end with a pair of gate and up")]);
        }
        plan.groups.count = sizes.groups;
        let (name, mut shape) = match plan.role {
            Role::Dense => ("rhs_packed", Vec::new()),
            Role::W13 => ("w13_packed", vec![plan.experts.len()]),
            Role::W2 => ("w2_packed", vec![plan.experts.len()]),
        };
        shape.push(sizes.packed_len);
        let name = format!("{}.{name}", plan.module);
        let spec = TensorSpec { name, dtype: DType::U8, shape };
        plan.outputs.push(Output { kind: TensorKind::Weight, spec });
        // A column's sums go over all of its k; whole blocks are one run of bytes.
        plan.jobs = match alternates {
            true => Jobs::Experts,
            false => Jobs::Columns { unit: self.format(&plan.scheme).1, wanted: COLUMNS },
        };
        Ok(plan)
    }

    fn describe(
        &self,
        layers: &Layers,
        planned: &mut [Planned],
        maps: &BTreeMap<String, ExpertMap>,
        context: Context<'_>,
    ) -> BTreeMap<String, Described> {
        let mut all = BTreeMap::new();
        for i in 0..planned.len() {
            let stack = &layers.stacks[i];
            let Ok(plan) = &planned[i] else { continue };
            if stack.role == Role::Dense {
                let (format, nr) = self.format(&plan.scheme);
                let (shape, group_size) = (plan.slice.shape, plan.groups.size);
                let tables = tables(plan);
                let linear = LinearDescription { format, shape, group_size, nr, tables };
                all.insert(stack.module.clone(), described(stack, Description::Linear(linear)));
                continue;
            }
            if stack.role == Role::W2 && all.contains_key(&stack.module) {
                continue;
            }
            let other = layers.stacks.iter().position(|s| {
                s.module == stack.module && s.role != stack.role && s.role != Role::Dense
            });
            let sibling = other.and_then(|j| planned[j].as_ref().ok());
            let map = maps.get(&stack.module).and_then(|m| m.map.clone());
            match experts(context.model, stack, (plan, sibling), self.format(&plan.scheme), map) {
                Ok(moe) => {
                    all.insert(stack.module.clone(), described(stack, Description::Moe(moe)));
                }
                Err(reason) => {
                    planned[i] = Err(vec![reason.clone()]);
                    if let Some(j) = other {
                        planned[j] = Err(vec![reason]);
                    }
                }
            }
        }
        all
    }

    fn states_ranks(&self) -> bool {
        true
    }

    fn quantizes_activations(&self, plan: &StackPlan) -> bool {
        matches!(plan.scheme, Scheme::Wna16(_) | Scheme::Block { .. })
    }

    fn constants(&self, _plan: &StackPlan, _context: Context<'_>) -> Result<Constants> {
        Ok(Constants::default())
    }

    fn pack(&self, job: &Job<'_>, weight: Weight<'_>) -> Result<Vec<Piece>> {
        let Job { plan, expert, part, .. } = *job;
        let (sizes, nr) = (self.sizes(plan)?, self.format(&plan.scheme).1);
        let (matrix, block) = (expert * sizes.packed_len, part.columns.start / nr);
        let shape = weight.shape();
        let mut packed = self.packed(plan, weight)?;
        let piece =
            |at: usize, bytes| Piece::whole(TensorKind::Weight, at as u64, Bytes::B8(bytes));
        let mut pieces = Vec::new();
        if tables(plan) != CpuTables::NONE {
            let (whole, own) = (self.layout(plan, plan.slice.shape)?, self.layout(plan, shape)?);
            let order = packed.split_off(own.blocks_len() + own.zero_points_len());
            let zeros = packed.split_off(own.blocks_len());
            let tables = matrix + whole.blocks_len();
            if !zeros.is_empty() {
                pieces.push(piece(tables + block * own.nr() * own.groups(), zeros));
            }
            if !order.is_empty() && block == 0 {
                pieces.push(piece(tables + whole.zero_points_len(), order));
            }
        }
        pieces.push(piece(matrix + block * sizes.block_bytes, packed));
        Ok(pieces)
    }

    fn runs_packed(&self) -> bool {
        true
    }
}

/// The experts of a layer whose first planned stack is `plan`, w13.
fn experts(
    model: &Model<'_>,
    stack: &Stack,
    (plan, sibling): (&StackPlan, Option<&StackPlan>),
    (format, nr): (&'static CpuFormat, usize),
    expert_map: Option<Vec<i32>>,
) -> Result<MoeDescription, String> {
    let (Role::W13, Some(w2)) = (stack.role, sibling) else {
        return Err("found one of w13 and w2, expected both".to_owned());
    };
    let (w13, down) = (plan.slice.shape, w2.slice.shape);
    if w13.size_n != 2 * down.size_k || w13.size_k != down.size_n {
        return Err(format!("found w13 {w13} and w2 {down}, expected [H, 2I] and [I, H]"));
    }
    if tables(plan) != tables(w2) {
        let (a, b) = (tables(plan), tables(w2));
        return Err(format!("found {a:?} in w13 and {b:?} in w2, expected the same"));
    }
    if plan.groups.size != w2.groups.size {
        let (a, b) = (plan.groups.size, w2.groups.size);
        return Err(format!("found groups of {a} in w13 and of {b} in w2, expected the same"));
    }
    let num_experts = stack.experts.len();
    let interleaved = stack.experts[0].iter().any(|matrix| matrix.index.is_some());
    let reordered = alternates(&plan.scheme, Role::W13);
    let routing = routing(model, &stack.module, num_experts, (interleaved, reordered))?;
    let on_input = match &routing {
        StoredRouting::Operator(o) => o.router_weight_on_input,
        StoredRouting::Family(f) => f.rule().apply_router_weight_on_input,
    };
    if on_input && *format != CPU_INT4 {
        return Err("router weights: found them on the input, expected them on the output".into());
    }
    Ok(MoeDescription {
        format,
        hidden_size: w13.size_k,
        intermediate_size: down.size_k,
        num_experts,
        expert_map,
        group_size: plan.groups.size,
        nr,
        tables: tables(plan),
        routing,
    })
}

/// The layer's routing: upstream's settings where they suffice, so that older readers take the file,
/// else the family's rule with its tensors. `interleaved`: gate and up alternate in the file;
/// `reordered`: in the packed weights they do not.
fn routing(
    model: &Model<'_>,
    module: &str,
    num_experts: usize,
    (interleaved, reordered): (bool, bool),
) -> Result<StoredRouting, String> {
    let found =
        MoeRouting::read(model, module, num_experts, interleaved).map_err(|e| e.to_string())?;
    if found.activation.columns == Columns::Interleaved && !reordered {
        let name = found.rule.activation;
        return Err(format!(
            "activation {name}: found gate and up in alternating columns, expected halves"
        ));
    }
    let plain = found.rule.plain().filter(|r| r.scoring_func == ScoringFunc::Softmax);
    if plain.is_some() && found.activation == Definition::new(Activation::Silu) {
        return Ok(StoredRouting::Operator(OperatorRouting {
            top_k: found.rule.top_k,
            scoring_func: ScoringFunc::Softmax,
            renormalize: found.rule.renormalize != Renormalize::Never,
            activation: Activation::Silu,
            router_weight_on_input: found.rule.apply_router_weight_on_input,
        }));
    }
    let tensors = found.tensors();
    let [bias, scale] =
        [tensors.correction_bias, tensors.expert_scale].map(|t| t.map(<[f32]>::to_vec));
    let family = FamilyRouting::new(found.rule.clone(), num_experts, bias, scale);
    let family = family.map_err(|e| e.to_string())?;
    GatedActivation::of_family(family.activation()).map_err(|e| e.to_string())?;
    Ok(StoredRouting::Family(Box::new(family)))
}
