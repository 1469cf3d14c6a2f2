//! The plan of a conversion, as pure data: the output tensors, their files and shapes, and the
//! parts of the input tensors that they are made from.
//!
//! The format's `Target` decides everything that depends on the format.

mod deal;

use std::collections::BTreeMap;

use marlinspike::container::TensorSpec;
use marlinspike::layers::{ExpertMap, ExpertPlacement, determine_expert_map};

pub use super::error::Refused;
use super::names::TensorKind;
use super::parallel::Ranks;
pub use super::settings::{Format, Settings};
use super::stack::info::{StackInfo, kv_heads, several_sizes};
pub use super::stack::part::MatrixPart;
pub use super::stack::{Output, StackPlan};
pub use super::target::Described;
use super::target::{Context, Planned, Target};
use crate::model::layers::{Layers, Role, Stack};
use crate::model::{Model, ModelError};
pub use deal::{RANKS_KEY, copy_runs};

/// Where an output tensor's bytes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The model's tensor of the item's name, unchanged.
    Copy,
    /// An output of a stack.
    Stack {
        /// Index of the stack.
        stack: usize,
        /// Which output.
        kind: TensorKind,
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

/// The plan of a conversion.
#[derive(Debug, Clone, PartialEq)]
pub struct ConversionPlan {
    /// The stacks to convert.
    pub stacks: Vec<StackPlan>,
    /// The files to write.
    pub shards: Vec<ShardPlan>,
    /// Modules that cannot be converted.
    pub refused: Vec<Refused>,
    /// This rank's experts by layer, where ranks share them.
    pub expert_maps: BTreeMap<String, ExpertMap>,
    /// Descriptions of the layers in the files' metadata, by module.
    pub descriptions: BTreeMap<String, Described>,
    /// Notes on values that preparation changes.
    pub notes: Vec<String>,
}

impl ConversionPlan {
    /// Plans the conversion of `model`, whose modules are `layers`.
    ///
    /// # Errors
    /// [`ModelError`] for modules whose tensors do not fit together. Modules that the format cannot
    /// take are no error: [`ConversionPlan::refused`] lists them.
    pub fn new(
        model: &Model<'_>,
        layers: &Layers,
        settings: &Settings,
    ) -> Result<Self, ModelError> {
        let context = Context { model, kv_heads: kv_heads(model), settings };
        let target = settings.format.target();
        let mut plan = Self {
            stacks: Vec::new(),
            shards: Vec::new(),
            refused: Vec::new(),
            expert_maps: BTreeMap::new(),
            descriptions: BTreeMap::new(),
            notes: Vec::new(),
        };
        let mut planned = Vec::with_capacity(layers.stacks.len());
        for stack in &layers.stacks {
            planned.push(match layers.refused.get(&stack.module) {
                Some(reasons) => Err(reasons.clone()),
                None => plan.plan_stack(stack, &*target, context)?,
            });
        }
        refuse_siblings(layers, &mut planned);
        plan.descriptions = target.describe(layers, &mut planned, &plan.expert_maps, context);
        let mut copied: Vec<&str> = model
            .entries()
            .map(|e| e.name())
            .filter(|name| !layers.owned.contains(*name))
            .collect();
        for (stack, planned) in layers.stacks.iter().zip(planned) {
            match planned {
                Ok(p) => plan.stacks.push(p),
                Err(reasons) => {
                    plan.refused.push(Refused { module: refused_name(stack), reasons });
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
        let has_stack = |module: &str| layers.stacks.iter().any(|s| s.module == module);
        let without = layers.refused.iter().filter(|(module, _)| !has_stack(module));
        plan.refused.extend(
            without.map(|(module, reasons)| Refused {
                module: module.clone(),
                reasons: reasons.clone(),
            }),
        );
        plan.shards = deal::shards(&plan, model, copied, settings)?;
        Ok(plan)
    }

    /// Plans one stack, and adds its notes and expert map to the plan.
    fn plan_stack(
        &mut self,
        stack: &Stack,
        target: &dyn Target,
        context: Context<'_>,
    ) -> Result<Planned, ModelError> {
        let Context { model, settings, .. } = context;
        if let Some(reason) = several_sizes(model, stack)? {
            return Ok(Err(vec![reason]));
        }
        let map = expert_map(stack, settings)?;
        let stack = target.stack(model, stack)?;
        let whole = StackInfo::bind(model, &stack, &map.global_ids)?;
        if settings.ep.size > 1 && stack.role != Role::Dense {
            self.expert_maps.insert(stack.module.clone(), map);
        }
        let plan = match target.plan(&stack, whole, context) {
            Err(reasons) => return Ok(Err(reasons)),
            Ok(plan) => plan,
        };
        Ok(match target.notes(&plan, context)? {
            Err(reason) => Err(vec![reason]),
            Ok(notes) => {
                self.notes.extend(notes);
                Ok(plan)
            }
        })
    }

    /// Bytes of all tensors that will be written.
    pub fn output_bytes(&self) -> u64 {
        let items = self.shards.iter().flat_map(|s| &s.items);
        items.filter_map(|i| i.spec.byte_len()).sum()
    }
}

/// Refuses w13 if w2 of the same layer is refused, and vice versa.
fn refuse_siblings(layers: &Layers, planned: &mut [Planned]) {
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
}

/// The name of a stack in [`ConversionPlan::refused`].
pub fn refused_name(stack: &Stack) -> String {
    let suffix = stack.role.prefix().trim_end_matches('_');
    format!("{} {suffix}", stack.module).trim_end().to_owned()
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
