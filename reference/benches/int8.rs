//! Int8 weights with int8 activations: `cargo bench -p marlinspike --bench int8`. Items are
//! multiply-accumulates, bytes are packed weights, each counted once per pass.
//!
//! Matrices and experts are larger than 320 MB, read in turn.

use std::fmt;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::layouts::int8::{Int8Layout, Int8Tail, PackedInt8};
use marlinspike::moe::layer::Routed;
use marlinspike::moe::router::Router;
use marlinspike::num::dims::Shape;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::LinearWorkspace;
use marlinspike::w4a8::int8::{Int8Layer, Linear, kernels};
use marlinspike::w4a8::moe::{Mode, MoeConfig};
use ndarray::Array2;
use rayon::ThreadPool;

/// Bytes of weights that calls cycle through.
const COLD: usize = 320 << 20;
const SIZE: usize = 4096;

fn main() {
    divan::main();
}

/// Rows or tokens, and threads.
#[derive(Clone, Copy)]
struct Arg {
    m: usize,
    threads: usize,
}

impl fmt::Display for Arg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "M {} threads {}", self.m, self.threads)
    }
}

fn args() -> impl Iterator<Item = Arg> {
    [1, 8, 64, 512].into_iter().flat_map(|m| [1, 2].map(|threads| Arg { m, threads }))
}

fn pool(threads: usize) -> ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
}

/// `count` matrices of random codes with scales of 2^-10. What kernels add to sums does not matter here.
fn stack(shape: Shape, count: usize, rng: &mut Rng) -> PackedInt8<'static> {
    let layout = Int8Layout::new(shape).expect("a layout");
    let mut bytes = vec![0; count * layout.packed_len()];
    bytes.fill_with(|| rng.below(256) as u8);
    for matrix in bytes.chunks_exact_mut(layout.packed_len()) {
        for n in 0..shape.size_n {
            let scale = 2f32.powi(-10).to_le_bytes();
            matrix[layout.tail_offset(Int8Tail::Scale, n)..][..4].copy_from_slice(&scale);
            matrix[layout.tail_offset(Int8Tail::Bias, n)..][..4].fill(0);
        }
    }
    PackedInt8::new("weights", layout, bytes).expect("whole matrices")
}

fn activations(rows: usize, size_k: usize, rng: &mut Rng) -> Array2<f32> {
    Array2::from_shape_fn((rows, size_k), |_| rng.below(2001) as f32 / 500.0 - 2.0)
}

#[divan::bench(args = args())]
fn product(bencher: Bencher<'_, '_>, arg: Arg) {
    let (shape, rng) = (Shape::new(SIZE, SIZE), &mut Rng::new(1));
    let len = Int8Layout::new(shape).expect("a layout").packed_len();
    let linears: Vec<_> = (0..COLD / len + 1).map(|_| Linear::new(stack(shape, 1, rng))).collect();
    let (x, mut y) = (activations(arg.m, SIZE, rng), Array2::<f32>::zeros((arg.m, SIZE)));
    let (pool, mut workspace, mut next) = (pool(arg.threads), LinearWorkspace::default(), 0);
    bencher
        .counter(ItemsCount::new(arg.m * shape.size_k * shape.size_n))
        .counter(BytesCount::new(len))
        .bench_local(|| {
            next = (next + 1) % linears.len();
            pool.install(|| linears[next].forward(x.view(), &mut workspace, y.view_mut()))
        });
}

/// 128 experts, eight of them for each token.
#[divan::bench(args = args())]
fn qwen3_30b_a3b(bencher: Bencher<'_, '_>, arg: Arg) {
    let (experts, top_k, h, i, rng) = (128, 8, 2048, 768, &mut Rng::new(2));
    let w13 = stack(Shape::new(h, 2 * i), experts, rng);
    let w2 = stack(Shape::new(i, h), experts, rng);
    let per_expert = w13.layout().packed_len() + w2.layout().packed_len();
    let config = MoeConfig {
        num_experts: experts,
        expert_map: None,
        router: Router::new(ScoringFunc::Softmax, top_k, true).into(),
        activation: Activation::Silu,
        rounding: ActivationRounding::HalfAway,
        router_weight_on_input: false,
        mode: Mode::Extended,
    };
    let layer = Int8Layer::new(w13, w2, config).expect("a layer");
    let (x, mut y) = (activations(arg.m, h, rng), Array2::<f32>::zeros((arg.m, h)));
    let mut workspace = layer.workspace(arg.m);
    let (pool, mut next) = (pool(arg.threads), 0);
    let weights = vec![1.0 / top_k as f32; arg.m * top_k];
    let active = experts.min(arg.m * top_k);
    bencher
        .counter(ItemsCount::new(arg.m * top_k * 3 * h * i))
        .counter(BytesCount::new(active * per_expert))
        .bench_local(|| {
            // Other experts in each call, so that none is found in a cache.
            next += top_k;
            let ids: Vec<i32> =
                (0..arg.m * top_k).map(|slot| ((next + slot) % experts) as i32).collect();
            let routed = Routed::from_rows(top_k, &ids, &weights).expect("rows");
            let out = y.view_mut();
            pool.install(|| layer.forward_routed(x.view(), routed, &mut workspace, out))
        });
}

/// One thread of each kernel of this CPU, weights in the caches.
#[divan::bench(args = kernels().iter().map(|k| k.name()).collect::<Vec<_>>())]
fn kernel(bencher: Bencher<'_, '_>, name: &str) {
    let (shape, rng) = (Shape::new(SIZE, 256), &mut Rng::new(3));
    let kernel = kernels().into_iter().find(|k| k.name() == name).expect("a kernel");
    let linear = Linear::new(stack(shape, 1, rng)).with_kernel(kernel);
    let (x, mut y) = (activations(64, SIZE, rng), Array2::<f32>::zeros((64, 256)));
    let (pool, mut workspace) = (pool(1), LinearWorkspace::default());
    bencher
        .counter(ItemsCount::new(64 * shape.size_k * shape.size_n))
        .bench_local(|| pool.install(|| linear.forward(x.view(), &mut workspace, y.view_mut())));
}
