//! A stored layer, and the layer as one of any format.

use ndarray::ArrayView2;

use super::kernels;
use super::moe::{Mxfp4Config, Mxfp4Layer};
use crate::Result;
use crate::layouts::CPU_E2M1;
use crate::layouts::mxfp4::{Mxfp4Layout, Mxfp4Stack};
use crate::moe::layer::Routed;
use crate::moe::router::Router;
use crate::num::array::FloatView2;
use crate::num::array_mut::FloatViewMut2;
use crate::w4a8::moe::{
    Engine, ExpertLayer, GatedActivation, Workspace, methods_of_the_layer, named_kernel,
};
use crate::w4a8::stored::StoredRouting;
use crate::w4a8::{LayerRouter, Values};

/// Experts of e2m1 codes.
pub(in crate::w4a8) const ENGINE: Engine = Engine {
    format: &CPU_E2M1,
    kernels: || kernels().iter().map(|kernel| kernel.name()).collect(),
    load: |described, [w13, w2], options| {
        let kernel = named_kernel(kernels(), options.kernel, |kernel| kernel.name())?;
        let [gate_up, down] = described.shapes()?;
        let w13 = Mxfp4Stack::new("w13_packed", Mxfp4Layout::new(gate_up)?, w13)?;
        let w2 = Mxfp4Stack::new("w2_packed", Mxfp4Layout::new(down)?, w2)?;
        let (router, activation) = match described.routing {
            StoredRouting::Operator(o) => {
                (Router::new(o.scoring_func, o.top_k, o.renormalize).into(), o.activation)
            }
            StoredRouting::Family(family) => {
                let activation = family.rule().activation;
                (LayerRouter::Family(family), activation)
            }
        };
        let (num_experts, expert_map) = (described.num_experts, described.expert_map);
        let config = Mxfp4Config { num_experts, expert_map, router, activation };
        let layer = Mxfp4Layer::new(w13, w2, config)?;
        let layer: Box<dyn ExpertLayer + '_> = match kernel {
            Some(kernel) => Box::new(layer.with_kernel(kernel)),
            None => Box::new(layer),
        };
        Ok(layer)
    },
};

impl ExpertLayer for Mxfp4Layer<'_> {
    methods_of_the_layer!();

    fn workspace(&self, max_tokens: usize) -> Workspace {
        self.workspace(max_tokens)
    }

    fn definition(&self, x: &Values, routed: Routed<'_>) -> Result<Values> {
        self.definition(x, routed)
    }
}
