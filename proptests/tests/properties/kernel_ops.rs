//! Properties of the operations that kernels run: the reference passes, and mutants are rejected.

use marlinspike_proptests::ops::*;
use marlinspike_proptests::{Config, Operation, Reference, Subject, SubjectError, laws, run};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

fn reference<O: Operation>(cases: u32) {
    let config = Config { cases, seed: 0xcafe, regressions: None };
    let report = run::<O, _>(&Reference, &config);
    assert!(report.passed(), "{report}");
    assert!(report.laws.iter().all(|law| law.passed == cases && law.outputs > 0), "{report}");
}

macro_rules! references {
    ($($name:ident $op:ident $cases:literal),+ $(,)?) => { $(
        #[test]
        fn $name() {
            reference::<$op>($cases);
        }
    )+ };
}

references! {
    awq_repack AwqRepack 60, quantize_int8 PerTokenInt8 100, quantize_fp8 PerTokenFp8 100,
    router TopkRouter 60, align AlignBlocks 100, activate Activate 100, sum SumSlots 100,
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn products() {
    reference::<DenseProduct>(4);
    reference::<ExpertProduct>(6);
}

/// Layers whose rows are e4m3fn, on random configurations.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn layers_of_e4m3_rows() {
    reference::<W4a8Experts>(6);
    // Some laws concern a part of the configurations.
    reference::<Fp8Experts>(8);
}

/// The reference on changed arguments.
struct Changed<F>(F);

impl<O: Operation, F: Fn(&mut O::Input)> Subject<O> for Changed<F> {
    fn call(&self, input: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        let mut input = input.clone();
        (self.0)(&mut input);
        let made = O::expected(&input).map_err(|e| SubjectError(e.to_string()))?;
        // A wrong length is truncated or repeated, like a buffer.
        let values = made.iter().cycle();
        out.iter_mut().zip(values).for_each(|(slot, &value)| *slot = value);
        Ok(())
    }

    fn claims_bits(&self) -> bool {
        true
    }
}

fn falls<O: Operation>(name: &str, change: impl Fn(&mut O::Input)) {
    let config = Config { cases: 60, seed: 3, regressions: None };
    let report = run::<O, _>(&Changed(change), &config);
    let failure = report.failure().unwrap_or_else(|| panic!("{}: {name} passed", O::NAME));
    let mismatch = failure.mismatch.as_ref().unwrap_or_else(|| panic!("{name}\n{report}"));
    assert!(mismatch.expected != mismatch.found && !mismatch.place.is_empty(), "{name}\n{report}");
}

#[test]
fn wrong_variants_fall() {
    falls::<AwqRepack>("fields of a word in reverse", |i| {
        i.qweight.iter_mut().for_each(|w| *w = w.swap_bytes().rotate_right(4));
    });
    falls::<PerTokenInt8>("a largest element that is not looked at", |i| {
        for row in i.x.chunks_exact_mut(i.size_k) {
            if let Some(last) = row.last_mut() {
                *last &= 0x8000;
            }
        }
    });
    falls::<PerTokenFp8>("the bound of a scale ignored", |i| i.choice = None);
    falls::<TopkRouter>("the bias ignored", |i| i.bias = None);
    falls::<TopkRouter>("weights not renormalized", |i| i.renormalize = false);
    falls::<AlignBlocks>("experts of other ranks marked", |i| {
        i.absent = marlinspike::moe::align::Absent::Mark;
    });
    falls::<Activate>("gate and up exchanged", |i| {
        i.definition.exchanged ^= i.definition.is_gated();
    });
    falls::<SumSlots>("a slot left out", |i| {
        let (top_k, size_n) = (i.top_k, i.size_n);
        for token in i.down.chunks_exact_mut(top_k * size_n) {
            token[..size_n].fill(0);
        }
    });
}

