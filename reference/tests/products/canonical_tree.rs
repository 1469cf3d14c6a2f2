//! Version 2 of the canonical schedule: its leaves, and the same bits for every number of ranks.

use marlinspike::Error;
use marlinspike::ndarray::Array2;
use marlinspike::num::array::{into_vec, rows_of};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{
    Extras, Order, RankSums, Schedule, ScheduleError, Split, Step, StepOp, Sum,
};
use marlinspike::products::tensor_core::Decoded;
use marlinspike::weight::{Groups, Weight};

use crate::schedule::{execute, weight, x};

const F16: ScalarType = ScalarType::FLOAT16;
const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const INT8: ScalarType = ScalarType::INT8;
const COLUMNS: usize = 24;

/// K of models, and by hand from the rule: the number of leaves, and the chunks of each.
const TABLE: &[(usize, usize, &[usize])] = &[
    (320, 1, &[256, 64]),
    (768, 4, &[192]),
    (1408, 2, &[256, 256, 192]),
    (1536, 8, &[192]),
    (2048, 8, &[256]),
    (2880, 1, &[384, 384, 384, 384, 384, 384, 384, 192]),
    (4096, 8, &[512]),
    (9728, 8, &[1216]),
    (11008, 4, &[1408, 1344]),
    (14336, 8, &[1792]),
    (18944, 8, &[2368]),
    (29568, 2, &[3712, 3712, 3712, 3648]),
];

/// Tables that are quick to execute.
fn small() -> impl Iterator<Item = &'static (usize, usize, &'static [usize])> {
    TABLE.iter().filter(|(size_k, ..)| *size_k <= 4096 || *size_k == 11008)
}

fn v2(w: &Weight<'_>) -> Schedule {
    Schedule::canonical_v2(w, F16, F16).unwrap()
}

fn ranks_of(leaves: usize) -> impl Iterator<Item = usize> {
    [1, 2, 4, 8].into_iter().filter(move |ranks| leaves.is_multiple_of(*ranks))
}

/// Columns `range` of x.
fn cut(x: &[u32], size_k: usize, range: std::ops::Range<usize>) -> Vec<u32> {
    x.chunks_exact(size_k).flat_map(|row| &row[range.clone()]).copied().collect()
}

/// The f32 sums of the ranks.
fn parts(
    x: &[u32],
    w: &Weight<'_>,
    ranks: usize,
    input: ScalarType,
    extras: Extras<'_>,
) -> Vec<Array2<f32>> {
    let size_k = w.shape().size_k;
    let part = |rank| {
        let split = Split::new(size_k, rank, ranks).unwrap();
        let own = w.slice_rows(split.rows()).unwrap();
        let schedule = Schedule::canonical_v2_part(&own, split, F16, input).unwrap();
        let x = cut(x, size_k, split.rows());
        let rows = rows_of("x", &x, own.shape().size_k).unwrap();
        schedule.execute(rows, &own, extras).unwrap().mapv(f32::from_bits)
    };
    (0..ranks).map(part).collect()
}

/// `parts` as those of ranks 0, 1, … of the model's K.
fn of_ranks(size_k: usize, parts: &[Array2<f32>]) -> Vec<RankSums<'_>> {
    let split = |rank| Split::new(size_k, rank, parts.len()).unwrap();
    let parts = parts.iter().enumerate();
    parts.map(|(rank, sums)| RankSums { split: split(rank), sums: sums.view() }).collect()
}

#[test]
fn leaves_and_chunks_of_the_models() {
    for &(size_k, leaves, chunks) in TABLE {
        assert_eq!(Schedule::canonical_leaves(size_k), leaves, "{size_k}");
        assert_eq!(chunks.iter().sum::<usize>() * leaves, size_k, "{size_k}");
    }
    // The bits of version 1 stay where there is nothing to add by a tree.
    let w = weight(320, COLUMNS, 1);
    assert_eq!(v2(&w), Schedule::canonical(&w, F16, F16).unwrap());
}

