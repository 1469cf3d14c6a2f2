//! Interleaved block scales compared with FlashInfer's and vLLM's (`tables/flashinfer_layouts`),
//! and their laws around every edge of a tile.

use crate::blackwell::{Golden, Stream, facts};
use marlinspike::Error;
use marlinspike::layouts::flashinfer::{BlockScaleLayout, RowOrder, RowStep, ScaleTile};
use marlinspike::layouts::{Layout, compare};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::weight::{Table, TableData};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const TILES: [ScaleTile; 2] = [ScaleTile::Rows128, ScaleTile::Rows8];
const SIZES_N: [usize; 14] = [1, 2, 7, 8, 9, 31, 32, 33, 64, 96, 127, 128, 129, 257];
const GROUPS: [usize; 8] = [1, 2, 3, 4, 5, 7, 8, 9];

/// `[groups, N]` of the producer's `[N, groups]`.
fn given(name: &str, rows: usize, cols: usize) -> Table {
    let stream = Stream::new(name);
    let bits = (0..cols * rows).map(|i| stream.e4m3(i % rows * cols + i / rows)).collect();
    Table::new(E4M3, cols, rows, TableData::B8(bits)).unwrap()
}

#[test]
fn bytes_are_upstreams() {
    let golden = Golden::load();
    for (rows, cols) in [
        (1, 1),
        (1, 4),
        (3, 5),
        (31, 4),
        (32, 1),
        (33, 3),
        (65, 2),
        (127, 8),
        (128, 4),
        (129, 5),
        (257, 9),
    ] {
        let name = format!("swizzle.{rows}x{cols}");
        let found = golden.tensor(&name);
        let layout = BlockScaleLayout::new(cols, rows, ScaleTile::Rows128, E4M3).unwrap();
        assert_eq!(layout.packed_shape()[..], *found.shape(), "{name}");
        let scales = given(&name, rows, cols);
        let packed = layout.pack(&scales).unwrap();
        assert_eq!(packed.data(), &TableData::B8(found.bytes().to_vec()), "{name}");
        assert_eq!(layout.unpack(&packed).unwrap(), scales, "{name}");
        layout.expect_zero_padding(&packed).unwrap();
    }
    let stream = Stream::new("swizzle_bf16.130x6");
    let bits = (0..6 * 130).map(|i| stream.bf16(i % 130 * 6 + i / 130)).collect();
    let scales = Table::new(ScalarType::BFLOAT16, 6, 130, TableData::B16(bits)).unwrap();
    let layout = BlockScaleLayout::new(6, 130, ScaleTile::Rows128, ScalarType::BFLOAT16).unwrap();
    let found = golden.tensor("swizzle_bf16.130x6").elements::<u16>().into_owned();
    assert_eq!(layout.pack(&scales).unwrap().data(), &TableData::B16(found));
}

/// Each expert of a stack is interleaved separately.
#[test]
fn experts_follow_each_other() {
    let found = Golden::load().tensor("swizzle_experts.3x5x6");
    let stream = Stream::new("swizzle_experts.3x5x6");
    let layout = BlockScaleLayout::new(6, 5, ScaleTile::Rows128, E4M3).unwrap();
    for (e, found) in found.bytes().chunks_exact(layout.packed_len()).enumerate() {
        let bits = (0..30).map(|i| stream.e4m3((e * 5 + i % 5) * 6 + i / 5)).collect();
        let scales = Table::new(E4M3, 6, 5, TableData::B8(bits)).unwrap();
        assert_eq!(layout.pack(&scales).unwrap().data(), &TableData::B8(found.to_vec()), "{e}");
    }
}

#[test]
fn tiles_of_eight_rows_are_flashinfers() {
    let facts = &facts()["scales_8x4"];
    let size = |key: &str| facts[key].as_u64().expect("a size") as usize;
    let (rows, groups) = (size("rows"), size("groups"));
    let layout = BlockScaleLayout::new(groups, rows, ScaleTile::Rows8, E4M3).unwrap();
    for n in 0..rows {
        for g in 0..groups {
            let found = facts["offsets"][n][g].as_u64().expect("an offset") as usize;
            assert_eq!(layout.offset(g, n).element, found, "({g}, {n})");
        }
    }
}