/// As [`falls`], without the minimal input, which takes hundreds of products.
fn falls_at_once<O: Operation>(name: &str, change: impl Fn(&mut O::Input)) {
    let (subject, mut runner) = (Changed(change), TestRunner::deterministic());
    let failure = (0..40).find_map(|_| {
        let input = O::inputs().new_tree(&mut runner).unwrap().current();
        laws::<O>().iter().find_map(|law| (law.check)(&subject, &input).err())
    });
    let failure = failure.unwrap_or_else(|| panic!("{}: {name} passed", O::NAME));
    assert!(failure.mismatch.is_some_and(|m| !m.place.is_empty()), "{name}");
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn wrong_products_fall() {
    falls_at_once::<DenseProduct>("a column of x for the next", |i| i.x.rotate_left(1));
    falls_at_once::<ExpertProduct>("every expert the first", |i| {
        i.topk_ids.iter_mut().filter(|id| **id > 0).for_each(|id| *id = 0);
    });
    falls_at_once::<ExpertProduct>("router weights ignored", |i| i.topk_weights = None);
    falls_at_once::<ExpertProduct>("the first row's scale for all", |i| {
        let scales = i.x_scales.iter_mut().flatten();
        scales.for_each(|scale| *scale = 1.0);
    });
    let neighbours = |i: &mut LayerInput| i.topk_ids.iter_mut().for_each(|id| *id = 0.max(*id - 1));
    falls_at_once::<W4a8Experts>("the expert before", neighbours);
    falls_at_once::<Fp8Experts>("the expert before", neighbours);
}

/// Inputs that a subject does not support are drawn again and counted, not counted as passed.
#[test]
fn what_is_left_out_is_counted() {
    struct FourBits;
    impl Subject<AwqRepack> for FourBits {
        fn call(&self, input: &AwqInput, out: &mut [u32]) -> Result<(), SubjectError> {
            assert_eq!(input.num_bits, 4);
            Subject::<AwqRepack>::call(&Reference, input, out)
        }

        fn takes(&self, input: &AwqInput) -> bool {
            input.num_bits == 4
        }
    }
    let report = run::<AwqRepack, _>(&FourBits, &Config { cases: 40, ..Config::default() });
    assert!(report.passed(), "{report}");
    for law in &report.laws {
        assert_eq!(law.passed, 40);
        // Half of them are drawn with 8 bits.
        assert!((15..90).contains(&law.left_out), "{report}");
    }
    assert!(report.to_string().contains(" left out)"), "{report}");
}

/// A law that derives an input which the subject does not support gives no verdict.
#[test]
fn inputs_that_laws_make_are_left_out_too() {
    struct OneExpert;
    impl Subject<Repack> for OneExpert {
        fn call(&self, input: &RepackInput, out: &mut [u32]) -> Result<(), SubjectError> {
            if input.experts == 1 {
                return Err(SubjectError("stacks alone".into()));
            }
            Subject::<Repack>::call(&Reference, input, out)
        }

        fn takes(&self, input: &RepackInput) -> bool {
            input.experts != 1
        }
    }
    let report = run::<Repack, _>(&OneExpert, &Config { cases: 10, ..Config::default() });
    let of = |name: &str| report.laws.iter().find(|law| law.law == name).unwrap();
    assert!(of("equals the reference").failure.is_none(), "{report}");
    // Each of its inputs is split into single experts.
    let independent = of("experts are independent");
    assert_eq!(independent.passed, 0, "{report}");
    let failure = independent.failure.as_ref().unwrap();
    assert_eq!(failure.input, "none could be drawn", "{report}");
}

/// Every distribution draws existing experts, each once for a token, and has the stated form.
#[test]
fn distributions_are_what_they_say() {
    use marlinspike::vectors::Rng;
    for (distribution, experts) in [
        (Distribution::One, 5),
        (Distribution::Turns, 5),
        (Distribution::Random, 5),
        (Distribution::Skewed, 5),
        (Distribution::Gaps, 5),
        (Distribution::None, 5),
        (Distribution::Random, 2),
    ] {
        let ids = distribution.topk_ids(&mut Rng::new(9), 40, 3, experts);
        assert_eq!(ids.len(), 120);
        let mut counts = vec![0; experts];
        for token in ids.chunks_exact(3) {
            let mut here: Vec<_> = token.iter().filter(|&&id| id >= 0).collect();
            here.iter().for_each(|&&id| counts[id as usize] += 1);
            here.sort();
            assert!(here.windows(2).all(|pair| pair[0] != pair[1]), "{distribution:?} {token:?}");
        }
        let total: usize = counts.iter().sum();
        match distribution {
            Distribution::One => assert_eq!(ids.chunks(3).filter(|t| *t == &ids[..3]).count(), 40),
            Distribution::Turns => assert_eq!(counts, [24; 5]),
            Distribution::None => assert_eq!(total, 0),
            Distribution::Gaps => assert!((60..110).contains(&total), "{total}"),
            Distribution::Skewed => assert!(counts[0] >= 20, "{counts:?}"),
            Distribution::Random => assert_eq!(total, 40 * 3.min(experts)),
        }
    }
}
