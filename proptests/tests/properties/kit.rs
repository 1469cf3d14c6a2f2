//! The properties accept correct subjects and reject every mutant.

use marlinspike_golden::Tier;
use marlinspike_proptests::{Config, Operation, Reference, mutants, ops, run};

/// The reference satisfies every law on 500 inputs.
fn reference<O: Operation>() {
    let config = Config { cases: 500, seed: 0x5eed, regressions: None };
    let report = run::<O, _>(&Reference, &config);
    print!("{report}");
    assert!(report.passed(), "{report}");
    assert!(report.laws.len() >= 3);
    assert!(report.laws.iter().all(|law| law.passed == 500), "{report}");
}

macro_rules! references {
    ($($name:ident $op:ident),+ $(,)?) => { $(
        #[test]
        fn $name() {
            reference::<ops::$op>();
        }
    )+ };
}

references! {
    repack Repack, fp4_repack Fp4Repack, merge_w13 MergeW13, permute_scales PermuteScales,
    permute_bias PermuteBias, int8_scales Int8Scales, nvfp4_scales E4m3Scales,
    mx_scales MxScales, shard_scales ShardScales, gptq_zeros GptqZeroPoints,
    awq_zeros AwqZeroPoints, preprocess Preprocess, sort Sort, global_scale GlobalScale,
}

/// Every mutant is rejected within 100 inputs, for two seeds, and the report states the place.
#[test]
fn every_mutant_is_rejected() {
    let mutants = mutants::all();
    assert!(mutants.len() > 100, "{}", mutants.len());
    // A plain `cargo test` takes one seed and every third mutant.
    for mutant in mutants.iter().step_by(Tier::current().pick(3, 1, 1)) {
        for seed in 1..=Tier::current().pick(1, 2, 2) {
            let config = Config { cases: 100, seed, regressions: None };
            let report = (mutant.run)(&config);
            let what = format!("{}: {}", mutant.operation, mutant.name);
            let Some(failure) = report.failure() else { panic!("{what} passed\n{report}") };
            let mismatch = failure.mismatch.as_ref().unwrap_or_else(|| panic!("{what}\n{report}"));
            assert!(mismatch.count > 0 && mismatch.expected != mismatch.found, "{what}\n{report}");
            assert!(!mismatch.place.is_empty() && !failure.input.is_empty(), "{what}\n{report}");
        }
    }
}

/// A failure shrinks, names the fragment, and is reproduced from its seed.
#[test]
fn a_failure_is_small_placed_and_repeatable() {
    let all = mutants::all();
    let mutant = all.iter().find(|m| m.name == "one nibble of the last word flipped").unwrap();
    let config = Config { cases: 100, seed: 77, regressions: None };
    let report = (mutant.run)(&config);
    assert_eq!(report, (mutant.run)(&config));
    let failure = report.failure().unwrap();
    assert_eq!(failure.input, "experts 1 size_k 32 size_n 64 num_bits 4 is_a_8bit false");
    let mismatch = failure.mismatch.as_ref().unwrap();
    // The last word of the last of two tiles: lane 31, columns 48 to 63, and of its eight values
    // the seventh, k 8 or 9 of the upper fragment's second register.
    assert_eq!((mismatch.count, mismatch.element, mismatch.bit), (1, 255, 28));
    assert_eq!(mismatch.place, "expert 0 (k 31, n 63) tile (1, 0) lane 31 mma 7 b1[1]");
    let text = report.to_string();
    assert!(text.contains("again: seed 0x000000000000004d"), "{text}");
}

/// Files are written only on request, one per violated law.
#[test]
fn regressions_are_written_on_request() {
    let folder = std::env::temp_dir().join(format!("marlinspike-kit-{}", std::process::id()));
    let all = mutants::all();
    let mutant = all.iter().find(|m| m.name == "bias not permuted").unwrap();
    let config = Config { cases: 20, seed: 5, regressions: Some(folder.clone()) };
    let report = (mutant.run)(&config);
    assert!(!report.passed());
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|f| f.unwrap().path()).collect();
    let broken = report.laws.iter().filter(|l| l.failure.is_some()).count();
    assert_eq!(files.len(), broken);
    let text = std::fs::read_to_string(&files[0]).unwrap();
    assert!(text.starts_with("seed 0x0000000000000005\n"), "{text}");
    std::fs::remove_dir_all(folder).unwrap();
}
