//! Blocks of quantized experts that are computed as a whole: those with stages around the experts,
//! zero experts, groups of experts by token type, soft caps, or a router of more than logits.

use marlinspike::weight::Weight;
use rayon::ThreadPool;
use serde_json::Value;

use super::load::{self, Loaded};
use super::matrices::Matrices;
use super::packed::{self, Unpacked};
use super::parts::Moe;
use crate::convert::settings::Format;
use crate::model::layers::{Layers, Role, Stack};
use crate::model::routing::{MoeRouting, is_whole};
use crate::model::{Model, ModelError};
use crate::run::block::quantized::{ExpertGroup, QuantizedExperts};
use crate::run::block::tail::Linear;
use crate::run::block::whole::{self, QuantizedBlock, Stored};
use crate::run::error::RunError;
use crate::run::options::Options;
use crate::run::output::Run;

/// The module of quantized experts whose block is computed as a whole, if it is the one to run: the
/// wanted one, or the first layer of experts.
///
/// # Errors
/// As [`is_whole`].
pub(in crate::run) fn module(
    model: &Model<'_>,
    layers: &Layers,
    wanted: Option<&str>,
) -> Result<Option<String>, ModelError> {
    let mut experts = layers.stacks.iter().filter(|s| s.role == Role::W13);
    let found = match wanted {
        Some(name) => experts.find(|s| s.module == name),
        None => experts.next(),
    };
    let Some(stack) = found else { return Ok(None) };
    Ok(is_whole(model, &stack.module)?.then(|| stack.module.clone()))
}

/// Runs the block of the experts `module`.
///
/// # Errors
/// For a block or activations that cannot be used, each by name.
pub(in crate::run) fn run(
    options: &Options,
    model: &Model<'_>,
    layers: &Layers,
    module: &str,
    pool: &ThreadPool,
) -> Result<Run, RunError> {
    let stack = |role| layers.stacks.iter().find(|s| s.module == module && s.role == role);
    let (Some(w13), Some(w2)) = (stack(Role::W13), stack(Role::W2)) else {
        let reason = "found no quantized layer of this name";
        return Err(ModelError::module(module, reason).into());
    };
    layers.expect_taken(module)?;
    if w13.scheme != w2.scheme {
        let (a, b) = (w13.scheme.label(), w2.scheme.label());
        let reason = format!("w13 is {a}, w2 {b}: expected one method");
        return Err(ModelError::module(module, reason).into());
    }
    let method = options.method;
    let mut notes = Vec::new();
    let groups = pool.install(|| groups(model, [w13, w2], options, &mut notes))?;
    let dense = |s: &Stack, name: &str| s.role == Role::Dense && s.module == name;
    let quantized = |name: &str| layers.stacks.iter().any(|s| dense(s, name));
    let load = |name: &str| -> Result<Box<dyn Linear>, RunError> {
        Ok(Box::new(Loaded::new(model, layers, name, method)?))
    };
    let block = QuantizedBlock {
        experts: QuantizedExperts { groups },
        interleaved: w13.is_interleaved(),
        format: w13.scheme.label(),
        notes,
        packed: false,
        quantized: &quantized,
        load: &load,
    };
    whole::run(options, model, module, Stored::Quantized(block), pool)
}

/// Runs the block of the experts `module` of a converted folder.
///
/// # Errors
/// As [`run`]; [`ModelError::Module`] for the part of one rank.
pub(in crate::run) fn run_packed(
    options: &Options,
    model: &Model<'_>,
    (format, section): (Format, &Value),
    module: &str,
    pool: &ThreadPool,
) -> Result<Run, RunError> {
    let Unpacked { moe: [w13, w2], quantizers, interleaved, scheme, notes } =
        pool.install(|| packed::experts(model, (format, section), module, options.method))?;
    let groups = MoeRouting::token_groups(model, module)?;
    let each = w13.len() / groups;
    let cut = |weights: Vec<Weight<'static>>| -> Vec<Vec<Weight<'static>>> {
        let mut rest = weights.into_iter();
        (0..groups).map(|_| rest.by_ref().take(each).collect()).collect()
    };
    let group = |(w13, w2): (Vec<_>, Vec<_>)| {
        let quantizers = quantizers.clone();
        ExpertGroup { w13, w2, quantizers, multipliers: None }
    };
    let groups = cut(w13).into_iter().zip(cut(w2)).map(group).collect();
    let quantized = |name: &str| section["layers"].get(name).is_some();
    let load = |name: &str| -> Result<Box<dyn Linear>, RunError> {
        Ok(Box::new(packed::load(model, (format, section), name, options.method)?))
    };
    let block = QuantizedBlock {
        experts: QuantizedExperts { groups },
        interleaved,
        format: format!("{scheme} in {}'s form", format.name()),
        notes,
        packed: true,
        quantized: &quantized,
        load: &load,
    };
    whole::run(options, model, module, Stored::Quantized(block), pool)
}

/// The experts in groups of one shape, which a token's type selects.
fn groups(
    model: &Model<'_>,
    [w13, w2]: [&Stack; 2],
    options: &Options,
    notes: &mut Vec<String>,
) -> Result<Vec<ExpertGroup>, RunError> {
    let module = &w13.module;
    let count = w13.experts.len();
    let each = count / MoeRouting::token_groups(model, module)?;
    if each == 0 || !count.is_multiple_of(each) {
        let reason = format!("{count} experts cannot be cut into groups of token types");
        return Err(ModelError::module(module, reason).into());
    }
    let routing = MoeRouting::read_whole(model, module, each, w13.is_interleaved())?;
    let one = |g: usize, notes: &mut Vec<String>| -> Result<ExpertGroup, RunError> {
        let part = |stack: &Stack| {
            let experts = stack.experts[g * each..(g + 1) * each].to_vec();
            Stack { experts, ..stack.clone() }
        };
        let parts = [part(w13), part(w2)];
        let stacks = [Matrices::bind(model, &parts[0])?, Matrices::bind(model, &parts[1])?];
        let made = load::experts(model, module, &stacks, routing.clone(), options.method, notes);
        Ok(made.map_err(RunError::weight(module))?.into_group())
    };
    (0..count / each).map(|g| one(g, notes)).collect()
}

impl Moe {
    /// The weights and how their activations are quantized.
    pub(super) fn into_group(self) -> ExpertGroup {
        let Self { w13, w2, quantizers, multipliers, .. } = self;
        ExpertGroup { w13, w2, quantizers, multipliers }
    }
}
