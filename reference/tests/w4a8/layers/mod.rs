//! Random layers on the int4 path.

use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::layouts::kleidi::{Columns, PackedRhs, PackedStack, RhsLayout};
use marlinspike::moe::layer::Routed;
use marlinspike::moe::router::Router;
use marlinspike::num::dims::{GroupSize, LogicalK, Shape};
use marlinspike::num::scalar::{ScalarType, f32_to_bf16_rne};
use marlinspike::vectors::Rng;
use marlinspike::w4a8::Values;
use marlinspike::w4a8::moe::{Layer, Mode, MoeConfig, MoeLayer};

/// Sizes of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) experts: usize,
    pub(crate) size_h: usize,
    pub(crate) size_i: usize,
    pub(crate) groups: [GroupSize; 2],
    pub(crate) nr: usize,
}

/// Packed weights and the layer's config.
pub(crate) struct Given {
    pub(crate) w13: Vec<PackedRhs<'static>>,
    pub(crate) w2: Vec<PackedRhs<'static>>,
    pub(crate) config: MoeConfig<'static>,
}

/// One packed matrix with a bias and realistic values.
pub(crate) fn matrix(
    shape: Shape,
    group: GroupSize,
    nr: usize,
    rng: &mut Rng,
) -> PackedRhs<'static> {
    let codes = (0..shape.len()).map(|_| rng.below(16) as i8 - 8).collect();
    let groups = group.groups(LogicalK(shape.size_k)).unwrap();
    let mut float = || (1 + rng.below(300)) as f32 / 8192.0;
    let bias: Vec<f32> = (0..shape.size_n).map(|_| float()).collect();
    let columns = match group {
        GroupSize::Of(g) if g < shape.size_k => {
            let scales = (0..shape.size_n * groups).map(|_| f32_to_bf16_rne(float())).collect();
            Columns::group_wise(shape, g, codes, scales, Some(&bias))
        }
        _ => {
            let scales: Vec<f32> = (0..shape.size_n).map(|_| float()).collect();
            Columns::channel_wise(shape, codes, &scales, Some(&bias))
        }
    };
    RhsLayout::new(shape, group, nr).unwrap().pack(&columns.unwrap()).unwrap()
}

impl Given {
    /// Softmax, top 2, SiLU, router weights on the output.
    pub(crate) fn new(sizes: Sizes, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let Sizes { experts, size_h, size_i, groups, nr } = sizes;
        let mut stack = |k, n, group| -> Vec<_> {
            (0..experts).map(|_| matrix(Shape::new(k, n), group, nr, &mut rng)).collect()
        };
        let config = MoeConfig {
            num_experts: experts,
            expert_map: None,
            router: Router::new(ScoringFunc::Softmax, experts.min(2), true).into(),
            activation: Activation::Silu,
            rounding: ActivationRounding::HalfAway,
            router_weight_on_input: false,
            mode: Mode::Extended,
        };
        let w13 = stack(size_h, 2 * size_i, groups[0]);
        Self { w13, w2: stack(size_i, size_h, groups[1]), config }
    }

    /// The definition.
    pub(crate) fn oracle(&self) -> Layer<'_> {
        Layer {
            w13: &self.w13,
            w2: &self.w2,
            num_experts: self.config.num_experts,
            expert_map: self.config.expert_map.as_deref(),
            activation: self.config.activation,
            rounding: self.config.rounding,
            router_weight_on_input: self.config.router_weight_on_input,
            mode: self.config.mode,
        }
    }

    /// The fast layer, which the definition is compared with.
    pub(crate) fn engine(&self) -> MoeLayer<'static> {
        let stack = |name, all: &[PackedRhs<'_>]| {
            let bytes: Vec<u8> = all.iter().flat_map(|m| m.bytes()).copied().collect();
            PackedStack::new(name, all[0].layout(), bytes).unwrap()
        };
        let (w13, w2) = (stack("w13", &self.w13), stack("w2", &self.w2));
        MoeLayer::new(w13, w2, self.config.clone()).unwrap()
    }
}

/// Activations and their routing.
pub(crate) struct Batch {
    pub(crate) x: Values,
    pub(crate) top_k: usize,
    pub(crate) topk_ids: Vec<i32>,
    pub(crate) topk_weights: Vec<f32>,
}

impl Batch {
    /// `tokens` rows, whose slot j of token t goes to `expert(t, j)`.
    pub(crate) fn new(
        sizes: Sizes,
        ty: ScalarType,
        tokens: usize,
        top_k: usize,
        rng: &mut Rng,
        mut expert: impl FnMut(&mut Rng, usize) -> i32,
    ) -> Self {
        let value = |rng: &mut Rng| (rng.below(4001) as f32 - 1800.0) / 512.0;
        let x = (0..tokens * sizes.size_h).map(|_| value(rng)).collect();
        let topk_ids = (0..tokens * top_k).map(|i| expert(rng, i)).collect();
        let topk_weights =
            (0..tokens * top_k).map(|_| (1 + rng.below(1000)) as f32 / 777.0).collect();
        Self { x: Values::from_f32(x, ty).unwrap(), top_k, topk_ids, topk_weights }
    }

    pub(crate) fn routed(&self) -> Routed<'_> {
        Routed::from_rows(self.top_k, &self.topk_ids, &self.topk_weights).unwrap()
    }

    /// Zeros of the output's shape and type.
    pub(crate) fn output(&self) -> Values {
        Values::from_f32(vec![f32::NAN; self.x.len()], self.x.ty()).unwrap()
    }
}
