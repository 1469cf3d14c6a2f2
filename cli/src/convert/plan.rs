//! The plan of a conversion: pure data. Which tensors come out, in which file, of what shape, and
//! from which parts of which tensors they are made.

use std::collections::BTreeMap;
use std::ops::Range;

use marlinspike::config::Scheme;
use marlinspike::container::TensorSpec;
use marlinspike::dims::{GroupSize, Shape};
use marlinspike::layers::{ExpertMap, ExpertPlacement, determine_expert_map};
use marlinspike::layout::marlin::{InputDtype, ScalePermutation, WeightLayout};
use marlinspike::scalar::ScalarType;
use marlinspike::select::{Capability, Selection};
use marlinspike::tensor::DType;

use super::names::{self, Kind};
use super::parallel::{self, Ranks, Style};
use super::verdict;
use crate::model::bind::{self, Bound, Part};
use crate::model::layers::{Layers, Role, Stack};
use crate::model::{Model, ModelError};

/// Bytes of packed weight that one job makes, unless act-order ties the rows together.
const JOB_BYTES: usize = 512 << 10;

/// Bytes of one piece of a tensor that is copied.
const COPY_BYTES: u64 = 16 << 20;

/// What a conversion depends on beside the model.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The model's 16-bit type.
    pub dtype: ScalarType,
    /// Activations inside the product.
    pub input: InputDtype,
    /// Tensor parallelism.
    pub tp: Ranks,
    /// Expert parallelism.
    pub ep: Ranks,
    /// The device that the kernel is for.
    pub device: Capability,
    /// Whether modules that Marlin cannot take are copied.
    pub skip_unsupported: bool,
    /// Most bytes of a shard; a layer larger than that has one for itself.
    pub shard_bytes: u64,
}

/// A tensor in the kernel's format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// What it holds.
    pub kind: Kind,
    /// Name, type, shape.
    pub spec: TensorSpec,
}

/// One stack on one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct StackPlan {
    /// The module.
    pub module: String,
    /// Which matrices.
    pub role: Role,
    /// How they are stored.
    pub scheme: Scheme,
    /// The tensors of this rank's experts.
    pub experts: Vec<Vec<Bound>>,
    /// Rows of the file's matrices that this rank holds.
    pub k: Range<usize>,
    /// Columns of each matrix that this rank holds.
    pub n: Vec<Range<usize>>,
    /// Shape of each expert's matrix on this rank.
    pub shape: Shape,
    /// k per scale.
    pub group_size: GroupSize,
    /// Rows of each expert's scales on this rank.
    pub groups: usize,
    /// Whether rows are ordered by their groups.
    pub act_order: bool,
    /// Whether this rank has all rows of each of its groups.
    pub is_k_full: bool,
    /// Order of the scales' columns.
    pub permutation: ScalePermutation,
    /// Rows that one job packs.
    pub job_k: usize,
    /// What comes out.
    pub outputs: Vec<Output>,
}

impl StackPlan {
    /// The output of this kind, if there is one.
    pub fn output(&self, kind: Kind) -> Option<&Output> {
        self.outputs.iter().find(|o| o.kind == kind)
    }

    /// Runs of rows, one per job.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> {
        let (size_k, step) = (self.shape.size_k, self.job_k);
        (0..size_k).step_by(step.max(1)).map(move |k| k..(k + step).min(size_k))
    }

    /// Bits of one packed code.
    pub fn code_bits(&self) -> u32 {
        self.scheme.bits().unwrap_or(8)
    }

    /// Most memory that a job takes, in bytes: the packed rows, as much again for the gathered
    /// and the unpacked source, and scales in several forms.
    pub fn job_bytes(&self) -> u64 {
        let packed = self.job_k as u64 * self.shape.size_n as u64 * u64::from(self.code_bits()) / 8;
        let share = self.groups as u64 * self.job_k as u64 / self.shape.size_k.max(1) as u64;
        3 * packed + (share + 1) * self.shape.size_n as u64 * 16
    }
}

/// Where an output tensor's bytes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// A tensor of the model as it is: the item's own name.
    Copy,
    /// An output of a stack.
    Stack {
        /// Index of the stack.
        stack: usize,
        /// Which output.
        kind: Kind,
    },
}

/// A tensor of an output file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// Name, type, shape.
    pub spec: TensorSpec,
    /// Where it comes from.
    pub source: Source,
}

/// One output file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardPlan {
    /// Its final name.
    pub name: String,
    /// Its tensors, in the order of their bytes.
    pub items: Vec<Item>,
}

/// A module that Marlin cannot take, with every reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The module, with `w13` or `w2` for experts.
    pub module: String,
    /// Why.
    pub reasons: Vec<String>,
}

/// What a conversion will do.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The stacks to convert.
    pub stacks: Vec<StackPlan>,
    /// The files to write.
    pub shards: Vec<ShardPlan>,
    /// What cannot be converted.
    pub refused: Vec<Refused>,
    /// The experts of this rank, by layer, where they are spread.
    pub expert_maps: BTreeMap<String, ExpertMap>,
}

