//! A layer from a packed file.

use super::{Mode, MoeConfig, MoeLayer};
use crate::Result;
use crate::container::Container;
use crate::moe::router::Router;
use crate::w4a8::packed::PackedStack;
use crate::w4a8::quantize::ActivationRounding;
use crate::w4a8::stored::{self, MoeDescription};

impl<'a> MoeLayer<'a> {
    /// The experts of `module` (`model.layers.0.mlp.experts`) in a packed file, run by the fastest
    /// kernel of this CPU. w13 and w2 borrow the file's bytes; a page of a mapped file is read when a
    /// token first needs it.
    ///
    /// # Errors
    /// As [`stored::experts`] and [`MoeLayer::new`].
    pub fn load(
        file: &Container<'a>,
        module: &str,
        rounding: ActivationRounding,
        mode: Mode,
    ) -> Result<Self> {
        let (described, w13, w2) = stored::experts(file, module)?;
        Self::described(described, w13, w2, rounding, mode)
    }

    /// The layer of a description, with weights from any source.
    ///
    /// # Errors
    /// As [`MoeLayer::new`].
    pub fn described(
        described: MoeDescription,
        w13: PackedStack<'a>,
        w2: PackedStack<'a>,
        rounding: ActivationRounding,
        mode: Mode,
    ) -> Result<Self> {
        let MoeDescription { scoring_func, top_k, renormalize, .. } = described;
        let config = MoeConfig {
            num_experts: described.num_experts,
            expert_map: described.expert_map,
            router: Router::new(scoring_func, top_k, renormalize),
            activation: described.activation,
            rounding,
            router_weight_on_input: described.router_weight_on_input,
            mode,
        };
        Self::new(w13, w2, config)
    }
}
