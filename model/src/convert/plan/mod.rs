//! The plan of a conversion: pure data. Which tensors come out, in which file, of what shape, and
//! from which parts of which tensors they are made.
//!
//! What follows from the kernel format alone stands in `stack` (Marlin) and `kleidi` (the int4
//! path); the rest is common.

mod deal;
mod flashinfer;
mod kleidi;
mod part;
mod prepared;
mod stack;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use marlinspike::config::Scheme;
use marlinspike::container::TensorSpec;
use marlinspike::dims::{GroupSize, Shape};
use marlinspike::layers::{ExpertMap, ExpertPlacement, determine_expert_map};
use marlinspike::layout::kleidi::RhsLayout;
use marlinspike::layout::marlin::ScalePermutation;
use marlinspike::prepare::gpt_oss::GptOssShard;
use marlinspike::select::Selection;
use marlinspike::w4a8::stored::Description;

pub use super::error::Refused;
use super::names::Kind;
use super::parallel::Ranks;
pub use super::settings::{Format, Settings};
use super::verdict;
use crate::load::Reading;
use crate::load::preparation::Preparation;
use crate::model::bind::Bound;
use crate::model::layers::{Layers, Role, Stack};
use crate::model::{Model, ModelError};
pub use deal::{RANKS_KEY, copy_runs};
pub use flashinfer::{FlashinferLayout, key as flashinfer_key};
pub use part::Part;
use stack::{StackInfo, cut, stack_plan};

/// A tensor in the kernel's format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// What it holds.
    pub kind: Kind,
    /// Name, type, shape.
    pub spec: TensorSpec,
}

/// How a stack's matrices are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// In tiles.
    Marlin {
        /// Order of the scales' columns.
        permutation: ScalePermutation,
    },
    /// In blocks of columns.
    Kleidi(RhsLayout),
    /// Rows in another order, scales in tiles.
    Flashinfer(FlashinferLayout),
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
    /// gpt-oss: the rank whose sizes are rounded up; `shape` has them rounded, `k` and `n` the file's.
    pub padding: Option<GptOssShard>,
    /// How its bytes lie.
    pub packing: Packing,
    /// What comes out.
    pub outputs: Vec<Output>,
}

impl StackPlan {
    /// The output of this kind, if there is one.
    pub fn output(&self, kind: Kind) -> Option<&Output> {
        self.outputs.iter().find(|o| o.kind == kind)
    }

    /// Whether the format quantizes activations that the checkpoint keeps in 16 bits.
    pub fn quantizes_activations(&self) -> bool {
        let sixteen = matches!(self.scheme, Scheme::Wna16(_));
        sixteen && matches!(self.packing, Packing::Kleidi(_))
    }

    /// How its matrices are read.
    pub fn reading(&self, preparation: Preparation) -> Reading<'_> {
        Reading {
            scheme: &self.scheme,
            n: &self.n,
            group_size: self.group_size,
            act_order: self.act_order,
            preparation,
        }
    }

    /// Bits of one packed code.
    pub fn code_bits(&self) -> u32 {
        self.scheme.bits().unwrap_or(8)
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
    /// Its `__metadata__`.
    pub metadata: BTreeMap<String, String>,
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
    /// The int4 path: what the files say of each layer, by module.
    pub descriptions: BTreeMap<String, Description>,
    /// FlashInfer: what the files say of each layer, by module.
    pub layouts: BTreeMap<String, serde_json::Value>,
    /// What preparation changes in the numbers, in sentences.
    pub notes: Vec<String>,
}

impl Plan {
    /// Plans the conversion of `model`, whose modules are `layers`.
    ///
    /// # Errors
    /// [`ModelError`] for modules whose tensors do not fit together. What the format cannot take is
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
            descriptions: BTreeMap::new(),
            layouts: BTreeMap::new(),
            notes: Vec::new(),
        };
        let kv_heads = kv_heads(model);
        let mut planned = Vec::with_capacity(layers.stacks.len());
        for stack in &layers.stacks {
            let map = expert_map(stack, settings)?;
            let stack = match settings.format {
                Format::Marlin | Format::Flashinfer { .. } => Cow::Borrowed(stack),
                Format::Kleidi { .. } => kleidi::unordered(model, stack)?,
            };
            let whole = StackInfo::bind(model, &stack, &map.global_ids)?;
            if settings.ep.size > 1 && stack.role != Role::Dense {
                plan.expert_maps.insert(stack.module.clone(), map);
            }
            let stack_plan = match settings.format {
                Format::Marlin => stack_plan(&stack, whole, kv_heads, settings),
                Format::Kleidi { nr } => kleidi::stack_plan(&stack, whole, kv_heads, settings, nr),
                Format::Flashinfer { backend } => {
                    flashinfer::stack_plan(&stack, whole, settings, backend)
                }
            };
            planned.push(match stack_plan {
                Err(reasons) => Err(reasons),
                Ok(p) => match prepared::notes(model, &p, settings)? {
                    Err(reason) => Err(vec![reason]),
                    Ok(notes) => {
                        plan.notes.extend(notes);
                        Ok(p)
                    }
                },
            });
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
        if let Format::Kleidi { .. } = settings.format {
            plan.descriptions =
                kleidi::descriptions(model, layers, &mut planned, &plan.expert_maps);
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
        plan.refused.extend(
            layers
                .fused
                .iter()
                .map(|f| Refused { module: f.module.clone(), reasons: vec![f.reason.clone()] }),
        );
        plan.layouts = flashinfer::descriptions(&plan.stacks);
        plan.shards = deal::shards(&plan, model, copied, settings)?;
        Ok(plan)
    }

    /// Bytes of all tensors that will be written.
    pub fn output_bytes(&self) -> u64 {
        let items = self.shards.iter().flat_map(|s| &s.items);
        items.filter_map(|i| i.spec.byte_len()).sum()
    }
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
            let mut shape = Shape::new(k.len(), n.iter().map(Range::len).sum());
            match prepared::padding(stack, &info, settings) {
                Err(reason) => return Ok((None, vec![reason])),
                Ok(padded) => shape = padded.map_or(shape, |(_, shape)| shape),
            }
            (Some(verdict::selection(stack, shape, info.size_k, settings)), Vec::new())
        }
    })
}

/// `num_key_value_heads` of the config.
fn kv_heads(model: &Model<'_>) -> Option<usize> {
    let heads = model.config_value("num_key_value_heads")?.as_u64()?;
    usize::try_from(heads).ok()
}
