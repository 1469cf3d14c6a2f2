//! The int4 path: `cargo bench -p marlinspike --bench w4a8`. Items are multiply-accumulates, bytes
//! are packed weights, each counted once per pass.
//!
//! A pass goes through enough copies of the weights (or experts) that none is found in a cache:
//! more than 160 MB where a call reads less.

use std::fmt;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::layouts::kleidi::{Columns, PackedStack, RhsLayout};
use marlinspike::moe::layer::Routed;
use marlinspike::moe::router::Router;
use marlinspike::num::dims::{GroupSize, LogicalK, Shape};
use marlinspike::vectors::Rng;
use marlinspike::w4a8::moe::{Mode, MoeConfig, MoeLayer};
use marlinspike::w4a8::{Linear, LinearWorkspace, kernels};
use ndarray::Array2;
use rayon::ThreadPool;

/// What a pass reads at least.
const COLD: usize = 160 << 20;

fn main() {
    divan::main();
}

/// Rows or tokens, group size (−1: channel-wise) and threads.
#[derive(Clone, Copy)]
struct Arg {
    m: usize,
    group: i64,
    threads: usize,
}

impl fmt::Display for Arg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "M {} group {} threads {}", self.m, self.group, self.threads)
    }
}

fn args(ms: &'static [usize]) -> impl Iterator<Item = Arg> {
    let arg = |m, group| [1, 2].map(|threads| Arg { m, group, threads });
    ms.iter().flat_map(move |&m| [32, 128, -1].into_iter().flat_map(move |group| arg(m, group)))
}

fn pool(threads: usize) -> ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
}

/// `count` copies of one matrix.
fn stack(shape: Shape, group: i64, count: usize) -> PackedStack<'static> {
    let (mut rng, group) = (Rng::new(1), GroupSize::from_config(group).expect("a group size"));
    let codes = (0..shape.len()).map(|_| rng.below(16) as i8 - 8).collect();
    let groups = group.groups(LogicalK(shape.size_k)).expect("groups");
    let columns = match group {
        GroupSize::Channel => Columns::channel_wise(shape, codes, &vec![0.01; shape.size_n], None),
        GroupSize::Of(g) => {
            Columns::group_wise(shape, g, codes, vec![0x3c23; shape.size_n * groups], None)
        }
    };
    let layout = RhsLayout::new(shape, group, 8).expect("a layout");
    let packed = layout.pack(&columns.expect("columns")).expect("packed");
    PackedStack::new("weight", layout, packed.bytes().repeat(count)).expect("a stack")
}

fn activations(rows: usize, cols: usize) -> Array2<f32> {
    let mut rng = Rng::new(2);
    Array2::from_shape_simple_fn((rows, cols), || rng.below(2001) as f32 / 500.0 - 2.0)
}

fn dense(bencher: Bencher<'_, '_>, size_k: usize, size_n: usize, arg: Arg) {
    let shape = Shape::new(size_k, size_n);
    // With many rows the weights are read once for all of them.
    let copies = if arg.m > 8 { 1 } else { COLD.div_ceil(shape.len() / 2) };
    let stack = stack(shape, arg.group, copies);
    let rounding = ActivationRounding::HalfAway;
    let layers: Vec<_> = (0..copies).map(|i| Linear::new(stack.get(i), rounding)).collect();
    let (x, mut y) = (activations(arg.m, size_k), Array2::<f32>::zeros((arg.m, size_n)));
    let (mut workspace, pool) = (LinearWorkspace::default(), pool(arg.threads));
    bencher
        .counter(ItemsCount::new(arg.m * shape.len() * copies))
        .counter(BytesCount::new(stack.bytes().len()))
        .bench_local(|| {
            pool.install(|| {
                for layer in &layers {
                    layer.forward(x.view(), &mut workspace, y.view_mut()).expect("a product");
                }
            });
        });
}

const DENSE: &[usize] = &[1, 8, 64, 512];

#[divan::bench(args = args(DENSE), sample_count = 10, sample_size = 1)]
fn dense_4096_4096(bencher: Bencher<'_, '_>, arg: Arg) {
    dense(bencher, 4096, 4096, arg);
}