/// The schedule by its definition, without the executor: one chain of instructions for each chunk,
/// chunks of a leaf ascending, neighbouring leaves in pairs, bias, one rounding.
#[test]
fn a_balanced_tree_adds_the_leaves() {
    for &(size_k, leaves, chunks) in small() {
        let (w, x) = (weight(size_k, COLUMNS, 5), x(2, size_k));
        let schedule = v2(&w);
        let made = execute(&schedule, &x, &w).unwrap();
        let unit = schedule.unit.find().unwrap();
        let a = Decoded::new(unit, F16, &x, size_k);
        for (i, &found) in made.iter().enumerate() {
            let (m, n) = (i / COLUMNS, i % COLUMNS);
            let column: Vec<u32> =
                (0..size_k).map(|k| F16.encode_rne(w.dequantize(k, n))).collect();
            let b = Decoded::new(unit, F16, &column, size_k);
            let mut at = 0;
            let mut level: Vec<f32> = Vec::new();
            for _ in 0..leaves {
                let mut sum: Option<f32> = None;
                for &chunk in chunks {
                    let range = at..at + chunk;
                    let part = unit.dot(&a.row(m)[range.clone()], &b.row(0)[range], 0);
                    let part = f32::from_bits(part);
                    sum = Some(sum.map_or(part, |s| s + part));
                    at += chunk;
                }
                level.push(sum.unwrap());
            }
            while level.len() > 1 {
                level = level.chunks(2).map(|pair| pair[0] + pair[1]).collect();
            }
            let bias = w.bias.as_ref().unwrap().value(0, n) as f32;
            let expected = F16.encode_rne(f64::from(level[0] + bias));
            assert_eq!(found, expected, "size_k {size_k}, ({m}, {n})");
        }
    }
}

#[test]
fn every_number_of_ranks_has_the_bits_of_one_gpu() {
    for &(size_k, leaves, _) in small() {
        let (w, x) = (weight(size_k, COLUMNS, 3), x(3, size_k));
        let schedule = v2(&w);
        let whole = execute(&schedule, &x, &w).unwrap();
        for ranks in ranks_of(leaves) {
            let own = w.slice_rows(0..size_k / ranks).unwrap();
            let parts = parts(&x, &w, ranks, F16, Extras::default());
            let parts = of_ranks(size_k, &parts);
            let y = into_vec(schedule.add_ranks(&parts, &own, Extras::default()).unwrap());
            assert!(y == whole, "size_k {size_k}, {ranks} ranks");
        }
    }
}

/// Scales of rows and columns, the router weight and the bias follow the last addition.
#[test]
fn eight_bit_activations_and_router_weights() {
    let (size_k, rows) = (1536, 3);
    let mut w = weight(size_k, COLUMNS, 7);
    w.scales = w.scales.slice_rows(0..1).unwrap();
    w.groups = Groups::Uniform(GroupSize::Channel);
    let (scales, routed) = ([0.5f32, 0.007, 1.25], [0.3f32, 0.9, 0.77]);
    let extras = Extras {
        activation_scales: Some(&scales),
        router_weights: Some(&routed),
        ..Extras::default()
    };
    for input in [INT8, E4M3] {
        let code = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 13) & 0x77;
        let x: Vec<u32> = (0..rows * size_k).map(code).collect();
        let schedule = Schedule::canonical_v2(&w, F16, input).unwrap();
        let view = rows_of("x", &x, size_k).unwrap();
        let whole = schedule.execute(view, &w, extras).unwrap();
        for ranks in [1, 2, 4, 8] {
            let parts = parts(&x, &w, ranks, input, extras);
            let own = w.slice_rows(0..size_k / ranks).unwrap();
            let y = schedule.add_ranks(&of_ranks(size_k, &parts), &own, extras).unwrap();
            assert!(y == whole, "{input}, {ranks} ranks");
        }
    }
}

