//! This project's product and layer.

use std::time::Instant;

use marlinspike::Result;
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::moe::layer::Routed;
use marlinspike::moe::router::Router;
use marlinspike::ndarray::{ArrayView2, ArrayViewMut2};
use marlinspike::num::array::{rows_mut, rows_of};
use marlinspike::num::dims::{GroupSize, LogicalK, Shape};
use marlinspike::w4a8::moe::{Mode, MoeConfig, MoeLayer, Workspace};
use marlinspike::w4a8::packed::{NR, RhsLayout};
use marlinspike::w4a8::{Kernel, Linear, LinearWorkspace};
use rayon::ThreadPool;

use crate::routing::{Routing, routings};
use crate::tile::{Tile, activations};
use crate::{Contender, Workload};

/// Seed of all random values: the same in every run.
pub const SEED: u64 = 0x6d61_726c;
/// Rounding of activations: that of KleidiAI's current kernels.
pub const ROUNDING: ActivationRounding = ActivationRounding::HalfAway;

/// The tiles of a workload's weights: one for a product, w13 and w2 for a layer.
///
/// # Errors
/// [`marlinspike::Error::Size`] for groups that do not fit.
pub fn tiles(workload: Workload, group: GroupSize) -> Result<Vec<Tile>> {
    let tile = |(at, &shape)| Tile::new(shape, group, SEED + at as u64);
    shapes(workload).iter().enumerate().map(tile).collect()
}

/// A product's matrix, or w13 and w2 of an expert.
fn shapes(workload: Workload) -> Vec<Shape> {
    match workload {
        Workload::Dense { size_k, size_n } => vec![Shape::new(size_k, size_n)],
        Workload::Moe { hidden_size: h, intermediate_size: i, .. } => {
            vec![Shape::new(h, 2 * i), Shape::new(i, h)]
        }
    }
}

/// Checks that groups of `group` fit the workload's matrices.
///
/// # Errors
/// [`marlinspike::Error::Size`] where they do not.
pub fn check(workload: Workload, group: GroupSize) -> Result<()> {
    shapes(workload).into_iter().try_for_each(|shape| {
        RhsLayout::new(shape, group, NR[1])?;
        group.groups(LogicalK(shape.size_k)).map(drop)
    })
}

/// Number of matrices of `len` bytes to alternate between so that they are cold.
pub fn copies(cold_bytes: usize, len: usize) -> usize {
    cold_bytes.div_ceil(len) + 1
}

/// A workload's packed weights: matrices that calls alternate between, or a layer.
#[derive(Debug)]
pub enum Weights {
    /// `[copies]` of `[K, N]`.
    Dense(Vec<Linear<'static>>),
    /// All experts.
    Moe(Box<MoeLayer<'static>>),
}

impl Weights {
    /// Packs the weights for the kernel that `kernel` returns. [`copies`] of `cold_bytes` gives the
    /// number of a product's matrices (see [`machine::cold_bytes`](crate::machine::cold_bytes)).
    ///
    /// # Errors
    /// [`marlinspike::Error::Size`] for groups that do not fit.
    pub fn new(
        workload: Workload,
        group: GroupSize,
        cold_bytes: usize,
        kernel: impl Fn() -> Box<dyn Kernel>,
    ) -> Result<Self> {
        let tiles = tiles(workload, group)?;
        match workload {
            Workload::Dense { size_k, size_n } => {
                let layout = RhsLayout::new(Shape::new(size_k, size_n), group, NR[1])?;
                let linear = |copy| {
                    let weight = tiles[0].matrix(copy)?;
                    Ok(Linear::new(weight, ROUNDING).with_kernel(kernel()))
                };
                let count = copies(cold_bytes, layout.packed_len());
                Ok(Self::Dense((0..count).map(linear).collect::<Result<_>>()?))
            }
            Workload::Moe { num_experts, top_k, .. } => {
                let config = MoeConfig {
                    num_experts,
                    expert_map: None,
                    router: Router::new(ScoringFunc::Softmax, top_k, true).into(),
                    activation: Activation::Silu,
                    rounding: ROUNDING,
                    router_weight_on_input: false,
                    mode: Mode::Upstream,
                };
                let (w13, w2) = (tiles[0].stack(num_experts)?, tiles[1].stack(num_experts)?);
                Ok(Self::Moe(Box::new(MoeLayer::new(w13, w2, config)?.with_kernel(kernel()))))
            }
        }
    }

    /// Total size in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Dense(copies) => copies.iter().map(|c| c.weight().bytes().len()).sum(),
            Self::Moe(layer) => layer.w13().bytes().len() + layer.w2().bytes().len(),
        }
    }
}

/// A workload with its weights and a number of tokens.
#[derive(Debug)]
pub struct Ours<'w> {
    pool: &'w ThreadPool,
    tokens: usize,
    x: Vec<f32>,
    out: Vec<f32>,
    call: Call<'w>,
}

/// The other arguments of a call.
#[derive(Debug)]
enum Call<'w> {
    Dense { copies: &'w [Linear<'static>], workspace: Box<LinearWorkspace> },
    Moe { layer: &'w MoeLayer<'static>, routings: Vec<Routing>, workspace: Box<Workspace> },
}

