//! The batched form compared with upstream's documented example and counts computed by hand, and
//! `block_size_m` with the choices that the golden layers record.

use marlinspike::Error;
use marlinspike::case::{Case, CaseConfig};
use marlinspike::moe::batched::{BatchedAlign, block_size_m, experts_of_rows};
use marlinspike::num::scalar::ScalarType;
use marlinspike_golden::Manifest;

/// The example in upstream's documentation of `batched_moe_align_block_size`. (Its `expert_ids`
/// there name six experts of five; by its own rule batch 4 has the last two blocks.)
#[test]
fn upstreams_example() {
    let align = BatchedAlign { block_size: 4, max_tokens: 8 };
    let counts = [2, 3, 0, 6, 8];
    let padded = align.padded(&counts).expect("counts in range");
    let mut ids = vec![0, 1, 40, 40, 8, 9, 10, 40, 24, 25, 26, 27, 28, 29, 40, 40];
    ids.extend(32..40);
    assert_eq!(padded.num_tokens_post_padded, 24);
    assert_eq!(padded.sorted_token_ids[..24], ids);
    assert_eq!(padded.sorted_token_ids[24..], [40; 16]);
    assert_eq!(padded.expert_ids, [0, 1, 3, 3, 4, 4, -1, -1, -1, -1]);
    let trimmed = align.run(&counts).expect("counts in range");
    assert_eq!(trimmed.sorted_token_ids, ids);
    assert_eq!(trimmed.expert_ids, [0, 1, 3, 3, 4, 4]);
    let rows = experts_of_rows(8, &counts).expect("counts in range");
    assert_eq!(rows.iter().flatten().count(), 19);
    assert_eq!((rows[1], rows[2], rows[29], rows[30]), (Some(0), None, Some(3), None));
}

/// A batch's tokens need not fill whole blocks: each batch is rounded up separately.
#[test]
fn batches_are_padded_apart() {
    let padded =
        BatchedAlign { block_size: 16, max_tokens: 5 }.padded(&[5, 1]).expect("counts in range");
    assert_eq!(padded.sorted_token_ids.len(), 32);
    assert_eq!(padded.sorted_token_ids[..6], [0, 1, 2, 3, 4, 10]);
    assert_eq!((padded.sorted_token_ids[16], padded.sorted_token_ids[17]), (5, 10));
    assert_eq!((padded.expert_ids, padded.num_tokens_post_padded), (vec![0, 1], 32));
}

#[test]
fn counts_out_of_range_are_refused() {
    let align = BatchedAlign { block_size: 4, max_tokens: 8 };
    for (counts, at) in [([1, 9], 1), ([-1, 0], 0)] {
        match align.run(&counts) {
            Err(Error::Value { index, .. }) => assert_eq!(index, [at]),
            other => panic!("{other:?}"),
        }
    }
    for (block_size, max_tokens) in [(0, 8), (8, 0), (64, usize::MAX), (1, 1 << 31)] {
        let found = BatchedAlign { block_size, max_tokens }.run(&[0]);
        assert!(matches!(found, Err(Error::Size { .. })), "{block_size}, {max_tokens}");
    }
    assert!(matches!(align.run(&[]), Err(Error::Size { .. })));
    assert!(matches!(block_size_m(1, 1, 0, None), Err(Error::Size { .. })));
}

#[test]
fn block_sizes_by_hand() {
    // M, top_k, E, size: 7.2 tokens per expert are 0.9 of 8.
    for (m, top_k, experts, size) in [
        (1, 2, 8, 8),
        (7, 1, 1, 8),
        (72, 1, 10, 16),
        (71, 1, 10, 8),
        (144, 1, 10, 32),
        (288, 1, 10, 48),
        (431, 1, 10, 48),
        (432, 1, 10, 64),
        (100_000, 8, 8, 64),
    ] {
        assert_eq!(block_size_m(m, top_k, experts, None).expect("experts"), size, "{m}");
    }
    let int8 = Some(ScalarType::INT8);
    assert_eq!(block_size_m(1, 2, 8, int8).expect("experts"), 16);
    assert_eq!(block_size_m(432, 1, 10, int8).expect("experts"), 64);
    let half = Some(ScalarType::FLOAT16);
    assert_eq!(block_size_m(1, 2, 8, half).expect("experts"), 8);
}

#[test]
fn golden_layers_chose_the_same() {
    let golden = Manifest::load().expect("the golden manifest");
    let mut checked = 0;
    for entry in golden.cases() {
        let bytes = std::fs::read(golden.path(&entry.path)).expect("a golden file");
        let case = Case::parse(&bytes).expect("a case");
        let CaseConfig::Moe(c) = &case.config else { continue };
        if case.output("y").is_none() || !case.provenance.starts_with("vllm") {
            continue;
        }
        let weights = case.inputs.get("w13_qweight").or(case.inputs.get("w13_weight"));
        let experts = weights.expect("w13").shape()[0];
        let size = block_size_m(c.size_m, c.top_k, experts, c.quant.input_dtype).expect("experts");
        assert_eq!(size, c.block_size_m, "{}", entry.path);
        checked += 1;
    }
    assert!(checked >= 7, "{checked} layers");
}