/// A byte count as a size of memory.
fn byte_len(spec: &TensorSpec) -> Result<u64, ModelError> {
    spec.byte_len().ok_or_else(|| ModelError::module(&spec.name, "the size overflows"))
}

impl Plan {
    /// Plans the conversion of `model`, whose modules are `layers`.
    ///
    /// # Errors
    /// [`ModelError`] for modules whose tensors do not fit together. What Marlin cannot take is
    /// no error here but an entry of [`Plan::refused`].
    pub fn new(
        model: &Model<'_>,
        layers: &Layers,
        settings: &Settings,
    ) -> Result<Self, ModelError> {
        let mut plan = Self {
            stacks: Vec::new(),
            shards: Vec::new(),
            refused: Vec::new(),
            expert_maps: BTreeMap::new(),
        };
        let kv_heads = kv_heads(model);
        let mut planned = Vec::with_capacity(layers.stacks.len());
        for stack in &layers.stacks {
            let map = expert_map(stack, settings)?;
            let whole = StackInfo::bind(model, stack, &map.global_ids)?;
            if settings.ep.size > 1 && stack.role != Role::Dense {
                plan.expert_maps.insert(stack.module.clone(), map);
            }
            planned.push(stack_plan(stack, whole, kv_heads, settings));
        }
        // w13 and w2 share their layer's fate.
        for i in 0..planned.len() {
            let stack = &layers.stacks[i];
            let sibling = layers.stacks.iter().position(|s| {
                stack.role != Role::Dense && s.module == stack.module && s.role != stack.role
            });
            if let (Some(j), Ok(_)) = (sibling, &planned[i])
                && planned[j].is_err()
            {
                let other = layers.stacks[j].role.prefix().trim_end_matches('_');
                planned[i] = Err(vec![format!("{other} of the same layer is refused")]);
            }
        }
        let mut copied: Vec<&str> = model
            .entries()
            .map(|e| e.name())
            .filter(|name| !layers.owned.contains(*name))
            .collect();
        for (stack, planned) in layers.stacks.iter().zip(planned) {
            match planned {
                Ok(p) => plan.stacks.push(p),
                Err(reasons) => {
                    let suffix = stack.role.prefix().trim_end_matches('_');
                    let name = format!("{} {suffix}", stack.module);
                    plan.refused.push(Refused { module: name.trim_end().to_owned(), reasons });
                    copied.extend(own_tensors(layers, stack));
                }
            }
        }
        plan.shards = plan.shards_of(model, copied, settings.shard_bytes)?;
        Ok(plan)
    }

    /// Deals stacks and copied tensors to files, in the order of their names.
    fn shards_of(
        &self,
        model: &Model<'_>,
        copied: Vec<&str>,
        limit: u64,
    ) -> Result<Vec<ShardPlan>, ModelError> {
        let mut units: Vec<(String, Vec<Item>)> = Vec::new();
        for name in copied {
            let Some(entry) = model.entry(name) else { continue };
            let spec = TensorSpec {
                name: name.to_owned(),
                dtype: entry.dtype(),
                shape: entry.shape().to_vec(),
            };
            units.push((name.to_owned(), vec![Item { spec, source: Source::Copy }]));
        }
        for (stack, plan) in self.stacks.iter().enumerate() {
            let item = |o: &Output| Item {
                spec: o.spec.clone(),
                source: Source::Stack { stack, kind: o.kind },
            };
            let name = format!("{}.{}", plan.module, plan.role.prefix());
            units.push((name, plan.outputs.iter().map(item).collect()));
        }
        units.sort_by(|a, b| a.0.cmp(&b.0));
        let mut seen = std::collections::HashSet::new();
        let mut files: Vec<(u64, Vec<Item>)> = Vec::new();
        for (_, items) in units {
            let mut bytes = 0u64;
            for item in &items {
                if !seen.insert(item.spec.name.clone()) {
                    let what = "two tensors would have this name";
                    return Err(ModelError::module(&item.spec.name, what));
                }
                bytes = bytes.saturating_add(byte_len(&item.spec)?);
            }
            match files.last_mut() {
                Some((used, file)) if used.saturating_add(bytes) <= limit => {
                    *used += bytes;
                    file.extend(items);
                }
                _ => files.push((bytes, items)),
            }
        }
        let count = files.len();
        let name = |i: usize| match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let shard = |(i, (_, mut items)): (usize, (u64, Vec<Item>))| {
            // Wider types first, so that every tensor is aligned in the mapped file.
            items.sort_by(|a, b| {
                let bits = |x: &Item| std::cmp::Reverse(x.spec.dtype.bits());
                bits(a).cmp(&bits(b)).then_with(|| a.spec.name.cmp(&b.spec.name))
            });
            ShardPlan { name: name(i), items }
        };
        Ok(files.into_iter().enumerate().map(shard).collect())
    }