impl<'w> Ours<'w> {
    /// Calls on the pool's threads, f32 in and out.
    pub fn new(
        pool: &'w ThreadPool,
        workload: Workload,
        weights: &'w Weights,
        tokens: usize,
    ) -> Self {
        let (x, size_n) = (input(workload, tokens), workload.sizes()[1]);
        let (call, width) = match weights {
            Weights::Dense(copies) => (Call::Dense { copies, workspace: Box::default() }, size_n),
            Weights::Moe(layer) => {
                let (experts, top_k) = (layer.config().num_experts, layer.config().router.top_k());
                let workspace = Box::new(layer.workspace(tokens));
                let routings = routings(experts, top_k, tokens, SEED);
                (Call::Moe { layer, routings, workspace }, layer.hidden_size())
            }
        };
        Self { pool, tokens, x, out: vec![0.0; tokens * width], call }
    }

    /// Weight bytes that a call reads, averaged over the calls.
    pub fn bytes_read(&self) -> f64 {
        match &self.call {
            Call::Dense { copies, .. } => copies[0].weight().bytes().len() as f64,
            Call::Moe { layer, routings, .. } => {
                let distinct: usize = routings.iter().map(|r| r.distinct).sum();
                let expert = layer.w13().layout().packed_len() + layer.w2().layout().packed_len();
                expert as f64 * distinct as f64 / routings.len() as f64
            }
        }
    }

    /// Experts of each call; empty for a product.
    pub fn routings(&self) -> &[Routing] {
        match &self.call {
            Call::Dense { .. } => &[],
            Call::Moe { routings, .. } => routings,
        }
    }

    /// The result of call `number`, row-major, for comparisons.
    pub fn output(&mut self, number: usize) -> &[f32] {
        let Self { pool, tokens, x, out, call } = self;
        pool.install(|| call.run(number, *tokens, x, out));
        &self.out
    }
}

impl Call<'_> {
    fn run(&mut self, number: usize, tokens: usize, x: &[f32], out: &mut [f32]) {
        let done = match self {
            Self::Dense { copies, workspace } => {
                let linear = &copies[number % copies.len()];
                rows(x, out, tokens).and_then(|(x, out)| linear.forward(x, workspace, out))
            }
            Self::Moe { layer, routings, workspace } => {
                let Routing { topk_ids, topk_weights, .. } = &routings[number % routings.len()];
                let routed = Routed::from_rows(topk_ids.len() / tokens, topk_ids, topk_weights)
                    .expect("rows of experts");
                rows(x, out, tokens)
                    .and_then(|(x, out)| layer.forward_routed(x, routed, workspace, out))
            }
        };
        done.expect("shapes that were made to fit");
    }
}

/// `x` and `out` as matrices of `tokens` rows.
fn rows<'x, 'o>(
    x: &'x [f32],
    out: &'o mut [f32],
    tokens: usize,
) -> Result<(ArrayView2<'x, f32>, ArrayViewMut2<'o, f32>)> {
    let (cols, width) = (x.len() / tokens, out.len() / tokens);
    Ok((rows_of("x", x, cols)?, rows_mut("out", out, width)?))
}

impl Contender for Ours<'_> {
    fn burst(&mut self, first: usize, calls: usize, seconds: &mut Vec<f64>) {
        let Self { pool, tokens, x, out, call } = self;
        // Runs on a thread of the pool, as a model's consecutive layers would.
        let times: Vec<f64> = pool.install(|| {
            let time = |number| {
                let start = Instant::now();
                call.run(number, *tokens, x, out);
                start.elapsed().as_secs_f64()
            };
            (first..first + calls).map(time).collect()
        });
        seconds.extend(times);
    }
}

/// The rows of every call, `[T, K]` or `[T, H]`.
pub fn input(workload: Workload, tokens: usize) -> Vec<f32> {
    activations(tokens * workload.sizes()[0], SEED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads;
    use marlinspike::w4a8::scalar::Scalar;

    fn outputs(workload: Workload, tokens: usize) -> (Vec<f32>, f64, usize) {
        let pool = threads::pool(1, &[]).unwrap();
        let weights = Weights::new(workload, GroupSize::Of(32), 5000, || Box::new(Scalar)).unwrap();
        let mut ours = Ours::new(&pool, workload, &weights, tokens);
        let bytes = ours.bytes_read();
        (ours.output(1).to_vec(), bytes, weights.bytes())
    }

    /// Compares with x times the tile's floats in f64; the difference is the rounding of x to 8 bits.
    #[test]
    fn a_call_multiplies_by_the_matrix_of_its_number() {
        let workload = Workload::Dense { size_k: 64, size_n: 96 };
        let (y, bytes_read, bytes) = outputs(workload, 2);
        let (x, tile) = (input(workload, 2), &tiles(workload, GroupSize::Of(32)).unwrap()[0]);
        // 64 codes, two bf16 scales, a sum and a bias to each column.
        assert_eq!(bytes_read, 96.0 * (32.0 + 4.0 + 8.0));
        assert_eq!(bytes, 3 * bytes_read as usize);
        for (m, y) in y.chunks(96).enumerate() {
            for (n, &y) in y.iter().enumerate() {
                let w = tile.floats(tile.column(1, n));
                let terms = w.zip(&x[m * 64..]).map(|(w, x)| f64::from(w) * f64::from(*x));
                let (exact, size) =
                    terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + f64::abs(t)));
                assert!(
                    (f64::from(y) - exact).abs() < 0.02 * size + 1e-3,
                    "({m}, {n}) {y} {exact}"
                );
            }
        }
    }

    #[test]
    fn a_layer_reads_the_experts_of_a_call() {
        let workload = "4x2x64x32".parse().unwrap();
        let (y, bytes_read, bytes) = outputs(workload, 1);
        assert!(y.len() == 64 && y.iter().all(|y| y.is_finite()) && y.iter().any(|&y| y != 0.0));
        // Two experts of four.
        assert_eq!(bytes_read * 2.0, bytes as f64);
    }
}
