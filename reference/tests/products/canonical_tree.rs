//! Version 2 of the canonical schedule: its leaves, and the same bits for every number of ranks.

use marlinspike::Error;
use marlinspike::ndarray::{Array2, ArrayView2};
use marlinspike::num::array::{into_vec, rows_of};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{
    Extras, Order, Part, Schedule, ScheduleError, Split, Step, StepOp, Sum,
};
use marlinspike::products::tensor_core::Decoded;
use marlinspike::weight::{Groups, Weight};

use super::schedule::{execute, weight, x};

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

fn views(parts: &[Array2<f32>]) -> Vec<ArrayView2<'_, f32>> {
    parts.iter().map(|part| part.view()).collect()
}

fn part_of(w: &Weight<'_>, rank: usize, ranks: usize) -> Part {
    Split::new(w.shape().size_k, rank, ranks).unwrap().part_of(w).unwrap()
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
        let own = part_of(w, rank, ranks);
        let schedule = Schedule::canonical_v2_part(&own, F16, input).unwrap();
        let x = cut(x, size_k, own.split().rows());
        let rows = rows_of("x", &x, own.weight().shape().size_k).unwrap();
        schedule.execute(rows, own.weight(), extras).unwrap().mapv(f32::from_bits)
    };
    (0..ranks).map(part).collect()
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
            let parts = parts(&x, &w, ranks, F16, Extras::default());
            for rank in [0, ranks - 1] {
                let own = part_of(&w, rank, ranks);
                let y = schedule.add_ranks(&views(&parts), &own, Extras::default()).unwrap();
                assert!(into_vec(y) == whole, "size_k {size_k}, rank {rank} of {ranks}");
            }
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
            let own = part_of(&w, 0, ranks);
            let y = schedule.add_ranks(&views(&parts), &own, extras).unwrap();
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
    let own = part_of(&w, 1, ranks);
    let add = |parts: &[Array2<f32>]| {
        into_vec(schedule.add_ranks(&views(parts), &own, Extras::default()).unwrap())
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
    assert_eq!(part.split(), split);
    let part = part.weight();
    assert!(slice.bias.is_none() && part.bias == w.bias && w.bias.is_some());
    assert_eq!((&part.scales, part.shape()), (&slice.scales, slice.shape()));
    let error = split.part_of(&weight(768, COLUMNS, 3)).unwrap_err().to_string();
    assert!(error.contains("768") && error.contains("1536"), "{error}");
}

/// An engine loads a rank's rows alone: with the bias they are the part, and the whole product's schedule follows.
#[test]
fn loaded_rows_are_a_part_and_name_the_whole_schedule() {
    for (size_k, leaves, _) in small() {
        let w = weight(*size_k, COLUMNS, 3);
        for ranks in ranks_of(*leaves) {
            let split = Split::new(*size_k, ranks - 1, ranks).unwrap();
            let rows = w.slice_rows(split.rows()).unwrap();
            let loaded = Part::new(split, Weight { bias: w.bias.clone(), ..rows.clone() }).unwrap();
            assert_eq!((loaded.split(), loaded.weight().shape()), (split, rows.shape()));
            assert_eq!(Schedule::canonical_v2_of(&loaded, F16, F16).unwrap(), v2(&w), "{size_k}");
            let wrong = Split::new(2 * size_k, 0, ranks).unwrap();
            let error = Part::new(wrong, rows).unwrap_err().to_string();
            let expected = format!("[{}, {COLUMNS}]", 2 * size_k / ranks);
            assert!(error.contains(&expected), "{error}");
        }
    }
    let mut sorted = weight(768, COLUMNS, 0);
    let g_idx = (0..768).map(|k| (k as u32 * 5) % 12).collect();
    sorted.groups = Groups::Indexed { g_idx, group_size: GroupSize::Of(64) };
    let refused = Part::new(Split::new(1536, 0, 2).unwrap(), sorted);
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
}

#[test]
fn what_ranks_cannot_share_is_refused_by_name() {
    let refused = |size_k, rank, ranks| Split::new(size_k, rank, ranks).unwrap_err().to_string();
    let text = refused(1408, 0, 4);
    assert!(text.contains("ranks") && text.contains("1 or 2") && text.contains("1408"), "{text}");
    assert!(refused(4096, 0, 0).contains("1 or 2 or 4 or 8"));
    assert!(refused(4096, 0, 3).contains("1 or 2 or 4 or 8"));
    assert!(refused(4096, 4, 4).contains("below 4"));

    let w = weight(1536, COLUMNS, 0);
    let part =
        |ranks, input| Schedule::canonical_v2_part(&part_of(&w, ranks - 1, ranks), F16, input);
    assert!(part(2, F16).is_ok() && part(1, INT8).is_ok());
    assert!(matches!(part(2, INT8), Err(Error::Unsupported { .. })));
    let mut sorted = w.clone();
    let g_idx = (0..1536).map(|k| (k as u32 * 5) % 24).collect();
    sorted.groups = Groups::Indexed { g_idx, group_size: GroupSize::Of(64) };
    let split = Split::new(1536, 1, 2).unwrap();
    assert!(matches!(split.part_of(&sorted), Err(Error::Unsupported { .. })));
    assert!(Split::whole(1536).part_of(&sorted).is_ok());

    let schedule = v2(&weight(1536, COLUMNS, 0));
    let add = |parts: &[Array2<f32>]| {
        let own = part_of(&w, 0, 2);
        schedule.add_ranks(&views(parts), &own, Extras::default()).unwrap_err().to_string()
    };
    let zeros = |m, n| Array2::<f32>::zeros((m, n));
    assert!(add(&[]).contains("parts: found 0, expected 2"), "{}", add(&[]));
    assert!(add(&[0; 4].map(|_| zeros(2, COLUMNS))).contains("found 4, expected 2"));
    assert!(add(&[zeros(2, COLUMNS), zeros(3, COLUMNS)]).contains("[3, 24]"));
    assert!(add(&[zeros(2, 8), zeros(2, 8)]).contains("[2, 8]"));
}

/// Schedules other than version 2 of the whole product are refused by the key that differs.
#[test]
fn schedules_of_other_products_are_refused() {
    let whole = weight(1536, COLUMNS, 0);
    let schedule = v2(&whole);
    let sums = Array2::<f32>::zeros((2, COLUMNS));
    let key_of = |schedule: &Schedule, ranks: usize| {
        let (own, parts) = (part_of(&whole, 0, ranks), vec![sums.view(); ranks]);
        let error = schedule.add_ranks(&parts, &own, Extras::default()).unwrap_err();
        match error.downcast_ref::<ScheduleError>() {
            Some(ScheduleError::Value { key, .. }) => key.clone(),
            _ => panic!("{error:?}"),
        }
    };
    let v1 = Schedule::canonical(&whole, F16, F16).unwrap();
    assert_eq!(key_of(&v1, 2), "chunks");
    let chain = Schedule { chunk_sum: Sum::default(), ..schedule.clone() };
    assert_eq!(key_of(&chain, 2), "chunk_sum");
    assert_eq!(key_of(&v2(&weight(4096, COLUMNS, 0)), 2), "chunks");
    let own = Schedule::canonical_v2_part(&part_of(&whole, 0, 1), F16, F16).unwrap();
    assert_eq!(key_of(&own, 1), "epilogue");
}
