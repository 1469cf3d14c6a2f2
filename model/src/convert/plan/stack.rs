//! One stack on one rank: which part of its matrices, whether Marlin takes it, what comes out.

use std::ops::Range;

use marlinspike::config::Scheme;
use marlinspike::container::TensorSpec;
use marlinspike::dims::Shape;
use marlinspike::layout::marlin::{InputDtype, ScalePermutation, WeightLayout};
use marlinspike::scalar::ScalarType;
use marlinspike::tensor::DType;

use super::{Output, Packing, Settings, StackPlan, prepared};
use crate::convert::names::{self, Kind};
use crate::convert::parallel::{self, Ranks, Style};
use crate::convert::verdict;
use crate::model::bind::{self, Bound, Part};
use crate::model::layers::{Role, Stack};
use crate::model::{Model, ModelError};

/// A stack with its tensors found, before it is cut to a rank.
pub(super) struct StackInfo {
    pub(super) experts: Vec<Vec<Bound>>,
    /// Of the whole layer: K, and N of each matrix.
    pub(super) size_k: usize,
    pub(super) sizes_n: Vec<usize>,
    has_bias: bool,
    /// Rows of the scale table in the file, under act-order.
    file_groups: usize,
}

impl StackInfo {
    pub(super) fn bind(
        model: &Model<'_>,
        stack: &Stack,
        ids: &[usize],
    ) -> Result<Self, ModelError> {
        let fail = |reason: String| Err(ModelError::module(&stack.module, reason));
        let mut experts = Vec::with_capacity(ids.len());
        for &e in ids {
            let row = stack.experts[e].iter().map(|m| Bound::find(model, &stack.scheme, m));
            experts.push(row.collect::<Result<Vec<_>, _>>()?);
        }
        let Some(first) = experts.first() else {
            return fail("no expert on this rank".to_owned());
        };
        let shapes = |row: &[Bound]| row.iter().map(|b| b.shape).collect::<Vec<_>>();
        let parts = |row: &[Bound]| {
            let kinds = |b: &Bound| b.tensors.iter().map(|f| f.binding.part).collect::<Vec<_>>();
            row.iter().map(kinds).collect::<Vec<_>>()
        };
        for row in &experts {
            if (shapes(row), parts(row)) != (shapes(first), parts(first)) {
                let (a, b) = (&row[0].name, &first[0].name);
                let found = format!("`{a}` is {}", row[0].shape);
                return fail(format!("{found}, `{b}` {}: experts must be alike", first[0].shape));
            }
            if let Some(other) = row.iter().find(|b| b.shape.size_k != row[0].shape.size_k) {
                let (a, b) = (&row[0], other);
                let found = format!("`{}` is {}, `{}` {}", a.name, a.shape, b.name, b.shape);
                return fail(format!("{found}: both need the same K"));
            }
        }
        let dim = match &stack.scheme {
            Scheme::Wna16(w) if w.checkpoint_format.name().starts_with("compressed") => 1,
            _ => 0,
        };
        let scale = first[0].get(Part::Scale);
        Ok(Self {
            size_k: first[0].shape.size_k,
            sizes_n: first.iter().map(|b| b.shape.size_n).collect(),
            has_bias: first[0].get(Part::Bias).is_some(),
            file_groups: scale.and_then(|f| f.shape.get(dim).copied()).unwrap_or(1),
            experts,
        })
    }
}

/// The rank's part of a layer's matrices: rows, and columns of each matrix.
pub(super) type Cut = (Range<usize>, Vec<Range<usize>>);

