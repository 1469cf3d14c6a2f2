//! gpt-oss experts: orders of gate and up, padding and its inverse, a rank's part. Padding does
//! not change a product.

use marlinspike::Error;
use marlinspike::num::array::into_vec;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::prepare::gate_up::{GateUp, reorder};
use marlinspike::prepare::pad::{PaddedKernel, pad, pad_w13, unpad, unpad_w13};
use marlinspike::prepare::padded_shard::PaddedShard;
use marlinspike::select::Platform;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use serde_json::Value;

const ORDERS: [GateUp; 3] = [GateUp::Interleaved, GateUp::Halves, GateUp::SwappedHalves];

/// An MXFP4 matrix without zero codes; each column has a different scale and bias.
fn weight(size_k: usize, size_n: usize) -> Weight<'static> {
    let shape = Shape::new(size_k, size_n);
    let groups = size_k / 32;
    let scales = (0..groups * size_n).map(|i| (100 + i % 50) as u8).collect();
    Weight {
        name: "w".to_owned(),
        ty: ScalarType::FLOAT4_E2M1F,
        codes: Codes::from_fn(4, shape, |k, n| (1 + (k * 7 + n * 3) % 7) as u8).unwrap(),
        scales: Table::new(ScalarType::FLOAT8_E8M0FNU, groups, size_n, TableData::B8(scales))
            .unwrap(),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(32)),
        global_scale: None,
        bias: Some(
            Table::new(
                ScalarType::BFLOAT16,
                1,
                size_n,
                TableData::B16((1..=size_n as u16).collect()),
            )
            .unwrap(),
        ),
    }
}

#[test]
fn orders_of_gate_and_up() {
    let w13 = weight(32, 6);
    let bias = |w: &Weight<'_>| w.bias.as_ref().unwrap().iter_bits().collect::<Vec<_>>();
    // Interleaved: gate is 1, 3, 5 and up 2, 4, 6.
    let halves = reorder(&w13, GateUp::Interleaved, GateUp::Halves).unwrap();
    assert_eq!(bias(&halves), [1, 3, 5, 2, 4, 6]);
    let swapped = reorder(&w13, GateUp::Interleaved, GateUp::SwappedHalves).unwrap();
    assert_eq!(bias(&swapped), [2, 4, 6, 1, 3, 5]);
    for k in 0..32 {
        for n in 0..6 {
            let from = [0, 2, 4, 1, 3, 5][n];
            assert_eq!(halves.codes.get(k, n), w13.codes.get(k, from));
            assert_eq!(halves.scales.bits(0, n), w13.scales.bits(0, from));
        }
    }
    for from in ORDERS {
        for to in ORDERS {
            let there = reorder(&w13, from, to).unwrap();
            assert_eq!(reorder(&there, to, from).unwrap(), w13, "{from:?} {to:?}");
        }
    }
    let error = reorder(&weight(32, 5), GateUp::Halves, GateUp::Interleaved).unwrap_err();
    assert!(matches!(error, Error::Size { .. }), "{error}");
}

#[test]
fn padding_and_its_inverse() {
    let w13 = weight(64, 12);
    for order in ORDERS {
        let padded = pad_w13(&w13, order, [96, 10]).unwrap();
        assert_eq!(padded.shape(), Shape::new(96, 20));
        padded.validate().unwrap();
        // Each feature is where its order puts it, for every size.
        for (i, up) in (0..10).flat_map(|i| [(i, false), (i, true)]) {
            let at = order.column(i, up, 10);
            for k in 0..96 {
                let expected =
                    if i < 6 && k < 64 { w13.codes.get(k, order.column(i, up, 6)) } else { 0 };
                assert_eq!(padded.codes.get(k, at), expected, "{order:?} {i} {up} {k}");
            }
            let bias = padded.bias.as_ref().unwrap().bits(0, at);
            assert_eq!(bias != 0, i < 6, "{order:?} {i} {up}");
        }
        assert_eq!(unpad_w13(&padded, order, [64, 6]).unwrap(), w13, "{order:?}");
    }
    let w2 = pad(&w13, Shape::new(128, 64)).unwrap();
    assert_eq!(unpad(&w2, w13.shape()).unwrap(), w13);
    // Nonzero elements outside the matrix are an error; they are not discarded.
    let error = unpad(&w2, Shape::new(32, 12)).unwrap_err();
    assert!(matches!(error, Error::Value { ref index, .. } if index == &[32, 0]), "{error}");
    let error = pad(&w13, Shape::new(32, 12)).unwrap_err();
    assert!(matches!(error, Error::Size { .. }), "{error}");
    let error = pad(&w13, Shape::new(80, 12)).unwrap_err();
    assert!(matches!(error, Error::Size { .. }), "no whole groups: {error}");
    let mut int4 = weight(32, 2);
    int4.ty = ScalarType::UINT4B8;
    let error = pad(&int4, Shape::new(64, 2)).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "code 0 is −8: {error}");
}

#[test]
fn padding_does_not_reach_the_product() {
    let weight = weight(64, 4);
    let padded = pad(&weight, Shape::new(128, 64)).unwrap();
    let (values, wide) = (into_vec(weight.dequantize_all()), into_vec(padded.dequantize_all()));
    // The padding of an activation may hold any finite values.
    let x: Vec<f64> = (0..128).map(|k| f64::from(k as u32 * 37 % 19) - 9.0).collect();
    let dot = |values: &[f64], n: usize, size: Shape| -> f64 {
        (0..size.size_k).map(|k| x[k] * values[k * size.size_n + n]).sum()
    };
    for n in 0..64 {
        let expected = if n < 4 { dot(&values, n, weight.shape()) } else { 0.0 };
        assert_eq!(dot(&wide, n, padded.shape()), expected, "{n}");
    }
}

