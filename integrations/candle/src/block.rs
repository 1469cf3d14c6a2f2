//! Mixture-of-Experts blocks.

use candle_core::{DType, Module, Tensor};

use crate::error::{Error, Result};
use crate::experts::{Int4Experts, Router};
use crate::operator::Argument;
use crate::shared::SharedExpert;

/// A Mixture-of-Experts block: router, routed experts with packed 4-bit weights, and a shared expert if
/// the family has one. A clone shares the weights.
///
/// [`Module::forward`] takes hidden states `[.., H]` in F32, BF16 or F16, with any strides, and gives
/// `[.., H]` of the same type. A token's bits depend on that token alone: they are the same for any
/// batch and any number of threads, on every CPU. F16 is widened to F32 for the whole block, and the
/// output is rounded to F16. A backward pass through the block is an error.
#[derive(Debug, Clone)]
pub struct MoeBlock {
    router: Router,
    experts: Int4Experts,
    shared: Option<SharedExpert>,
    is_averaged: bool,
}

impl MoeBlock {
    /// A block with a router and its experts.
    ///
    /// # Errors
    /// [`Error::Shape`] unless the router's weight is `[E, H]` of the experts.
    pub fn new(router: Router, experts: Int4Experts) -> Result<Self> {
        let found = [router.linear().size_n(), router.linear().size_k()];
        let expected = [experts.num_experts(), experts.hidden_size()];
        if found != expected {
            let module = router.linear().module().to_owned();
            let expected = format!("{expected:?}, [experts, hidden size] of {}", experts.module());
            return Err(Error::Shape { module, tensor: "weight", found: found.into(), expected });
        }
        Ok(Self { router, experts, shared: None, is_averaged: false })
    }

    /// The block with a shared expert, whose output is added to that of the routed experts.
    ///
    /// # Errors
    /// [`Error::Shape`] if its hidden size is not that of the experts.
    pub fn with_shared_expert(self, shared: SharedExpert) -> Result<Self> {
        let (found, expected) = (shared.hidden_size(), self.experts.hidden_size());
        if found != expected {
            let module = self.experts.module().to_owned();
            let expected = format!("hidden size {expected}");
            let found = vec![found];
            return Err(Error::Shape { module, tensor: "shared expert", found, expected });
        }
        Ok(Self { shared: Some(shared), ..self })
    }

    /// Whether the output is the mean of the routed sum and the shared expert's output, instead of their
    /// sum. Without a shared expert it has no effect.
    pub fn with_mean(self, is_averaged: bool) -> Self {
        Self { is_averaged, ..self }
    }

    /// The router.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// The routed experts.
    pub fn experts(&self) -> &Int4Experts {
        &self.experts
    }

    /// The shared expert.
    pub fn shared_expert(&self) -> Option<&SharedExpert> {
        self.shared.as_ref()
    }
}

impl Module for MoeBlock {
    /// # Errors
    /// [`Error`], wrapped, that names the tensor of another shape, type or device, or the value that is
    /// not finite.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (module, hidden) = (self.experts.module(), self.experts.hidden_size());
        Argument { module, tensor: "x" }.check(x, hidden)?;
        if x.dtype() == DType::F16 {
            return self.forward(&x.to_dtype(DType::F32)?)?.to_dtype(DType::F16);
        }
        let x = x.contiguous()?;
        let y = self.experts.forward(&x, &self.router.forward(&x)?)?;
        let Some(shared) = &self.shared else { return Ok(y) };
        let sum = (y + shared.forward(&x)?)?;
        if self.is_averaged { sum * 0.5 } else { Ok(sum) }
    }
}
