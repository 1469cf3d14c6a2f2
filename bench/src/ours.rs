//! This project's product and layer.

use std::time::Instant;

use marlinspike::Result;
use marlinspike::case::{Activation, ActivationRounding};
use marlinspike::dims::{GroupSize, Shape};
use marlinspike::layout::kleidi::{NR, PackedStack, RhsLayout};
use marlinspike::moe::layer::Routed;
use marlinspike::w4a8::moe::{Layer, Mode};
use marlinspike::w4a8::{Kernel, Values, linear};
use rayon::ThreadPool;

use crate::routing::{Routing, routings};
use crate::tile::{Tile, activations};
use crate::{Contender, Workload};

/// Seeds of what is drawn: the same in every run.
pub const SEED: u64 = 0x6d61_726c;

/// The tiles that a workload's weights are made of: one of a product, w13 and w2 of a layer.
///
/// # Errors
/// [`marlinspike::Error::Size`] for groups that do not fit.
pub fn tiles(workload: Workload, group: GroupSize) -> Result<Vec<Tile>> {
    let shapes = match workload {
        Workload::Dense { size_k, size_n } => vec![Shape::new(size_k, size_n)],
        Workload::Moe { hidden_size: h, intermediate_size: i, .. } => {
            vec![Shape::new(h, 2 * i), Shape::new(i, h)]
        }
    };
    let tile = |(at, &shape)| Tile::new(shape, group, SEED + at as u64);
    shapes.iter().enumerate().map(tile).collect()
}

/// Matrices of `len` bytes each to take turns over so that they are cold.
pub fn copies(cold_bytes: usize, len: usize) -> usize {
    cold_bytes.div_ceil(len) + 1
}

/// Packed weights of a workload: matrices that calls take turns over, or a layer's experts.
#[derive(Debug)]
pub enum Weights {
    /// `[copies]` of `[K, N]`.
    Dense(PackedStack<'static>),
    /// Of a layer.
    Moe {
        /// `[E]` of `[H, 2I]`.
        w13: PackedStack<'static>,
        /// `[E]` of `[I, H]`.
        w2: PackedStack<'static>,
    },
}

impl Weights {
    /// Packs them. A product's matrices are as many as `cold_bytes` takes and one more (see
    /// [`machine::cold_bytes`](crate::machine::cold_bytes); 0 for one matrix, which stays in the
    /// caches if it can).
    ///
    /// # Errors
    /// [`marlinspike::Error::Size`] for groups that do not fit.
    pub fn new(workload: Workload, group: GroupSize, cold_bytes: usize) -> Result<Self> {
        let tiles = tiles(workload, group)?;
        match workload {
            Workload::Dense { size_k, size_n } => {
                let layout = RhsLayout::new(Shape::new(size_k, size_n), group, NR[1])?;
                Ok(Self::Dense(tiles[0].packed(copies(cold_bytes, layout.packed_len()))?))
            }
            Workload::Moe { num_experts, .. } => Ok(Self::Moe {
                w13: tiles[0].packed(num_experts)?,
                w2: tiles[1].packed(num_experts)?,
            }),
        }
    }

    /// All their bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Dense(stack) => stack.bytes().len(),
            Self::Moe { w13, w2 } => w13.bytes().len() + w2.bytes().len(),
        }
    }
}

/// A workload on its weights, for a number of tokens.
#[derive(Debug)]
pub struct Ours<'w> {
    pool: &'w ThreadPool,
    kernel: &'w dyn Kernel,
    workload: Workload,
    weights: &'w Weights,
    tokens: usize,
    routings: Vec<Routing>,
    x: Values,
}

impl<'w> Ours<'w> {
    /// Calls of `kernel` on the pool's threads, f32 in and out.
    pub fn new(
        pool: &'w ThreadPool,
        kernel: &'w dyn Kernel,
        workload: Workload,
        weights: &'w Weights,
        tokens: usize,
    ) -> Self {
        let routings = match workload {
            Workload::Dense { .. } => Vec::new(),
            Workload::Moe { num_experts, top_k, .. } => routings(num_experts, top_k, tokens, SEED),
        };
        let x = Values::F32(activations(tokens * workload.sizes()[0], SEED));
        Self { pool, kernel, workload, weights, tokens, routings, x }
    }

    /// Bytes of the weights that a call reads, on average over the calls.
    pub fn bytes_read(&self) -> f64 {
        match self.weights {
            Weights::Dense(stack) => stack.layout().packed_len() as f64,
            Weights::Moe { w13, w2 } => {
                let distinct: usize = self.routings.iter().map(|r| r.distinct).sum();
                let expert = w13.layout().packed_len() + w2.layout().packed_len();
                expert as f64 * distinct as f64 / self.routings.len() as f64
            }
        }
    }

    /// The result of call `number`, for comparisons.
    pub fn output(&self, number: usize) -> Result<Values> {
        self.pool.install(|| self.call(number))
    }

    fn call(&self, number: usize) -> Result<Values> {
        match self.weights {
            Weights::Dense(stack) => {
                let matrix = stack.get(number % stack.count());
                linear(self.kernel, &self.x, &matrix, ActivationRounding::HalfAway)
            }
            Weights::Moe { w13, w2 } => {
                let routing = &self.routings[number % self.routings.len()];
                let w13: Vec<_> = (0..w13.count()).map(|e| w13.get(e)).collect();
                let w2: Vec<_> = (0..w2.count()).map(|e| w2.get(e)).collect();
                let layer = Layer {
                    w13: &w13,
                    w2: &w2,
                    num_experts: w13.len(),
                    expert_map: None,
                    activation: Activation::Silu,
                    rounding: ActivationRounding::HalfAway,
                    router_weight_on_input: false,
                    mode: Mode::Upstream,
                };
                let top_k = routing.topk_ids.len() / self.tokens;
                let (topk_ids, topk_weights) = (&routing.topk_ids, &routing.topk_weights);
                layer.forward(self.kernel, &self.x, Routed { top_k, topk_ids, topk_weights })
            }
        }
    }
}

impl Contender for Ours<'_> {
    fn burst(&mut self, first: usize, calls: usize, seconds: &mut Vec<f64>) {
        // On a thread of the pool, where a model's layers would run one after the other.
        let this = &*self;
        let times: Vec<f64> = self.pool.install(|| {
            let time = |number| {
                let start = Instant::now();
                std::hint::black_box(this.call(number)).expect("shapes that were made to fit");
                start.elapsed().as_secs_f64()
            };
            (first..first + calls).map(time).collect()
        });
        seconds.extend(times);
    }
}
