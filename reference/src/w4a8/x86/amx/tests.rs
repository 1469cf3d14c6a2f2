//! The kernel on an emulated unit, compared with the definition; and the CPU's unit, where there is one,
//! compared with the emulated one.

use super::plan::{Batch, LONGEST_GROUP};
use super::unit::{Amx, Operands, Tiles, Unit};
use super::{Avx512Vnni, Kernel, Tiled};
use crate::layouts::kleidi::{QuantizedRows, RhsLayout};
use crate::num::dims::{GroupSize, Shape};
use crate::vectors::Rng;
use crate::w4a8::scalar::Scalar;
use crate::w4a8::x86::tests::product;
use crate::w4a8::{Panel, PanelRows};

/// A unit in plain loops.
#[derive(Debug, Clone, Copy)]
struct Emulated;

impl Unit for Emulated {
    fn new() -> Option<Self> {
        Some(Self)
    }

    fn configure(self, _: usize, _: usize) -> Tiles {
        Tiles { unit: None }
    }

    unsafe fn multiply<const N: usize, const ADD: bool>(self, of: Operands<N>, sums: *mut i32) {
        let [height, step] = of.tile;
        for (t, rows) in of.rows.into_iter().enumerate() {
            for m in 0..height {
                for n in 0..16 {
                    let to = sums.wrapping_add(256 * t + 16 * m + n);
                    // SAFETY: guaranteed by the caller.
                    unsafe {
                        let mut sum = if ADD { *to } else { 0 };
                        for k in 0..of.steps * step {
                            let q = *rows.add(m * of.stride + k) as i8;
                            let w = *of.weights.add(k / 4 * 64 + 4 * n + k % 4) as i8;
                            sum = sum.wrapping_add(i32::from(q) * i32::from(w));
                        }
                        *to = sum;
                    }
                }
            }
        }
    }
}

/// The kernel for any number of rows, if the CPU has its vector instructions.
fn tiled<U: Unit>() -> Option<Tiled<U>> {
    Some(Tiled { unit: U::new()?, vectors: Avx512Vnni::new()?, min_rows: [1; 2] })
}

const SHAPES: [(usize, i64); 13] = [
    (64, 32),
    (96, 32),
    (1088, 32),
    (2112, 32),
    (2240, 64),
    (2880, 96),
    (4608, 256),
    (4096, LONGEST_GROUP as i64),
    (33, -1),
    (64, -1),
    (160, -1),
    (4130, -1),
    (6144, -1),
];

fn expect_all<U: Unit>(emulated: bool) {
    let Some(kernel) = tiled::<U>() else { return };
    let mut rng = Rng::new(9);
    for (size_k, group) in SHAPES {
        for size_m in [1, 2, 8, 9, 15, 16, 17, 33, 50, 70, 128, 131] {
            let size_n = [1, 7, 8, 9, 16, 17, 40][rng.below(7)];
            if emulated && size_m * size_k * size_n > 1 << 23 {
                continue;
            }
            let group = GroupSize::from_config(group).expect("a group size");
            let sizes = [size_m, size_k, size_n];
            let expected = product(Box::new(Scalar), sizes, group);
            let found = product(Box::new(kernel), sizes, group);
            let differ = expected.iter().zip(&found).filter(|(a, b)| a != b).count();
            assert_eq!(differ, 0, "M, K, N {sizes:?}, group {group}: results that differ");
        }
    }
}

#[test]
fn an_emulated_unit_computes_the_bits_of_the_definition() {
    expect_all::<Emulated>(true);
}

#[test]
fn the_cpus_unit_computes_the_bits_of_the_definition() {
    expect_all::<Amx>(false);
}

/// Every shape of a tile and number of steps, at the extremes of int8 and of the sums.
#[test]
fn the_cpus_unit_is_the_emulated_one() {
    let Some(unit) = Amx::new() else { return };
    let mut rng = Rng::new(5);
    for round in 0..200 {
        let (height, step) = (1 + rng.below(16), [32, 64][round % 2]);
        let (steps, stride) = (1 + rng.below(5), 320 + 64 * rng.below(40));
        let extreme = round % 5 == 0;
        let mut bytes = |len: usize| -> Vec<u8> {
            (0..len).map(|_| if extreme { 0x80 } else { rng.below(256) as u8 }).collect()
        };
        let (rows, weights) = (bytes(4 * 16 * stride), bytes(16 * 64 * 5));
        let start: Vec<i32> = (0..4 * 256).map(|i| i32::MAX - i).collect();
        let first = |t: usize| rows[16 * t * stride..].as_ptr();
        macro_rules! operands {
            ($n:literal) => {
                Operands::<$n> {
                    rows: std::array::from_fn(first),
                    stride,
                    weights: weights.as_ptr(),
                    tile: [height, step],
                    steps,
                }
            };
        }
        let _tiles = unit.configure(height, step);
        for add in [false, true] {
            let (mut found, mut expected) = (start.clone(), start.clone());
            let (a, b) = (found.as_mut_ptr(), expected.as_mut_ptr());
            macro_rules! both {
                ($n:literal, $add:literal) => {
                    // SAFETY: rows, weights and sums are in range, and the tiles are configured.
                    unsafe {
                        unit.multiply::<$n, $add>(operands!($n), a);
                        Emulated.multiply::<$n, $add>(operands!($n), b);
                    }
                };
            }
            match (round % 3, add) {
                (0, false) => both!(1, false),
                (0, true) => both!(1, true),
                (1, false) => both!(2, false),
                (1, true) => both!(2, true),
                (_, false) => both!(4, false),
                (_, true) => both!(4, true),
            }
            assert!(
                found == expected,
                "round {round}: {height} rows, {steps} steps of {step}, add {add}"
            );
        }
    }
}

/// Rows are one batch only if their lines follow one another.
#[test]
fn separate_panels_are_no_batch() {
    let layout = RhsLayout::new(Shape::new(64, 8), GroupSize::Channel, 8).expect("a layout");
    let rows = QuantizedRows {
        size_m: 4,
        size_k: 64,
        codes: vec![1; 256],
        negated_zero_points: vec![0; 4],
        reciprocals: vec![1.0; 4],
    };
    let [a, b] = [0, 2].map(|first| PanelRows::from_rows(&rows, first, 2, layout));
    let bare: Panel<'_> = Panel::new(&[0; 64], &[0], &[1.0], &[0]);
    assert_eq!(Batch::new(&[a.panel()]).map(|batch| batch.rows), Some(2));
    assert!(Batch::new(&[a.panel(), a.panel()]).is_none());
    assert!(
        Batch::new(&[b.panel(), a.panel()]).is_none()
            || Batch::new(&[a.panel(), b.panel()]).is_none()
    );
    assert!(Batch::new(&[bare]).is_none());
    assert!(Batch::new(&[]).is_none());
}
