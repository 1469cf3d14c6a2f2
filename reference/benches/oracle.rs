//! The speed of the oracle: exact product, with the bounds of its class, and a layer of the
//! Qwen3-30B-A3B kind. Run with `cargo bench -p marlinspike --bench oracle`.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use marlinspike::case::{Activation, ScoringFunc};
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::bounds::{Declared, Int8Layer};
use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::moe::router::Router;
use marlinspike::num::array::{FloatView2, rows_of};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{ScalarType, f32_to_f16_rne};
use marlinspike::products::{
    Class, Convention, Extras, Judge, Recipe, Request, Rows, WeightColumns,
};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

fn main() {
    divan::main();
}

const F16: ScalarType = ScalarType::FLOAT16;

/// About normal: a sum of four uniform numbers.
fn normal(random: &mut Rng) -> f32 {
    let sum: f32 = (0..4).map(|_| random.next_u32() as f32 / u32::MAX as f32).sum();
    (sum - 2.0) * 1.73
}

fn weight(random: &mut Rng, shape: Shape, group: usize) -> Weight<'static> {
    let words: Vec<u32> = (0..shape.len() / 8).map(|_| random.next_u32()).collect();
    let groups = shape.size_k / group;
    let scales = (0..groups * shape.size_n)
        .map(|_| f32_to_f16_rne(0.004 * (1.0 + 0.3 * normal(random).abs())))
        .collect();
    Weight {
        name: "weight".to_owned(),
        ty: ScalarType::UINT4B8,
        codes: Codes::from_words(4, shape, words).expect("words"),
        scales: Table::new(F16, groups, shape.size_n, TableData::B16(scales)).expect("scales"),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(group)),
        global_scale: None,
        bias: None,
    }
}

fn rows(random: &mut Rng, size_m: usize, size_k: usize) -> Rows {
    let bits = (0..size_m * size_k).map(|_| f32_to_f16_rne(normal(random)).into());
    Rows::decode(F16, size_k, bits.collect::<Vec<u32>>().into_iter()).expect("rows")
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool")
}

/// M = 64, K = N = 4096, groups of 128.
const DENSE: Shape = Shape::new(4096, 4096);

fn bench_judge(bencher: Bencher, threads: usize, class: &Class) {
    let mut random = Rng::new(1);
    let weight = weight(&mut random, DENSE, 128);
    let rows = rows(&mut random, 64, DENSE.size_k);
    let extras = Extras::default();
    let recipe = Recipe::new(Convention::Marlin, &weight, F16, extras).expect("a recipe");
    let judge = Judge { weight: &weight, order: None, recipe: &recipe, class, extras };
    let pool = pool(threads);
    bencher.counter(ItemsCount::new(64 * DENSE.len())).bench_local(|| {
        let bounds = pool.install(|| judge.bounds(&rows, None)).expect("bounds");
        black_box(bounds[7].above)
    });
}

/// The exact product alone.
#[divan::bench(args = [1, 2], sample_count = 5)]
fn exact(bencher: Bencher, threads: usize) {
    let mut random = Rng::new(1);
    let weight = weight(&mut random, DENSE, 128);
    let rows = rows(&mut random, 64, DENSE.size_k);
    let recipe =
        Recipe::new(Convention::Marlin, &weight, F16, Extras::default()).expect("a recipe");
    let columns = WeightColumns::new(&weight, recipe.rule, None).expect("columns");
    let pool = pool(threads);
    bencher.counter(ItemsCount::new(64 * DENSE.len())).bench_local(|| {
        let each = |e: &marlinspike::products::Element<'_>| e.sum().round(F16);
        let out = pool
            .install(|| marlinspike::products::product(&rows, &columns, Request::default(), each))
            .expect("a product");
        black_box(out[7])
    });
}

/// With the bound of any order.
#[divan::bench(args = [1, 2], sample_count = 5)]
fn exact_and_bound_any_order(bencher: Bencher, threads: usize) {
    bench_judge(bencher, threads, &Class::any_order());
}

/// With the bound of Marlin's order.
#[divan::bench(args = [1, 2], sample_count = 5)]
fn exact_and_bound_marlin(bencher: Bencher, threads: usize) {
    bench_judge(bencher, threads, &Class::marlin_hopper());
}

/// A layer of the Qwen3-30B-A3B kind: E = 128, H = 2048, I = 768, top 8, M = 64: exact and bounded,
/// every stage with the errors of the stages before it.
#[divan::bench(args = [1, 2], sample_count = 2)]
fn layer_exact_and_bound(bencher: Bencher, threads: usize) {
    bench_layer(bencher, threads, |layer, x, routed| {
        let class = Class::any_order();
        let int8 = Int8Layer::default();
        let declared = Declared { convention: Convention::Marlin, class: &class, int8 };
        layer.bounds(x, routed, declared).expect("bounds").y.len()
    });
}

/// The same layer's canonical bits.
#[divan::bench(args = [1, 2], sample_count = 1)]
fn layer_canonical_bits(bencher: Bencher, threads: usize) {
    bench_layer(bencher, threads, |layer, x, routed| {
        let how = layer.canonical().expect("an arithmetic");
        layer.forward(x, routed, &how).expect("stages").y.bits().len()
    });
}

fn bench_layer(
    bencher: Bencher,
    threads: usize,
    run: impl Fn(&Layer<'_>, FloatView2<'_>, Routed<'_>) -> usize + Sync,
) {
    let (experts, h, i, tokens, top_k) = (128, 2048, 768, 64, 8);
    let mut random = Rng::new(2);
    let mut stack = |shape| -> Vec<Weight<'static>> {
        (0..experts).map(|_| weight(&mut random, shape, 128)).collect()
    };
    let (w13, w2) = (stack(Shape::new(h, 2 * i)), stack(Shape::new(i, h)));
    let layer = Layer {
        w13: &w13,
        w2: &w2,
        orders: [None, None],
        num_experts: experts,
        expert_map: None,
        activation: Definition::new(Activation::Silu),
        dtype: F16,
        input_dtype: None,
        router_weight_on_input: false,
    };
    let x: Vec<u16> = (0..tokens * h).map(|_| f32_to_f16_rne(normal(&mut random))).collect();
    let logits: Vec<f32> = (0..tokens * experts).map(|_| normal(&mut random)).collect();
    let router = Router::new(ScoringFunc::Softmax, top_k, true);
    let logits = rows_of("router_logits", &logits, experts).expect("rows");
    let routing = router.route(logits).expect("a routing");
    let routed = routing.routed().expect("row-major");
    let x = FloatView2::from_rows("x", F16, h, &x).expect("rows");
    let pool = pool(threads);
    bencher
        .counter(ItemsCount::new(tokens * top_k * 3 * h * i))
        .bench_local(|| black_box(pool.install(|| run(&layer, x, routed))));
}