    /// Bytes of all tensors that will be written.
    pub fn output_bytes(&self) -> u64 {
        let items = self.shards.iter().flat_map(|s| &s.items);
        items.filter_map(|i| i.spec.byte_len()).sum()
    }
}

/// Pieces of a copied tensor of `len` bytes.
pub fn copy_runs(len: u64) -> impl Iterator<Item = Range<u64>> {
    (0..len).step_by(COPY_BYTES as usize).map(move |at| at..(at + COPY_BYTES).min(len))
}

fn own_tensors<'l>(layers: &'l Layers, stack: &Stack) -> Vec<&'l str> {
    let mut names = Vec::new();
    let mut last = None;
    for matrix in stack.experts.iter().flatten() {
        // The experts of a stored stack share their tensors.
        if last == Some(&matrix.prefix) {
            continue;
        }
        last = Some(&matrix.prefix);
        let from = layers.owned.range(matrix.prefix.clone()..);
        let own = from.take_while(|n| n.starts_with(&matrix.prefix));
        names.extend(own.map(String::as_str).filter(|n| !n[matrix.prefix.len()..].contains('.')));
    }
    names
}

fn expert_map(stack: &Stack, settings: &Settings) -> Result<ExpertMap, ModelError> {
    let (ranks, count) = match stack.role {
        Role::Dense => (Ranks::ONE, 1),
        _ => (settings.ep, stack.experts.len()),
    };
    determine_expert_map(ranks.size, ranks.rank, count, ExpertPlacement::Linear)
        .map_err(|e| ModelError::module(&stack.module, e))
}

/// A stack with its tensors found, before it is cut to a rank.
struct StackInfo {
    experts: Vec<Vec<Bound>>,
    /// Of the whole layer: K, and N of each matrix.
    size_k: usize,
    sizes_n: Vec<usize>,
    has_bias: bool,
    /// Rows of the scale table in the file, under act-order.
    file_groups: usize,
}

impl StackInfo {
    fn bind(model: &Model<'_>, stack: &Stack, ids: &[usize]) -> Result<Self, ModelError> {
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
type Cut = (Range<usize>, Vec<Range<usize>>);

fn cut(
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

/// What the selection says of this rank's part of `stack`; none where the stack cannot be cut,
/// which the reasons then say.
///
/// # Errors
/// [`ModelError`] for tensors that do not fit together.
pub fn ask(
    model: &Model<'_>,
    stack: &Stack,
    settings: &Settings,
) -> Result<(Option<Selection>, Vec<String>), ModelError> {
    let ids: Vec<usize> = (0..stack.experts.len()).collect();
    let info = StackInfo::bind(model, stack, &ids)?;
    Ok(match cut(stack, &info, kv_heads(model), settings) {
        Err(reason) => (None, vec![reason]),
        Ok((k, n)) => {
            let shape = Shape::new(k.len(), n.iter().map(Range::len).sum());
            (Some(verdict::selection(stack, shape, info.size_k, settings)), Vec::new())
        }
    })
}

/// `num_key_value_heads` of the config.
fn kv_heads(model: &Model<'_>) -> Option<usize> {
    let heads = model.config_value("num_key_value_heads")?.as_u64()?;
    usize::try_from(heads).ok()
}

/// The stack on this rank, or every reason against.
fn stack_plan(
    stack: &Stack,
    info: StackInfo,
    kv_heads: Option<usize>,
    settings: &Settings,
) -> Result<StackPlan, Vec<String>> {
    let (k, n) = cut(stack, &info, kv_heads, settings).map_err(|e| vec![e])?;
    let shape = Shape::new(k.len(), n.iter().map(Range::len).sum());
    let mut reasons = verdict::reasons(stack, shape, info.size_k, settings);
    let scheme = &stack.scheme;
    let group_size = bind::group_size(scheme, info.size_k);
    let act_order = bind::act_order(scheme);
    let row_parallel = k.len() != info.size_k;
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
        permutation: ScalePermutation::choose(group_size, shape.k(), activations),
        job_k: job_rows(shape, bits, group_size, act_order),
        outputs: Vec::new(),
    };
    plan.outputs = outputs(&plan, info.has_bias, settings);
    Ok(plan)
}

/// Rows per job: whole groups and whole tiles, about [`JOB_BYTES`] of packed weight.
fn job_rows(shape: Shape, bits: u32, group_size: GroupSize, act_order: bool) -> usize {
    if act_order {
        return shape.size_k;
    }
    let unit = match group_size {
        GroupSize::Channel => 128,
        GroupSize::Of(g) => lcm(g, 128),
    };
    let rows = JOB_BYTES * 8 / bits as usize / shape.size_n.max(1);
    (rows / unit * unit).clamp(unit.min(shape.size_k), shape.size_k)
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b)
}

/// The stored type of scales in the kernel's format.
fn scale_dtype(scheme: &Scheme, model: DType) -> DType {
    match scheme {
        Scheme::Mxfp4 { .. } | Scheme::Mxfp8 { .. } => DType::F8E8M0,
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
