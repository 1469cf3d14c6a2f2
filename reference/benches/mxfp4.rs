//! MXFP4 weights with int8 activations: `cargo bench -p marlinspike --bench mxfp4`. Items are
//! multiply-accumulates, bytes are packed weights, each counted once per pass.
//!
//! Matrices and experts are larger than the caches: more than 160 MB, read in turn.

use std::fmt;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use marlinspike::case::{Activation, ScoringFunc};
use marlinspike::layouts::e2m1::{E2m1Layout, E2m1Stack, PackedE2m1};
use marlinspike::moe::layer::Routed;
use marlinspike::moe::router::Router;
use marlinspike::num::dims::Shape;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::LinearWorkspace;
use marlinspike::w4a8::e2m1::{E2m1Layer, Linear, kernels};
use marlinspike::w4a8::moe::{Mode, MoeConfig};
use marlinspike::w4a8::quantize::ActivationRounding;
use ndarray::Array2;
use rayon::ThreadPool;

/// What the matrices of a product have at least.
const COLD: usize = 160 << 20;

/// gpt-oss-20b and gpt-oss-120b: H = I = 2880.
const SIZE: usize = 2880;

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

/// `count` matrices of random codes, with scales of about 2^-7.
fn stack(shape: Shape, count: usize, rng: &mut Rng) -> E2m1Stack<'static> {
    let layout = E2m1Layout::new(shape).expect("a layout");
    let mut bytes = vec![0; count * layout.packed_len()];
    bytes.fill_with(|| rng.below(256) as u8);
    for matrix in bytes.chunks_exact_mut(layout.packed_len()) {
        for n in 0..shape.size_n {
            (0..layout.groups()).for_each(|g| matrix[layout.scale_offset(g, n)] = 120);
            matrix[layout.bias_offset(n)..][..4].fill(0);
        }
    }
    E2m1Stack::new("weights", layout, bytes).expect("whole matrices")
}

fn activations(rows: usize, rng: &mut Rng) -> Array2<f32> {
    Array2::from_shape_fn((rows, SIZE), |_| rng.below(2001) as f32 / 500.0 - 2.0)
}

#[divan::bench(args = args())]
fn product(bencher: Bencher<'_, '_>, arg: Arg) {
    let (shape, rng) = (Shape::new(SIZE, 2 * SIZE), &mut Rng::new(1));
    let len = E2m1Layout::new(shape).expect("a layout").packed_len();
    let weights = stack(shape, COLD / len + 1, rng);
    let linears: Vec<_> = (0..weights.count())
        .map(|i| {
            let bytes = weights.get(i).into_bytes();
            Linear::new(PackedE2m1::new(weights.layout(), bytes).expect("a matrix"))
        })
        .collect();
    let (x, mut y) = (activations(arg.m, rng), Array2::<f32>::zeros((arg.m, 2 * SIZE)));
    let (pool, mut workspace, mut next) = (pool(arg.threads), LinearWorkspace::default(), 0);
    bencher
        .counter(ItemsCount::new(arg.m * shape.size_k * shape.size_n))
        .counter(BytesCount::new(len))
        .bench_local(|| {
            next = (next + 1) % linears.len();
            pool.install(|| linears[next].forward(x.view(), &mut workspace, y.view_mut()))
        });
}

/// The experts of gpt-oss-20b: 32, four of them for each token.
#[divan::bench(args = args())]
fn gpt_oss_20b(bencher: Bencher<'_, '_>, arg: Arg) {
    let (experts, top_k, rng) = (32, 4, &mut Rng::new(2));
    let w13 = stack(Shape::new(SIZE, 2 * SIZE), experts, rng);
    let w2 = stack(Shape::new(SIZE, SIZE), experts, rng);
    let per_expert = w13.layout().packed_len() + w2.layout().packed_len();
    let config = MoeConfig {
        num_experts: experts,
        expert_map: None,
        router: Router::new(ScoringFunc::Softmax, top_k, true).into(),
        activation: Activation::SwigluOai,
        rounding: ActivationRounding::HalfEven,
        router_weight_on_input: false,
        mode: Mode::Extended,
    };
    let layer = E2m1Layer::new(w13, w2, config).expect("a layer");
    let (x, mut y) = (activations(arg.m, rng), Array2::<f32>::zeros((arg.m, SIZE)));
    let mut workspace = layer.workspace(arg.m);
    let (pool, mut next) = (pool(arg.threads), 0);
    let weights = vec![1.0 / top_k as f32; arg.m * top_k];
    let active = experts.min(arg.m * top_k);
    bencher
        .counter(ItemsCount::new(arg.m * top_k * 3 * SIZE * SIZE))
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
    let weights = stack(shape, 1, rng);
    let weight = PackedE2m1::new(weights.layout(), weights.get(0).into_bytes()).expect("a matrix");
    let kernel = kernels().into_iter().find(|k| k.name() == name).expect("a kernel");
    let linear = Linear::new(weight).with_kernel(kernel);
    let (x, mut y) = (activations(64, rng), Array2::<f32>::zeros((64, 256)));
    let (pool, mut workspace) = (pool(1), LinearWorkspace::default());
    bencher
        .counter(ItemsCount::new(64 * shape.size_k * shape.size_n))
        .bench_local(|| pool.install(|| linear.forward(x.view(), &mut workspace, y.view_mut())));
}