#[test]
fn rounded_sizes_as_upstream() {
    let upstream: Value = serde_json::from_str(include_str!("../data/moe_marlin.json")).unwrap();
    let rows = upstream["sizes"].as_array().unwrap();
    assert_eq!(rows.len(), 60);
    for row in rows {
        let backend = match row[0].as_str().unwrap() {
            "DEEPGEMM_MXFP4" => PaddedKernel::DeepGemm,
            "MARLIN" => PaddedKernel::Marlin,
            "FLASHINFER_TRTLLM_MXFP4_BF16" => PaddedKernel::FlashInferTrtllm,
            "FLASHINFER_CUTLASS_MXFP4_BF16" => PaddedKernel::FlashInferCutlass,
            _ => PaddedKernel::Other,
        };
        let platform = match row[1].as_str().unwrap() {
            "cuda" => Platform::Cuda,
            "xpu" => Platform::Xpu,
            _ => Platform::Rocm,
        };
        let size = |i: usize| row[i].as_u64().unwrap() as usize;
        let found = backend.round_up(platform, [size(2), size(3)]).unwrap();
        assert_eq!(found, [size(4), size(5)], "{row}");
    }
    let error = PaddedKernel::Marlin.round_up(Platform::Cuda, [usize::MAX, 1]).unwrap_err();
    assert!(matches!(error, Error::Size { .. }), "{error}");
}

fn shard(tp_size: usize, tp_rank: usize) -> PaddedShard {
    PaddedShard {
        hidden_size: 64,
        intermediate_size: 192,
        tp_size,
        tp_rank,
        backend: PaddedKernel::Marlin,
        platform: Platform::Cuda,
    }
}

#[test]
fn ranks_hold_whole_blocks() {
    // 2880 = 90 blocks: 23 for each of four ranks, but 21 for the last.
    let ranges = |intermediate_size, tp_size: usize| {
        (0..tp_size)
            .map(|tp_rank| {
                let shard = PaddedShard { intermediate_size, ..shard(tp_size, tp_rank) };
                let range = shard.features().unwrap();
                assert!(range.len() <= shard.sizes().unwrap()[1], "{shard:?}");
                range
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(ranges(2880, 4), [0..736, 736..1472, 1472..2208, 2208..2880]);
    // Six blocks for each of fifteen ranks: the sixteenth has none.
    assert_eq!(ranges(2880, 16)[15], 2880..2880);
    assert_eq!(ranges(192, 1).pop(), Some(0..192));
    for bad in [shard(2, 2), shard(0, 0), PaddedShard { intermediate_size: 200, ..shard(2, 0) }] {
        let error = bad.features().unwrap_err();
        assert!(matches!(error, Error::Size { .. }), "{error}");
    }
    let error = PaddedShard { intermediate_size: 2880, ..shard(7, 0) }.sizes().unwrap_err();
    assert!(matches!(error, Error::Size { .. }), "{error}");
}

#[test]
fn a_ranks_part_is_cut_ordered_and_padded() {
    let (w13, w2) = (weight(64, 384), weight(192, 64));
    for order in ORDERS {
        for (tp_size, tp_rank) in [(1, 0), (4, 0), (4, 2), (4, 3)] {
            let shard = shard(tp_size, tp_rank);
            let (range, [hidden, inner]) = (shard.features().unwrap(), shard.sizes().unwrap());
            assert_eq!([hidden, inner], [256, if tp_size == 1 { 256 } else { 128 }]);
            let part = shard.w13(&w13, order).unwrap();
            assert_eq!(part.shape(), Shape::new(hidden, 2 * inner));
            let plain = unpad_w13(&part, order, [64, range.len()]).unwrap();
            let plain = reorder(&plain, order, GateUp::Interleaved).unwrap();
            let columns = 2 * range.start..2 * range.end;
            assert_eq!(plain, w13.slice_columns(columns).unwrap(), "{order:?} {shard:?}");

            let part = shard.w2(&w2).unwrap();
            assert_eq!(part.shape(), Shape::new(inner, hidden));
            let bias = part.bias.as_ref().unwrap().clone();
            assert_eq!(bias.iter_bits().any(|b| b != 0), tp_rank == 0, "{shard:?}");
            for (k, n) in (0..inner).flat_map(|k| (0..hidden).map(move |n| (k, n))) {
                let expected =
                    if k < range.len() && n < 64 { w2.codes.get(range.start + k, n) } else { 0 };
                assert_eq!(part.codes.get(k, n), expected, "{shard:?} {k} {n}");
            }
        }
    }
    // 192 features are six blocks, two for each of three ranks and none for the fourth.
    let empty = shard(4, 3);
    assert!(empty.features().unwrap().is_empty());
    assert!(empty.w13(&w13, GateUp::Interleaved).unwrap().codes.words().iter().all(|&w| w == 0));
    let error = shard(1, 0).w13(&w2, GateUp::Halves).unwrap_err();
    assert!(matches!(error, Error::Size { .. }), "{error}");
}
