//! The block around the routed experts, as `run` computes it: [`router`] before them, [`tail`] after
//! them; [`plain`] runs blocks whose experts are not quantized.

pub(crate) mod dense;
mod experts;
pub mod plain;
pub mod router;
pub mod tail;

use marlinspike::Error;
use marlinspike::moe::families::RoutingRule;

use self::router::Router;
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
        let Some(parts) = BlockParts::read(model, module, quantized)? else {
            let notes = crate::model::routing::shared_experts_left_out(model, module);
            return Ok(Self { notes: notes.into_iter().collect(), ..Self::default() });
        };
        let router = Router::new(&parts, scores, hidden).map_err(RunError::weight(module))?;
        let tail = Tail::new(&parts, routing, hidden, load)?;
        let mut notes = Vec::new();
        if !parts.rule.stages.is_empty() {
            notes.push("y is the block's output before its norm".to_owned());
        }
        if tail.shared.is_none() {
            notes.extend(crate::model::routing::shared_experts_left_out(model, module));
        }
        Ok(Self { router, tail, notes })
    }

    /// The block of experts whose `hidden` features were padded with zeros to `size_k`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a shared expert or an output bias, which are not padded.
    pub(crate) fn padded(self, hidden: usize, size_k: usize) -> marlinspike::Result<Self> {
        if hidden == size_k {
            return Ok(self);
        }
        if !self.tail.is_empty() {
            let what = format!("a shared expert with experts padded from {hidden} to {size_k}");
            return Err(Error::unsupported(what, "use --no-padding"));
        }
        Ok(Self { router: self.router.map(|router| router.padded(size_k)), ..self })
    }
}