#[divan::bench(args = args(DENSE), sample_count = 10, sample_size = 1)]
fn dense_4096_14336(bencher: Bencher<'_, '_>, arg: Arg) {
    dense(bencher, 4096, 14336, arg);
}

#[divan::bench(args = args(DENSE), sample_count = 10, sample_size = 1)]
fn dense_2048_1536(bencher: Bencher<'_, '_>, arg: Arg) {
    dense(bencher, 2048, 1536, arg);
}

/// A batch's experts: `top_k` neighbours per token, the next tokens' next to them, so that few tokens
/// read as many experts as they can, and a pass all of them.
fn moe(bencher: Bencher<'_, '_>, [experts, top_k, h, i]: [usize; 4], arg: Arg) {
    let w13 = stack(Shape::new(h, 2 * i), arg.group, experts);
    let w2 = stack(Shape::new(i, h), arg.group, experts);
    let each = (w13.bytes().len() + w2.bytes().len()) / experts;
    let config = MoeConfig {
        num_experts: experts,
        expert_map: None,
        router: Router::new(ScoringFunc::Softmax, top_k, true).into(),
        activation: Activation::Silu,
        rounding: ActivationRounding::HalfAway,
        router_weight_on_input: false,
        mode: Mode::Upstream,
    };
    let layer = MoeLayer::new(w13, w2, config).expect("a layer");
    let used = experts.min(arg.m * top_k);
    let calls = (experts / used).min(COLD.div_ceil(used * each));
    let topk_weights = vec![1.0 / top_k as f32; arg.m * top_k];
    let routes: Vec<Vec<i32>> = (0..calls)
        .map(|c| (0..arg.m * top_k).map(|s| ((c * used + s) % experts) as i32).collect())
        .collect();
    let (x, mut y) = (activations(arg.m, h), Array2::<f32>::zeros((arg.m, h)));
    let (mut workspace, pool) = (layer.workspace(arg.m), pool(arg.threads));
    bencher
        .counter(ItemsCount::new(calls * arg.m * top_k * 3 * h * i))
        .counter(BytesCount::new(calls * used * each))
        .bench_local(|| {
            pool.install(|| {
                for topk_ids in &routes {
                    let routed = Routed::from_rows(top_k, topk_ids, &topk_weights).expect("rows");
                    let made = layer.forward_routed(x.view(), routed, &mut workspace, y.view_mut());
                    made.expect("a forward");
                }
            });
        });
}

#[divan::bench(args = args(&[1, 8, 64, 512]), sample_count = 10, sample_size = 1)]
fn moe_qwen3_30b_a3b(bencher: Bencher<'_, '_>, arg: Arg) {
    moe(bencher, [128, 8, 2048, 768], arg);
}

#[divan::bench(args = args(&[1, 8]), sample_count = 10, sample_size = 1)]
fn moe_mixtral_8x7b(bencher: Bencher<'_, '_>, arg: Arg) {
    moe(bencher, [8, 2, 4096, 14336], arg);
}

/// Every kernel, one thread, weights in a cache.
#[divan::bench(args = kernels().iter().map(|k| k.name()).collect::<Vec<_>>(), consts = [1, 16])]
fn kernels_2048_512_group_32<const M: usize>(bencher: Bencher<'_, '_>, name: &str) {
    let shape = Shape::new(2048, 512);
    let kernel = kernels().into_iter().find(|k| k.name() == name).expect("a kernel");
    let stack = stack(shape, 32, 1);
    let layer = Linear::new(stack.get(0), ActivationRounding::HalfAway).with_kernel(kernel);
    let (x, mut y) = (activations(M, 2048), Array2::<f32>::zeros((M, 512)));
    let (mut workspace, pool) = (LinearWorkspace::default(), pool(1));
    bencher.counter(ItemsCount::new(M * shape.len())).bench_local(|| {
        let out = y.view_mut();
        pool.install(|| layer.forward(x.view(), &mut workspace, out)).expect("a product");
    });
}