#[test]
fn every_scale_has_one_place_and_the_rest_is_padding() {
    let mut rng = Rng::new(21);
    for tile in TILES {
        for size_n in SIZES_N {
            for groups in GROUPS {
                let what = format!("{tile:?} [{groups}, {size_n}]");
                let layout = BlockScaleLayout::new(groups, size_n, tile, E4M3).unwrap();
                let order = RowOrder::new(size_n, &[RowStep::SwapHalves]);
                let swapped = order.map(|o| layout.clone().with_rows(o).unwrap());
                for layout in [Some(layout), swapped.ok()].into_iter().flatten() {
                    let mut owner = vec![None; layout.packed_len()];
                    for g in 0..groups {
                        for n in 0..size_n {
                            let slot = layout.offset(g, n);
                            assert_eq!((slot.bit, slot.width), (0, 8), "{what}");
                            assert!(owner[slot.element].replace((g, n)).is_none(), "{what}");
                        }
                    }
                    for (element, owner) in owner.into_iter().enumerate() {
                        let place = layout.locate(element, 7);
                        let inside = place.row < groups && place.col < size_n;
                        assert_eq!(inside.then_some((place.row, place.col)), owner, "{what}");
                        assert_eq!(layout.is_padding(element), owner.is_none(), "{what}");
                    }
                    let bits = (0..groups * size_n).map(|_| rng.next_u32() as u8 | 1).collect();
                    let scales = Table::new(E4M3, groups, size_n, TableData::B8(bits)).unwrap();
                    let packed = layout.pack(&scales).unwrap();
                    let slot = layout.offset(groups - 1, size_n / 2);
                    let found = packed.iter_bits().nth(slot.element);
                    assert_eq!(found, Some(scales.bits(groups - 1, size_n / 2)), "{what}");
                    assert_eq!(layout.unpack(&packed).unwrap(), scales, "{what}");
                    let zeros = packed.iter_bits().filter(|&b| b == 0).count();
                    assert_eq!(zeros, layout.packed_len() - groups * size_n, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_difference_is_found_where_it_is() {
    let layout = BlockScaleLayout::new(5, 129, ScaleTile::Rows128, E4M3).unwrap();
    let packed = layout.pack(&given("difference", 129, 5)).unwrap();
    let TableData::B8(expected) = packed.data() else { panic!("bytes") };
    let mut found = expected.clone();
    let slot = layout.offset(4, 128);
    found[slot.element] ^= 1;
    let diff = compare(&layout, 8, 1, expected, &found);
    let first = diff.first.expect("a difference");
    assert_eq!((diff.count, first.place.row, first.place.col), (1, 4, 128));
    // Nonzero padding is distinguished from scales.
    let dirty = (0..layout.packed_len()).find(|&e| layout.is_padding(e)).expect("padding");
    let mut found = expected.clone();
    found[dirty] = 3;
    let found = Table::new(E4M3, packed.rows(), packed.cols(), TableData::B8(found)).unwrap();
    assert_eq!(layout.unpack(&found).unwrap(), layout.unpack(&packed).unwrap());
    let Err(Error::Value { index, .. }) = layout.expect_zero_padding(&found) else {
        panic!("the padding is not zero");
    };
    assert_eq!(index, [dirty / packed.cols(), dirty % packed.cols()]);
}

#[test]
fn what_does_not_fit_is_an_error() {
    for (groups, size_n) in [(0, 4), (4, 0), (usize::MAX, 4), (4, usize::MAX), (1 << 40, 1 << 40)] {
        let refused = BlockScaleLayout::new(groups, size_n, ScaleTile::Rows128, E4M3);
        assert!(matches!(refused, Err(Error::Size { .. })), "[{groups}, {size_n}]");
    }
    let layout = BlockScaleLayout::new(5, 33, ScaleTile::Rows128, E4M3).unwrap();
    let wrong = given("wrong", 32, 5);
    assert!(matches!(layout.pack(&wrong), Err(Error::Shape { .. })));
    assert!(matches!(layout.unpack(&wrong), Err(Error::Shape { .. })));
    let e8m0 = given("wrong", 33, 5).map(ScalarType::FLOAT8_E8M0FNU, |b| b);
    assert!(matches!(layout.pack(&e8m0), Err(Error::Unsupported { .. })));
    let order = RowOrder::new(34, &[RowStep::SwapHalves]).unwrap();
    assert!(matches!(layout.with_rows(order), Err(Error::Size { .. })));
}