/// What other implementations do gives other bits: these inputs can tell.
#[test]
fn wrong_reductions_differ() {
    let (size_k, ranks) = (1536, 4);
    let (w, x) = (weight(size_k, COLUMNS, 3), x(40, size_k));
    let schedule = v2(&w);
    let whole = execute(&schedule, &x, &w).unwrap();
    let own = w.slice_rows(0..size_k / ranks).unwrap();
    let add = |parts: &[Array2<f32>]| {
        let parts = of_ranks(size_k, parts);
        into_vec(schedule.add_ranks(&parts, &own, Extras::default()).unwrap())
    };
    let right = parts(&x, &w, ranks, F16, Extras::default());
    assert!(add(&right) == whole);

    // A chain over ranks, and by hand the tree.
    let finish = |sums: Array2<f32>| -> Vec<u32> {
        let bias = |n| w.bias.as_ref().unwrap().value(0, n) as f32;
        let rounded =
            |((_, n), sum): ((usize, usize), &f32)| F16.encode_rne(f64::from(sum + bias(n)));
        sums.indexed_iter().map(rounded).collect()
    };
    let tree = (&right[0] + &right[1]) + (&right[2] + &right[3]);
    assert!(finish(tree) == whole);
    let chain = ((&right[0] + &right[1]) + &right[2]) + &right[3];
    assert!(finish(chain) != whole);
    // Version 1 on each rank: chunks of the rank's K.
    let of_rank = |rank: usize| {
        let range = rank * size_k / ranks..(rank + 1) * size_k / ranks;
        let own = w.slice_rows(range.clone()).unwrap();
        let mut v1 = Schedule::canonical(&own, F16, F16).unwrap();
        v1.epilogue = vec![Step { op: StepOp::Round, ty: ScalarType::FLOAT32 }];
        let x = cut(&x, size_k, range);
        let rows = rows_of("x", &x, size_k / ranks).unwrap();
        v1.execute(rows, &own, Extras::default()).unwrap().mapv(f32::from_bits)
    };
    assert!(add(&(0..ranks).map(of_rank).collect::<Vec<_>>()) != whole);
    // Parts on a 16-bit wire.
    let half = |v: &f32| F16.to_f64(F16.encode_rne(f64::from(*v))) as f32;
    assert!(add(&right.iter().map(|p| p.map(half)).collect::<Vec<_>>()) != whole);
    // The bias of one rank in its part, and again at the end.
    let mut twice = right.clone();
    for (n, mut column) in twice[0].columns_mut().into_iter().enumerate() {
        column += w.bias.as_ref().unwrap().value(0, n) as f32;
    }
    assert!(add(&twice) != whole);
    // Version 1 of the whole product; ranks in another order.
    let v1 = Schedule::canonical(&w, F16, F16).unwrap();
    assert!(execute(&v1, &x, &w).unwrap() != whole);
    let turned = [0, 2, 1, 3].map(|rank: usize| right[rank].clone());
    assert!(add(&turned) != whole);
}

/// An implementation of version 1, judged as version 2, is named.
#[test]
fn the_other_version_is_related() {
    let w = weight(11008, 16, 0);
    let (v1, v2) = (Schedule::canonical(&w, F16, F16).unwrap(), v2(&w));
    let related = v2.related(11008);
    assert!(related.iter().any(|r| r.id == "schedule-version" && r.schedule == v1));
    let chain = related
        .iter()
        .any(|r| r.id == "schedule-chunk-order" && r.schedule.chunk_sum.order == Order::Ascending);
    assert!(chain);
    assert!(related.iter().any(|r| r.id == "schedule-leaves"));
}

/// A slice leaves the bias to the first rank; a part has it on every rank, so that any rank can add up.
#[test]
fn every_ranks_part_has_the_bias() {
    let (w, split) = (weight(1536, COLUMNS, 3), Split::new(1536, 1, 2).unwrap());
    let (slice, part) = (w.slice_rows(split.rows()).unwrap(), split.part_of(&w).unwrap());
    assert!(slice.bias.is_none() && part.bias == w.bias && w.bias.is_some());
    assert_eq!((&part.scales, part.shape()), (&slice.scales, slice.shape()));
    let error = split.part_of(&weight(768, COLUMNS, 3)).unwrap_err().to_string();
    assert!(error.contains("768") && error.contains("1536"), "{error}");
}

#[test]
fn what_ranks_cannot_share_is_refused_by_name() {
    let refused = |size_k, rank, ranks| Split::new(size_k, rank, ranks).unwrap_err().to_string();
    let text = refused(1408, 0, 4);
    assert!(text.contains("ranks") && text.contains("1 or 2") && text.contains("1408"), "{text}");
    assert!(refused(4096, 0, 0).contains("1 or 2 or 4 or 8"));
    assert!(refused(4096, 0, 3).contains("1 or 2 or 4 or 8"));
    assert!(refused(4096, 4, 4).contains("below 4"));

    let w = weight(768, COLUMNS, 0);
    let split = Split::new(1536, 0, 4).unwrap();
    let part = |w: &Weight<'_>, split, input| Schedule::canonical_v2_part(w, split, F16, input);
    let found = part(&w, split, F16);
    assert!(matches!(found, Err(Error::Shape { tensor, .. }) if tensor == "weight"));
    let split = Split::new(1536, 1, 2).unwrap();
    assert!(part(&w, split, F16).is_ok());
    assert!(matches!(part(&w, split, INT8), Err(Error::Unsupported { .. })));
    let mut sorted = w.clone();
    let g_idx = (0..768).map(|k| (k as u32 * 5) % 12).collect();
    sorted.groups = Groups::Indexed { g_idx, group_size: GroupSize::Of(64) };
    assert!(matches!(part(&sorted, split, F16), Err(Error::Unsupported { .. })));
    assert!(part(&sorted, Split::whole(768), F16).is_ok());
}

