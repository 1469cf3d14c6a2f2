//! The laws of `marlinspike-proptests` with the GPU as the subject.
//!
//! Each line states the operation, the law, the numbers of random inputs and outputs for which it
//! held, and the seed. `MARLINSPIKE_LAWS_SEED` sets the seed; `MARLINSPIKE_LAWS_CASES` multiplies
//! the number of inputs.

use crate::common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use marlinspike::vectors::Rng;
use marlinspike_accel::{Device, ops::MarlinLayer};
use marlinspike_golden::Tier;
use marlinspike_proptests::{
    Config, Operation, Report, Subject,
    ops::{self, Distribution, LayerInput, moe_lattice},
    run,
};

use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};

use crate::subject::Cuda;

/// A number from the environment.
fn variable(name: &str, usual: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}: found {text:?}, not a number")),
        Err(_) => usual,
    }
}

fn seed() -> u64 {
    variable("MARLINSPIKE_LAWS_SEED", Tier::current().seed(0x6c61_7773))
}

/// Tries every law of `O` on `cases` inputs each. Threads share the inputs, each with its own
/// stream, since the reference takes longer than the device. Without a device, reports a skip.
fn hold<O: Operation>(test: &str, cases: u32)
where
    Cuda: Subject<O>,
{
    let Some(_gpu) = common::device_or_skip(test) else { return };
    let cases = cases * u32::try_from(variable("MARLINSPIKE_LAWS_CASES", 1)).unwrap();
    let threads = thread::available_parallelism().map_or(1, |n| n.get()).min(8) as u32;
    let reports: Vec<Report> = thread::scope(|scope| {
        let started: Vec<_> = (0..threads)
            .map(|t| {
                let seed = seed().wrapping_add(u64::from(t));
                let config = Config { cases: cases.div_ceil(threads), seed, regressions: None };
                scope.spawn(move || run::<O, _>(&Cuda(Device::open().unwrap()), &config))
            })
            .collect();
        started.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for report in &reports {
        assert!(report.passed(), "{report}");
    }
    for (i, law) in reports[0].laws.iter().enumerate() {
        let sum = |part: fn(&marlinspike_proptests::LawReport) -> usize| -> usize {
            reports.iter().map(|report| part(&report.laws[i])).sum()
        };
        let (held, outputs) = (sum(|law| law.passed as usize), sum(|law| law.outputs));
        assert!(held > 0 && outputs > 0, "{}: {} tried nothing", O::NAME, law.law);
        let left_out = match sum(|law| law.left_out as usize) {
            0 => String::new(),
            n => format!(" ({n} others have no kernel)"),
        };
        common::say(&format!(
            "LAW {}, {}: {held} cases, {outputs} outputs{left_out}, seeds {:#x} and {} more",
            O::NAME,
            law.law,
            seed(),
            threads - 1
        ));
    }
}

macro_rules! laws {
    ($($name:ident $op:ident $cases:literal),+ $(,)?) => { $(
        #[test]
        fn $name() {
            hold::<ops::$op>(stringify!($name), $cases);
        }
    )+ };
}

laws! {
    repack Repack 640, awq_repack AwqRepack 400, fp4_repack Fp4Repack 160, merge_w13 MergeW13 160,
    permute_scales PermuteScales 400, permute_bias PermuteBias 160, preprocess Preprocess 400,
    nvfp4_scales E4m3Scales 160, mx_scales MxScales 160, awq_zeros AwqZeroPoints 160,
    quantize_int8 PerTokenInt8 640, quantize_fp8 PerTokenFp8 640, router TopkRouter 480,
    align AlignBlocks 640, activate Activate 640, sum SumSlots 640, dense_product DenseProduct 640,
    expert_product ExpertProduct 480, layer MoeLayer 48, w4a8_layer W4a8Experts 48,
    fp8_layer Fp8Experts 48,
}

/// Each layer of the lattice that the device takes, as a whole and as the rank of its configuration, with
/// the distributions of tokens over experts in turn, and numbers of tokens around the blocks that they are
/// aligned to.
#[test]
fn layers_with_every_distribution() {
    let test = "layers_with_every_distribution";
    let Some(_gpu) = common::device_or_skip(test) else { return };
    use Distribution as D;
    let lattice = moe_lattice().unwrap();
    let seed = seed();
    let spreads = [D::One, D::Turns, D::Random, D::Skewed, D::Gaps, D::None];
    let (cases, outputs) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (next, left_out) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        let cuda = Cuda(Device::open().unwrap());
        loop {
            let point = next.fetch_add(1, Ordering::Relaxed);
            let Some(config) = lattice.get(point / 2) else { return };
            let mut rng = Rng::for_case(seed, point as u64);
            let tokens = rng.pick(&[1, 7, 8, 9, 17, 33, 70]);
            let draw = [LayerInput::draw, LayerInput::draw_rank][point % 2];
            let mut input = draw(config, rng.next_u64(), tokens).unwrap();
            if !Subject::<ops::MoeLayer>::takes(&cuda, &input) {
                left_out.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let (c, spread) = (input.config.clone(), spreads[(point + point / 12) % spreads.len()]);
            input.topk_ids = spread.topk_ids(&mut rng, tokens, c.top_k, c.num_experts);
            let mut y = vec![0; input.x.len()];
            Subject::<ops::MoeLayer>::call(&cuda, &input, &mut y)
                .unwrap_or_else(|e| panic!("point {point}, {spread:?}, {input:?}: {e}"));
            cases.fetch_add(1, Ordering::Relaxed);
            outputs.fetch_add(y.len(), Ordering::Relaxed);
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |n| n.get()).min(8) {
            scope.spawn(work);
        }
    });
    let (cases, outputs) = (cases.into_inner(), outputs.into_inner());
    assert!(cases >= 50, "{cases} cases");
    common::say(&format!(
        "LAW moe, every distribution of tokens over experts: {cases} cases, {outputs} outputs \
         ({} others have no kernel), seed {:#x}",
        left_out.into_inner(),
        seed
    ));
}

/// A thousand runs of the same launches give the same bits: products of one thread block and of
/// clusters, and whole layers.
#[test]
fn a_thousand_runs_give_the_same_bits() {
    let test = "a_thousand_runs_give_the_same_bits";
    let Some(_gpu) = common::device_or_skip(test) else { return };
    let (cuda, mut runner) = (Cuda(Device::open().unwrap()), TestRunner::deterministic());
    let (mut cases, mut outputs) = (0, 0);
    while cases < 16 {
        let input = ops::DenseProduct::inputs().new_tree(&mut runner).unwrap().current();
        if !Subject::<ops::DenseProduct>::takes(&cuda, &input) {
            continue;
        }
        let product = cuda.dense(&input).unwrap();
        let mut y = cuda.0.zeroed(ops::DenseProduct::len(&input).unwrap()).unwrap();
        outputs += thousand(&format!("{input:?}"), || {
            product.run(&cuda.0, &mut y).unwrap();
            cuda.0.download(&y).unwrap()
        });
        cases += 1;
    }
    let lattice = moe_lattice().unwrap();
    let mut rng = Rng::new(seed());
    while cases < 24 {
        let config = &lattice[rng.below(lattice.len())];
        let input = LayerInput::draw(config, rng.next_u64(), 20).unwrap();
        if !Subject::<ops::MoeLayer>::takes(&cuda, &input) {
            continue;
        }
        let (device, local, top_k) = (&cuda.0, input.local().unwrap(), input.config.top_k);
        let layer = MarlinLayer::new(device, &local.layer(&input)).unwrap();
        let mut work = layer.workspace(device, 20, top_k).unwrap();
        let (x, ids) = (device.upload(&input.x).unwrap(), device.upload(&input.topk_ids).unwrap());
        let weights = device.upload(&input.topk_weights).unwrap();
        let mut y = device.zeroed(input.x.len()).unwrap();
        outputs += thousand(&format!("{input:?}"), || {
            layer.forward(device, &x, &ids, &weights, &mut work, &mut y).unwrap();
            device.download(&y).unwrap()
        });
        cases += 1;
    }
    common::say(&format!("LAW 1000 runs of the same launches: {cases} cases, {outputs} outputs"));
}

/// Runs the call a thousand times; panics if an output differs from the first run's. Returns the
/// number of outputs.
fn thousand(what: &str, mut call: impl FnMut() -> Vec<u16>) -> usize {
    let first = call();
    for turn in 1..1000 {
        let again = call();
        let differ = first.iter().zip(&again).filter(|(a, b)| a != b).count();
        assert_eq!(differ, 0, "run {turn}: {what}");
    }
    1000 * first.len()
}
