//! Row orders and packed rows of FlashInfer's kernels, compared with FlashInfer 0.6.8.post1 and
//! vLLM 0.21.0 (`tables/flashinfer_layouts`), and their laws around every edge.

use super::bijection::is_a_bijection;
use crate::blackwell::Golden;
use marlinspike::Error;
use marlinspike::layouts::flashinfer::{BLOCK_K_BYTES, PackedRows, RowOrder, RowStep};
use marlinspike::layouts::{Layout, compare};
use marlinspike::num::array::into_vec;
use marlinspike::num::dims::Shape;
use marlinspike::vectors::Rng;
use marlinspike::weight::Codes;
use ndarray::s;

fn steps() -> Vec<(&'static str, Vec<RowStep>)> {
    let tile128 = RowStep::shuffle(128);
    vec![
        ("swap", vec![RowStep::SwapHalves]),
        ("gated", vec![RowStep::Interleave(1)]),
        ("interleave64", vec![RowStep::Interleave(64)]),
        ("shuffle_tile128", vec![tile128]),
        ("shuffle_tile64", vec![RowStep::shuffle(64)]),
        ("gated_shuffle_tile128", vec![RowStep::Interleave(1), tile128]),
    ]
}

#[test]
fn row_orders_are_upstreams() {
    let golden = Golden::load();
    let mut compared = 0;
    for (name, steps) in steps() {
        for size_n in [64, 256] {
            let Some(found) = golden.get(&format!("rows.{name}.{size_n}")) else { continue };
            let found: Vec<usize> = found.elements::<i32>().iter().map(|&r| r as usize).collect();
            assert_eq!(RowOrder::new(size_n, &steps).unwrap().sources(), found, "{name} {size_n}");
            compared += 1;
        }
    }
    assert_eq!(compared, 11, "interleave64 needs 128 rows");
}

#[test]
fn row_orders_are_permutations_with_an_inverse() {
    for (name, steps) in steps() {
        for size_n in [0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 96, 127, 128, 130, 192, 384] {
            let Ok(order) = RowOrder::new(size_n, &steps) else {
                let unit = match name {
                    "swap" | "gated" => 2,
                    "interleave64" => 128,
                    "shuffle_tile64" => 16,
                    _ => 32,
                };
                assert!(size_n == 0 || size_n % unit != 0, "{name} {size_n}");
                continue;
            };
            for row in 0..size_n {
                assert_eq!(order.source(order.target(row)), row, "{name} {size_n}");
            }
            let mut sources = order.sources();
            sources.sort_unstable();
            assert!(sources.into_iter().eq(0..size_n), "{name} {size_n}");
        }
    }
    assert!(matches!(RowOrder::new(64, &[RowStep::Shuffle(8)]), Err(Error::Size { .. })));
    assert!(matches!(RowOrder::new(64, &[RowStep::Interleave(0)]), Err(Error::Size { .. })));
    assert!(matches!(
        RowOrder::new(64, &[RowStep::Interleave(usize::MAX)]),
        Err(Error::Size { .. })
    ));
}

#[test]
fn packed_rows_hold_every_bit_once_and_come_back() {
    let mut rng = Rng::new(11);
    for bits in [4, 8] {
        for (size_k, block) in [
            (8, None),
            (24, None),
            (64, Some(4)),
            (64, Some(16)),
            (1024 / bits as usize, Some(BLOCK_K_BYTES)),
            (2048 / bits as usize, Some(BLOCK_K_BYTES)),
        ] {
            for (name, steps) in steps() {
                for size_n in [2, 16, 32, 64, 128] {
                    let Ok(order) = RowOrder::new(size_n, &steps) else { continue };
                    let shape = Shape::new(size_k, size_n);
                    let what = format!("{name} {bits} bits {shape} {block:?}");
                    let layout = PackedRows::new(shape, bits, order.clone(), block).expect(&what);
                    is_a_bijection(&layout, size_k, size_n, 8, &what);
                    let words = (0..shape.len() * bits as usize / 32).map(|_| rng.next_u32());
                    let codes = Codes::from_words(bits, shape, words.collect::<Vec<_>>()).unwrap();
                    let packed = layout.pack(&codes).unwrap();
                    for (k, n) in [(0, 0), (size_k - 1, 1), (size_k / 2, size_n - 1)] {
                        let slot = layout.offset(k, n);
                        let at = [slot.element / packed.ncols(), slot.element % packed.ncols()];
                        let found = packed[at] >> slot.bit & (0xff >> (8 - bits));
                        assert_eq!(found, codes.get(k, n), "{what} ({k}, {n})");
                    }
                    assert_eq!(layout.unpack(packed.view()).unwrap(), codes, "{what}");
                    let short = layout.unpack(packed.slice(s![1.., ..]));
                    assert!(matches!(short, Err(Error::Shape { .. })), "{what}");
                    let strided = packed.t().as_standard_layout().into_owned();
                    if packed.len() > packed.ncols() && packed.ncols() > 1 {
                        let strided = layout.unpack(strided.t());
                        assert!(matches!(strided, Err(Error::NotContiguous { .. })), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn blocks_of_k_are_upstreams() {
    let golden = Golden::load();
    let found = golden.tensor("block_major_k.3x256").elements::<i32>().into_owned();
    let order = RowOrder::new(3, &[]).unwrap();
    let layout = PackedRows::new(Shape::new(256, 3), 8, order, Some(BLOCK_K_BYTES)).unwrap();
    assert_eq!(layout.packed_shape(), [6, 128]);
    for (element, &value) in found.iter().enumerate() {
        let (n, k) = (value as usize / 256, value as usize % 256);
        assert_eq!(layout.offset(k, n).element, element, "k {k} n {n}");
    }
    let order = RowOrder::new(3, &[]).unwrap();
    let cut = PackedRows::new(Shape::new(384, 3), 4, order, Some(BLOCK_K_BYTES));
    assert!(matches!(cut, Err(Error::Size { .. })), "192 bytes are no whole blocks");
    let order = RowOrder::new(3, &[]).unwrap();
    let huge = PackedRows::new(Shape::new(usize::MAX - 7, 3), 4, order, None);
    assert!(matches!(huge, Err(Error::Size { .. })));
}

#[test]
fn a_difference_is_found_where_it_is() {
    let order = RowOrder::new(64, &[RowStep::Interleave(1), RowStep::shuffle(128)]).unwrap();
    let layout = PackedRows::new(Shape::new(512, 64), 4, order, Some(BLOCK_K_BYTES)).unwrap();
    let codes = Codes::from_fn(4, layout.shape(), |k, n| (k + n) as u8 & 15).unwrap();
    let expected = into_vec(layout.pack(&codes).unwrap());
    let mut found = expected.clone();
    for (k, n) in [(300, 40), (301, 40), (7, 63)] {
        let slot = layout.offset(k, n);
        found[slot.element] ^= 1 << slot.bit;
    }
    let diff = compare(&layout, 4, 2, &expected, &found);
    let first = diff.first.expect("a difference");
    // The second block of 256 k follows the whole first block.
    assert_eq!((diff.count, first.place.row, first.place.col), (3, 7, 63));
    assert_eq!((first.expected, first.found), (6, 7));
}