/// Parts that are not every rank's, and schedules that are not the product's, are refused.
#[test]
fn sums_that_are_not_those_of_all_ranks_are_refused() {
    let whole = weight(1536, COLUMNS, 0);
    let w = weight(768, COLUMNS, 0);
    let schedule = v2(&whole);
    let zeros = |m, n| Array2::<f32>::zeros((m, n));
    let sums = zeros(2, COLUMNS);
    let of =
        |rank, ranks| RankSums { split: Split::new(1536, rank, ranks).unwrap(), sums: sums.view() };
    let refused = |schedule: &Schedule, parts: &[RankSums<'_>], w: &Weight<'_>| {
        schedule.add_ranks(parts, w, Extras::default()).unwrap_err()
    };
    let text = |parts: &[RankSums<'_>]| {
        let error = refused(&schedule, parts, &w);
        assert!(matches!(error, Error::Size { .. }), "{error:?}");
        error.to_string()
    };
    assert!(schedule.add_ranks(&[of(0, 2), of(1, 2)], &w, Extras::default()).is_ok());
    assert!(schedule.add_ranks(&[of(0, 1)], &whole, Extras::default()).is_ok());

    assert!(text(&[]).contains("every rank"));
    // No number of ranks is 3; without the last of 4; and of 2 ranks, one.
    let three = text(&[of(0, 4), of(1, 4), of(2, 4)]);
    assert!(three.contains('3') && three.contains("4, one of each rank"), "{three}");
    assert!(text(&[of(0, 2)]).contains("2, one of each rank"));
    // Another order, one rank twice, one rank too many, a rank of another K.
    let turned = text(&[of(1, 2), of(0, 2)]);
    assert!(turned.contains("parts[0]") && turned.contains("rank 1 of 2"), "{turned}");
    assert!(text(&[of(0, 2), of(0, 2)]).contains("parts[1]"));
    assert!(text(&[of(0, 2), of(1, 2), of(0, 2)]).contains("parts[2]"));
    let other = RankSums { split: Split::new(768, 1, 2).unwrap(), sums: sums.view() };
    assert!(text(&[of(0, 2), other]).contains("of 768 k"));

    // Version 1, a chain, the version 2 of another K, and a rank's own schedule.
    let both = [of(0, 2), of(1, 2)];
    let key_of = |schedule: &Schedule, parts: &[RankSums<'_>], w: &Weight<'_>| {
        let error = refused(schedule, parts, w);
        match error.downcast_ref::<ScheduleError>() {
            Some(ScheduleError::Value { key, .. }) => key.clone(),
            _ => panic!("{error:?}"),
        }
    };
    let v1 = Schedule::canonical(&whole, F16, F16).unwrap();
    assert_eq!(key_of(&v1, &both, &w), "chunks");
    let chain = Schedule { chunk_sum: Sum::default(), ..schedule.clone() };
    assert_eq!(key_of(&chain, &both, &w), "chunk_sum");
    assert_eq!(key_of(&v2(&weight(4096, COLUMNS, 0)), &both, &w), "chunks");
    let own = Schedule::canonical_v2_part(&whole, Split::whole(1536), F16, F16).unwrap();
    assert_eq!(key_of(&own, &[of(0, 1)], &whole), "epilogue");

    // Sums and weights of other shapes.
    let shaped = |a: &Array2<f32>, b: &Array2<f32>| {
        let parts = [a, b].map(Array2::view);
        let split = |rank| Split::new(1536, rank, 2).unwrap();
        let parts = [0, 1].map(|rank| RankSums { split: split(rank), sums: parts[rank] });
        refused(&schedule, &parts, &w).to_string()
    };
    assert!(shaped(&zeros(2, COLUMNS), &zeros(3, COLUMNS)).contains("[3, 24]"));
    assert!(shaped(&zeros(2, 8), &zeros(2, 8)).contains("[2, 8]"));
    let error = refused(&schedule, &both, &weight(384, COLUMNS, 0));
    assert!(matches!(&error, Error::Shape { .. }) && error.to_string().contains("768"), "{error}");
}