pub(super) fn cut(
    stack: &Stack,
    info: &StackInfo,
    kv_heads: Option<usize>,
    settings: &Settings,
) -> Result<Cut, String> {
    let whole_n = || info.sizes_n.iter().map(|&n| 0..n).collect::<Vec<_>>();
    let columns = |ranks: Ranks| {
        info.sizes_n.iter().map(|&n| parallel::cut("size_n", n, ranks)).collect::<Result<_, _>>()
    };
    let tp = settings.tp;
    if tp.size == 1 || (stack.role != Role::Dense && settings.ep.size > 1) {
        return Ok((0..info.size_k, whole_n()));
    }
    let style = match stack.role {
        Role::W13 => Style::Column,
        Role::W2 => Style::Row,
        Role::Dense => Style::of(&stack.module),
    };
    match style {
        Style::Replicated => Ok((0..info.size_k, whole_n())),
        Style::Column => Ok((0..info.size_k, columns(tp)?)),
        Style::KeyValue => {
            let n = parallel::cut_heads(info.sizes_n[0], kv_heads, tp)?;
            Ok((0..info.size_k, vec![n]))
        }
        Style::Row => Ok((parallel::cut("size_k", info.size_k, tp)?, whole_n())),
        Style::Merged => {
            Err("several matrices in one tensor: how to cut them for tp_size > 1 is unknown".into())
        }
    }
}

/// The stack on this rank, or every reason against.
pub(super) fn stack_plan(
    stack: &Stack,
    info: StackInfo,
    kv_heads: Option<usize>,
    settings: &Settings,
) -> Result<StackPlan, Vec<String>> {
    let padded = prepared::padding(stack, &info, settings).map_err(|e| vec![e])?;
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
    // An FP8 block that spans several columns must not be cut, nor share a tensor's edge.
    if let Some(unit) = info.experts[0][0].get(Part::Scale).and_then(|f| f.binding.n)
        && unit.unit > 1
        && (n.len() > 1 || settings.tp.size > 1)
    {
        for r in n.iter().filter(|r| {
            !r.start.is_multiple_of(unit.unit) || (!r.end.is_multiple_of(unit.unit) && n.len() > 1)
        }) {
            reasons.push(format!("columns {r:?} do not end with a block of {}", unit.unit));
        }
    }
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
        k,
        n,
        shape,
        group_size,
        groups,
        act_order,
        is_k_full: !(act_order && row_parallel),
        padding: padded.map(|(shard, _)| shard),
        packing: Packing::Marlin {
            permutation: ScalePermutation::choose(group_size, shape.k(), activations),
        },
        outputs: Vec::new(),
    };
    plan.outputs = outputs(&plan, info.has_bias, settings);
    Ok(plan)
}

/// The stored type of scales in the kernel's format.
fn scale_dtype(scheme: &Scheme, model: DType) -> DType {
    match scheme {
        Scheme::Mx { .. } => DType::F8E8M0,
        Scheme::Nvfp4 { .. } => DType::F8E4M3,
        _ => model,
    }
}

fn outputs(plan: &StackPlan, has_bias: bool, settings: &Settings) -> Vec<Output> {
    let model = if settings.dtype == ScalarType::FLOAT16 { DType::F16 } else { DType::BF16 };
    let pack = 32 / plan.code_bits() as usize;
    let Shape { size_k, size_n } = plan.shape;
    let mut outputs = Vec::new();
    let mut push = |kind, dtype, shape: Vec<usize>| {
        let mut full = Vec::with_capacity(3);
        if plan.role != Role::Dense && kind != Kind::InputGlobalScale {
            full.push(plan.experts.len());
        }
        full.extend(shape);
        // One scale of one dense layer.
        if full.is_empty() {
            full.push(1);
        }
        let name = names::full(&plan.module, &plan.scheme, plan.role, kind);
        outputs.push(Output { kind, spec: TensorSpec { name, dtype, shape: full } });
    };
    push(Kind::Weight, DType::I32, vec![size_k / 16, size_n * 16 / pack]);
    push(Kind::Scales, scale_dtype(&plan.scheme, model), vec![plan.groups, size_n]);
    if matches!(&plan.scheme, Scheme::Wna16(w) if !w.symmetric()) {
        push(Kind::Zeros, DType::I32, vec![plan.groups, size_n / pack]);
    }
    if plan.act_order {
        push(Kind::GIdx, DType::I32, vec![size_k]);
        push(Kind::SortIndices, DType::I32, vec![size_k]);
    }
    if has_bias {
        push(Kind::Bias, model, vec![size_n]);
    }
    if matches!(plan.scheme, Scheme::Nvfp4 { .. }) {
        push(Kind::GlobalScale, DType::F32, vec![]);
    }
    if settings.input == InputDtype::Int8 && plan.groups > 1 {
        push(Kind::InputGlobalScale, DType::F32, vec![1]);
    }
    outputs
}
