//! A layer from a packed file.

use super::experts::{kernel_names, load};
use super::layer::{Experts, LayerOf};
use super::{Engine, Mode, MoeConfig, MoeLayer};
use crate::Result;
use crate::container::Container;
use crate::layouts::CPU_INT4;
use crate::moe::router::Router;
use crate::w4a8::LayerRouter;
use crate::w4a8::packed::PackedStack;
use crate::w4a8::quantize::ActivationRounding;
use crate::w4a8::stored::{self, MoeDescription, StoredRouting};

/// Int4 experts.
pub(in crate::w4a8) const ENGINE: Engine = Engine {
    format: &CPU_INT4,
    kernels: kernel_names::<PackedStack<'_>>,
    load: |described, bytes, options| load::<PackedStack<'_>>(described, bytes, options),
};

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
        Self::described_experts(described, [w13, w2], rounding, mode)
    }
}

#[allow(private_bounds, reason = "the formats are this crate's")]
impl<'a, S: Experts<'a, Kernel = K>, K: ?Sized> LayerOf<'a, S, K> {
    /// The layer of a description, for any format.
    pub(super) fn described_experts(
        described: MoeDescription,
        experts: [S; 2],
        rounding: ActivationRounding,
        mode: Mode,
    ) -> Result<Self> {
        let (router, activation, router_weight_on_input) = match described.routing {
            StoredRouting::Operator(o) => {
                let router = Router::new(o.scoring_func, o.top_k, o.renormalize);
                (router.into(), o.activation, o.router_weight_on_input)
            }
            StoredRouting::Family(routing) => {
                let rule = routing.rule();
                let (activation, on_input) = (rule.activation, rule.apply_router_weight_on_input);
                (LayerRouter::Family(routing), activation, on_input)
            }
        };
        let config = MoeConfig {
            num_experts: described.num_experts,
            expert_map: described.expert_map,
            router,
            activation,
            rounding,
            router_weight_on_input,
            mode,
        };
        S::layer(experts, config)
    }
}
