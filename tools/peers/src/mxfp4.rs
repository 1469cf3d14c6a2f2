//! This project's layer with MXFP4 weights, on a tile's codes: -8 to 7 are the sixteen e2m1 codes.

use std::time::Instant;

use anyhow::Result;
use marlinspike::case::{Activation, ScoringFunc};
use marlinspike::layouts::e2m1::{E2m1Layout, E2m1Stack, GROUP, NR};
use marlinspike::moe::layer::Routed;
use marlinspike::moe::router::Router;
use marlinspike::num::array::{rows_mut, rows_of};
use marlinspike::num::dims::Shape;
use marlinspike::w4a8::e2m1::E2m1Layer;
use marlinspike::w4a8::moe::{Mode, MoeConfig, Workspace};
use marlinspike::w4a8::quantize::ActivationRounding;
use marlinspike_bench::routing::Routing;
use marlinspike_bench::tile::Tile;
use marlinspike_bench::{Contender, Workload};
use rayon::ThreadPool;

/// Exponents of the scales: 2^-7.
const SCALE: u8 = 120;

/// The column of the tile at column `n` of matrix `matrix`: whole blocks in turn.
pub fn column(tile: &Tile, matrix: usize, n: usize) -> usize {
    (n + matrix * NR) % tile.columns()
}

/// A column in ggml's blocks: the scale, then bytes with row i in the low nibble, row i + 16 in the high.
pub fn ggml_blocks(tile: &Tile, column: usize) -> Vec<u8> {
    let groups = tile.codes(column).chunks_exact(GROUP);
    groups
        .flat_map(|codes| {
            let nibble = |code: &i8| code.cast_unsigned() & 15;
            let pairs = codes[..GROUP / 2].iter().zip(&codes[GROUP / 2..]);
            [SCALE].into_iter().chain(pairs.map(move |(a, b)| nibble(a) | nibble(b) << 4))
        })
        .collect()
}

/// Matrices of the tile in this project's packing.
fn stack(tile: &Tile, count: usize) -> Result<E2m1Stack<'static>> {
    let Shape { size_k, size_n } = tile.shape();
    let narrow = E2m1Layout::new(Shape::new(size_k, tile.columns()))?;
    let mut blocks = vec![0u8; narrow.packed_len()];
    for n in 0..tile.columns() {
        for (k, code) in tile.codes(n).iter().enumerate() {
            let (at, shift) = narrow.code_offset(k, n);
            blocks[at] |= (code.cast_unsigned() & 15) << shift;
        }
        (0..narrow.groups()).for_each(|group| blocks[narrow.scale_offset(group, n)] = SCALE);
    }
    let layout = E2m1Layout::new(Shape::new(size_k, size_n))?;
    let mut bytes = Vec::with_capacity(count * layout.packed_len());
    for matrix in 0..count {
        for block in 0..layout.blocks() {
            let from = column(tile, matrix, block * NR) / NR;
            bytes.extend_from_slice(&blocks[from * narrow.block_bytes()..][..narrow.block_bytes()]);
        }
    }
    Ok(E2m1Stack::new("weights of a benchmark", layout, bytes)?)
}

/// gpt-oss's layer of this workload.
///
/// # Errors
/// For a product, and for sizes that MXFP4 does not have.
pub fn layer(workload: Workload, tiles: &[Tile]) -> Result<E2m1Layer<'static>> {
    let Workload::Moe { num_experts, top_k, .. } = workload else {
        anyhow::bail!("{workload}: MXFP4 is compared in layers only");
    };
    let config = MoeConfig {
        num_experts,
        expert_map: None,
        router: Router::new(ScoringFunc::Softmax, top_k, true).into(),
        activation: Activation::SwigluOai,
        rounding: ActivationRounding::HalfEven,
        router_weight_on_input: false,
        mode: Mode::Extended,
    };
    let (w13, w2) = (stack(&tiles[0], num_experts)?, stack(&tiles[1], num_experts)?);
    Ok(E2m1Layer::new(w13, w2, config)?)
}

/// The layer as a contender.
#[derive(Debug)]
pub struct Ours<'w> {
    pool: &'w ThreadPool,
    layer: &'w E2m1Layer<'static>,
    routings: Vec<Routing>,
    x: &'w [f32],
    out: Vec<f32>,
    workspace: Workspace,
}

impl<'w> Ours<'w> {
    /// Calls with rows `x` `[T, H]` on the pool's threads.
    pub fn new(
        pool: &'w ThreadPool,
        layer: &'w E2m1Layer<'static>,
        routings: Vec<Routing>,
        x: &'w [f32],
    ) -> Self {
        let workspace = layer.workspace(x.len() / layer.hidden_size());
        Self { pool, layer, routings, x, out: vec![0.0; x.len()], workspace }
    }

    fn call(&mut self, number: usize) {
        let Routing { topk_ids, topk_weights, .. } = &self.routings[number % self.routings.len()];
        let hidden = self.layer.hidden_size();
        let tokens = self.x.len() / hidden;
        let routed = Routed::from_rows(topk_ids.len() / tokens, topk_ids, topk_weights);
        let done = rows_of("x", self.x, hidden).and_then(|x| {
            let out = rows_mut("out", &mut self.out, hidden)?;
            self.layer.forward_routed(x, routed?, &mut self.workspace, out)
        });
        done.expect("shapes that were made to fit");
    }

    /// The result of call `number`, row-major.
    pub fn output(&mut self, number: usize) -> &[f32] {
        let pool = self.pool;
        pool.install(|| self.call(number));
        &self.out
    }
}

impl Contender for Ours<'_> {
    fn burst(&mut self, first: usize, calls: usize, seconds: &mut Vec<f64>) {
        let pool = self.pool;
        pool.install(|| {
            for number in first..first + calls {
                let start = Instant::now();
                self.call(number);
                seconds.push(start.elapsed().as_secs_f64());
            }
        });
    }
}
