//! The block around the routed experts, as `run` computes it: [`router`] before them, [`tail`] after
//! them; [`whole`] runs all of it stage by stage.

pub(crate) mod dense;
mod experts;
mod judge;
pub(in crate::run) mod quantized;
pub mod router;
mod routes;
mod routing;
mod rows;
pub(crate) mod stages;
pub mod tail;
mod tokens;
pub mod whole;

use marlinspike::Error;
use marlinspike::moe::families::{Path, RoutingRule};
use marlinspike::num::tensor::{DType, Tensor};

use self::router::Router;
use self::stages::Stages;
use self::tail::{Linear, Tail};
use super::error::RunError;
use crate::model::Model;
use crate::model::block::BlockParts;

/// The block around the routed experts.
#[derive(Debug, Default)]
pub struct Surrounding {
    /// Computes the logits, if the files have its weight.
    pub router: Option<Router>,
    /// What follows the sum over the routed experts.
    pub tail: Tail,
    /// Stages that are left out.
    pub notes: Vec<String>,
}

/// Replaces a quantized router and a quantized gate of the shared expert by the numbers that their
/// codes and scales are. Their activations stay as they are: a rounding of the logits could select
/// other experts.
pub(crate) fn dequantize(
    parts: &mut BlockParts,
    load: &impl Fn(&str) -> Result<Box<dyn Linear>, RunError>,
) -> Result<(), RunError> {
    let tensors = &mut parts.tensors;
    let slots = [
        (&parts.router_module, &mut tensors.router_weight, Some(&mut tensors.router_bias)),
        (&parts.gate_module, &mut tensors.shared_gate, None),
    ];
    for (module, weight, bias) in slots {
        let Some(module) = module else { continue };
        let wrong = |e: Error| RunError::weight(module)(e);
        let (matrix, own) = load(module)?.dequantized().map_err(wrong)?;
        let (name, shape) = (format!("{module}.weight"), matrix.shape().to_vec());
        let values: Vec<f32> = matrix.iter().map(|&w| w as f32).collect();
        *weight = Some(Tensor::from_vec(name, DType::F32, shape, values).map_err(wrong)?);
        // Elsewhere a bias of this name corrects the selection of experts, not the logits.
        if let (Some(bias), Some(own), true) = (bias, own, module.ends_with(".router")) {
            let values: Vec<f32> = own.iter().map(|&b| b as f32).collect();
            let (name, shape) = (format!("{module}.bias"), vec![values.len()]);
            *bias = Some(Tensor::from_vec(name, DType::F32, shape, values).map_err(wrong)?);
        }
    }
    Ok(())
}

impl Surrounding {
    /// The block around `module`, whose router has `scores` outputs and which takes `hidden`
    /// features. `quantized` says which linear layers `load` can give.
    ///
    /// # Errors
    /// For tensors that do not fit, by name, and as `load`.
    pub(crate) fn read(
        model: &Model<'_>,
        module: &str,
        routing: &RoutingRule,
        [scores, hidden]: [usize; 2],
        quantized: &dyn Fn(&str) -> bool,
        load: impl Fn(&str) -> Result<Box<dyn Linear>, RunError>,
    ) -> Result<Self, RunError> {
        let Some(mut parts) = BlockParts::read(model, module, quantized)? else {
            let notes = crate::model::routing::shared_experts_left_out(model, module);
            return Ok(Self { notes: notes.into_iter().collect(), ..Self::default() });
        };
        dequantize(&mut parts, &load)?;
        Self::of(model, module, &parts, routing, [scores, hidden], load)
    }

    /// [`Self::read`] of `parts` that were read.
    pub(crate) fn of(
        model: &Model<'_>,
        module: &str,
        parts: &BlockParts,
        routing: &RoutingRule,
        [scores, hidden]: [usize; 2],
        load: impl Fn(&str) -> Result<Box<dyn Linear>, RunError>,
    ) -> Result<Self, RunError> {
        let stages = |path| -> Result<Stages, RunError> {
            let found = parts.stages_at(model, module, path, hidden)?;
            let stages = Stages::new(&found, &parts.numbers, hidden, hidden);
            stages.map_err(RunError::weight(module))
        };
        let router = Router::new(parts, stages(Path::RouterInput)?, routing, [scores, hidden]);
        let router = router.map_err(RunError::weight(module))?;
        let tail = Tail::new(parts, stages(Path::Output)?, routing, hidden, load)?;
        let mut notes = Vec::new();
        if tail.shared.is_none() {
            notes.extend(crate::model::routing::shared_experts_left_out(model, module));
        }
        Ok(Self { router, tail, notes })
    }

    /// The block of experts whose `hidden` features were padded with zeros to `size_k`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a shared expert, an output bias or a norm, which are not padded.
    pub(crate) fn padded(self, hidden: usize, size_k: usize) -> marlinspike::Result<Self> {
        if hidden == size_k {
            return Ok(self);
        }
        if !self.tail.is_empty() {
            let part =
                if self.tail.shared.is_some() { "a shared expert" } else { "an output stage" };
            let what = format!("{part} with experts padded from {hidden} to {size_k}");
            return Err(Error::unsupported(what, "use --no-padding"));
        }
        Ok(Self { router: self.router.map(|router| router.padded(size_k)), ..self })
    }
}
