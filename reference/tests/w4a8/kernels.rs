//! One suite for every kernel that this CPU supports, around the edges of every block, compared
//! with products computed here from the formulas over exact integers.

use marlinspike::layouts::kleidi::{
    Columns, LhsLayout, MR, NR, PackedLhs, QuantizedRows, RhsLayout, padded_k,
};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{ScalarType, bf16_to_f32, f32_to_bf16_rne};
use marlinspike::vectors::Rng;
use marlinspike::w4a8::{MAX_ROWS, PanelRows, Run, kernels, multiply, scalar};
use marlinspike::{Error, num::dims::LogicalK};

/// A weight and the parts that it was built from.
struct Given {
    shape: Shape,
    group: GroupSize,
    codes: Vec<i8>,
    scales: Vec<f32>,
    bias: Vec<f32>,
    columns: Columns,
}

impl Given {
    fn new(shape: Shape, group: GroupSize, mut code: impl FnMut() -> i8, rng: &mut Rng) -> Self {
        let codes: Vec<i8> = (0..shape.len()).map(|_| code()).collect();
        let groups = group.groups(LogicalK(shape.size_k)).unwrap();
        let bits: Vec<u16> = (0..shape.size_n * groups)
            .map(|_| f32_to_bf16_rne((rng.below(2000) as f32 - 900.0) / 4096.0))
            .collect();
        let scales: Vec<f32> = bits.iter().map(|&b| bf16_to_f32(b)).collect();
        let bias: Vec<f32> = (0..shape.size_n).map(|_| rng.below(999) as f32 / 37.0).collect();
        let columns = match group {
            GroupSize::Channel => Columns::channel_wise(shape, codes.clone(), &scales, Some(&bias)),
            GroupSize::Of(g) => Columns::group_wise(shape, g, codes.clone(), bits, Some(&bias)),
        };
        Self { shape, group, codes, scales, bias, columns: columns.unwrap() }
    }

    /// y of one row and column by the formulas, with integer sums in i64.
    fn y(&self, rows: &QuantizedRows, m: usize, n: usize) -> f32 {
        let k = self.shape.size_k;
        let (q, w) = (rows.row(m), &self.codes[n * k..][..k]);
        let (z, r) = (rows.negated_zero_points[m], rows.reciprocals[m]);
        let dot = |from: usize, to: usize| {
            (from..to).map(|k| i64::from(q[k]) * i64::from(w[k])).sum::<i64>()
        };
        let total = match self.group {
            GroupSize::Channel => {
                let sum: i64 = w.iter().map(|&w| i64::from(w)).sum();
                let acc = 16 * dot(0, k) + i64::from(z) * 16 * sum;
                acc as f32 * (self.scales[n] / 16.0 * r)
            }
            GroupSize::Of(g) => {
                let scale = |at: usize| self.scales[n * (k / g) + at / g];
                let mut a = 0f32;
                for from in (0..k).step_by(g) {
                    a = (dot(from, from + g) as f32).mul_add(scale(from), a);
                }
                let mut sum = 0f32;
                for chunk in (0..k).step_by(32) {
                    for s in [0, 8] {
                        let at = chunk + s;
                        let part: i64 =
                            (0..8).map(|j| i64::from(w[at + j]) + i64::from(w[at + 16 + j])).sum();
                        sum += part as f32 * scale(chunk);
                    }
                }
                sum.mul_add(z as f32, a) * r
            }
        };
        (total + self.bias[n]).clamp(f32::MIN, f32::MAX)
    }
}

fn rows(
    size_m: usize,
    size_k: usize,
    mut code: impl FnMut() -> i8,
    rng: &mut Rng,
) -> QuantizedRows {
    QuantizedRows {
        size_m,
        size_k,
        codes: (0..size_m * padded_k(size_k)).map(|_| code()).collect(),
        negated_zero_points: (0..size_m).map(|_| rng.below(256) as i32 - 127).collect(),
        reciprocals: (0..size_m).map(|_| (1 + rng.below(500)) as f32 / 7919.0).collect(),
    }
}

/// y's bits by every kernel and block size, through panels of each number of rows in turn.
fn panels(given: &Given, rows: &QuantizedRows) -> Vec<(String, Vec<u32>)> {
    let size_n = given.shape.size_n;
    let mut all = Vec::new();
    for nr in NR {
        let layout = RhsLayout::new(given.shape, given.group, nr).unwrap();
        let rhs = layout.pack(&given.columns).unwrap();
        let run = Run { layout, bytes: rhs.bytes(), columns: size_n };
        for kernel in kernels() {
            // Bytes between the rows must not change.
            let stride = size_n + 3;
            let mut y = vec![f32::NAN; rows.size_m * stride];
            let (mut first, mut count) = (0, 1);
            while first < rows.size_m {
                count = count.min(rows.size_m - first);
                let panel = PanelRows::from_rows(rows, first, count, layout);
                kernel.run(panel.panel(), run, &mut y[first * stride..], stride);
                (first, count) = (first + count, count % MAX_ROWS + 1);
            }
            assert!(y.chunks(stride).all(|row| row[size_n..].iter().all(|x| x.is_nan())));
            let bits = y.chunks(stride).flat_map(|row| &row[..size_n]).map(|y| y.to_bits());
            all.push((format!("panels nr {nr} {}", kernel.name()), bits.collect()));
        }
    }
    all
}

/// y's bits by every kernel and block size, through pairs of panels.
fn pairs(given: &Given, rows: &QuantizedRows) -> Vec<(String, Vec<u32>)> {
    let (size_n, size_m) = (given.shape.size_n, rows.size_m);
    let mut all = Vec::new();
    for nr in NR {
        let layout = RhsLayout::new(given.shape, given.group, nr).unwrap();
        let rhs = layout.pack(&given.columns).unwrap();
        let run = Run { layout, bytes: rhs.bytes(), columns: size_n };
        for kernel in kernels() {
            // Bytes between the rows must not change.
            let stride = size_n + 3;
            let mut y = vec![f32::NAN; size_m * stride];
            for first in (0..size_m).step_by(2 * MAX_ROWS) {
                let count = (size_m - first).min(2 * MAX_ROWS);
                let half = MAX_ROWS.min(count - 1);
                let panel = |first, count| PanelRows::from_rows(rows, first, count, layout);
                let (a, b) = (panel(first, half), panel(first + half, count - half));
                let y = &mut y[first * stride..];
                kernel.run_pair([a.panel(), b.panel()], run, y, stride);
            }
            assert!(y.chunks(stride).all(|row| row[size_n..].iter().all(|x| x.is_nan())));
            let bits = y.chunks(stride).flat_map(|row| &row[..size_n]).map(|y| y.to_bits());
            all.push((format!("pairs nr {nr} {}", kernel.name()), bits.collect()));
        }
    }
    all
}

/// Pairs of panels, whole and partial, with K larger than a kernel's step.
#[test]
fn every_kernel_on_pairs_of_panels() {
    let mut rng = Rng::new(3);
    for (size_k, group) in [
        (33, -1),
        (2048, -1),
        (4130, -1),
        (64, 32),
        (2112, 32),
        (2240, 64),
        (2880, 96),
        (4608, 256),
        (1152, 288),
    ] {
        for (size_m, size_n) in [(16, 9), (20, 12)] {
            let group = GroupSize::from_config(group).unwrap();
            let mut codes = Rng::new(rng.next_u64());
            let shape = Shape::new(size_k, size_n);
            let given = Given::new(shape, group, || codes.below(16) as i8 - 8, &mut rng);
            let rows = rows(size_m, size_k, || codes.below(256) as u8 as i8, &mut rng);
            let expected: Vec<u32> = (0..size_m * size_n)
                .map(|i| given.y(&rows, i / size_n, i % size_n).to_bits())
                .collect();
            for (name, found) in pairs(&given, &rows) {
                assert_eq!(found, expected, "M {size_m}, {shape}, group {group} {name}");
            }
        }
    }
}

/// Every kernel, block size and type compared with the formulas.
fn expect_products(given: &Given, rows: &QuantizedRows, what: &str) {
    let (size_m, size_n) = (rows.size_m, given.shape.size_n);
    let expected: Vec<f32> =
        (0..size_m * size_n).map(|i| given.y(rows, i / size_n, i % size_n)).collect();
    let bits: Vec<u32> = expected.iter().map(|y| y.to_bits()).collect();
    let narrow: Vec<u32> = expected.iter().map(|&y| f32_to_bf16_rne(y).into()).collect();
    let unpacked = scalar::product(rows, &given.columns, ScalarType::FLOAT32).unwrap();
    assert_eq!(unpacked.bits(), bits, "{what} unpacked");
    for (name, found) in panels(given, rows) {
        assert_eq!(found, bits, "{what} {name}");
    }
    if size_m > 1 {
        for (name, found) in pairs(given, rows) {
            assert_eq!(found, bits, "{what} {name}");
        }
    }
    for mr in MR {
        let lhs = LhsLayout::new(size_m, rows.size_k, mr).unwrap().pack(rows).unwrap();
        for nr in NR {
            let layout = RhsLayout::new(given.shape, given.group, nr).unwrap();
            let rhs = layout.pack(&given.columns).unwrap();
            for kernel in kernels() {
                for (ty, expected) in
                    [(ScalarType::FLOAT32, &bits), (ScalarType::BFLOAT16, &narrow)]
                {
                    let found = multiply(kernel.as_ref(), &lhs, &rhs, ty).unwrap();
                    let name = kernel.name();
                    assert_eq!(found.bits(), *expected, "{what} mr {mr} nr {nr} {ty} {name}");
                }
            }
        }
    }
}

#[test]
fn every_kernel_around_every_block_edge() {
    let mut rng = Rng::new(0x5eed);
    for size_m in [1, 2, 3, 4, 5, 8, 9, 36] {
        for size_n in [1, 3, 4, 5, 7, 8, 9, 16, 17] {
            let channel = [1, 7, 8, 16, 31, 32, 33, 63, 64, 96, 130].map(|k| (k, -1));
            let grouped = [(64, 32), (96, 32), (128, 64), (448, 224), (512, 256)];
            let (i, j) = (rng.below(channel.len()), rng.below(grouped.len()));
            // Two sizes of K in each iteration; the whole loop covers all edges.
            for (size_k, group) in [channel[i], channel[(i + 5) % channel.len()], grouped[j]] {
                let shape = Shape::new(size_k, size_n);
                let group = GroupSize::from_config(group).unwrap();
                let mut codes = Rng::new(rng.next_u64());
                let given = Given::new(shape, group, || codes.below(16) as i8 - 8, &mut rng);
                let rows = rows(size_m, size_k, || codes.below(256) as u8 as i8, &mut rng);
                expect_products(&given, &rows, &format!("M {size_m}, {shape}, group {group}"));
            }
        }
    }
}

/// The largest sums, at which 16-bit parts would overflow or saturate.
#[test]
fn every_kernel_at_the_extremes() {
    let mut rng = Rng::new(1);
    for (q, w) in [(-128, -8), (-128, 7), (127, -8), (127, 7)] {
        for (size_k, group) in [(1024, -1), (1024, 512), (1024, 256), (1024, 32)] {
            let group = GroupSize::from_config(group).unwrap();
            let given = Given::new(Shape::new(size_k, 9), group, || w, &mut rng);
            let rows = rows(16, size_k, || q, &mut rng);
            expect_products(&given, &rows, &format!("q {q}, w {w}, K {size_k}, group {group}"));
        }
    }
}

/// Groups whose sums of 16·q·w would exceed 32 bits.
#[test]
fn every_kernel_with_the_largest_groups() {
    let (mut rng, size_k) = (Rng::new(2), 1 << 18);
    let group = GroupSize::from_config(1 << 17).unwrap();
    let given = Given::new(Shape::new(size_k, 1), group, || -8, &mut rng);
    let rows = rows(3, size_k, || -128, &mut rng);
    let expected: Vec<u32> = (0..3).map(|m| given.y(&rows, m, 0).to_bits()).collect();
    for (name, found) in panels(&given, &rows) {
        assert_eq!(found, expected, "{name}");
    }
}

/// Overflow to infinity becomes the largest finite number; NaN stays.
#[test]
fn results_are_limited_to_finite_numbers() {
    let shape = Shape::new(32, 4);
    let scales = [f32::MAX, f32::MAX, 1.0, 1.0];
    let bias = [0.0, 0.0, f32::INFINITY, f32::NAN];
    let columns = Columns::channel_wise(shape, vec![7; 128], &scales, Some(&bias)).unwrap();
    let rhs = RhsLayout::new(shape, GroupSize::Channel, 4).unwrap().pack(&columns).unwrap();
    let rows = QuantizedRows {
        size_m: 2,
        size_k: 32,
        codes: [[100; 32], [-100; 32]].concat(),
        negated_zero_points: vec![0, 0],
        reciprocals: vec![1.0, 1.0],
    };
    let lhs = LhsLayout::new(2, 32, 4).unwrap().pack(&rows).unwrap();
    for kernel in kernels() {
        let y = multiply(kernel.as_ref(), &lhs, &rhs, ScalarType::FLOAT32).unwrap().to_f32();
        assert_eq!(y[..3], [f32::MAX; 3], "{}", kernel.name());
        assert_eq!(y[4..7], [f32::MIN, f32::MIN, f32::MAX], "{}", kernel.name());
        assert!(y[3].is_nan() && y[7].is_nan(), "{}", kernel.name());
        let y = multiply(kernel.as_ref(), &lhs, &rhs, ScalarType::BFLOAT16).unwrap();
        // FLT_MAX rounds up to bf16's infinity.
        assert_eq!(y.bits()[..3], [0x7f80; 3], "{}", kernel.name());
    }
}

#[test]
fn sides_that_do_not_fit_are_refused() {
    let columns = Columns::channel_wise(Shape::new(64, 4), vec![0; 256], &[1.0; 4], None).unwrap();
    let layout = RhsLayout::new(columns.shape(), GroupSize::Channel, 4).unwrap();
    let rhs = layout.pack(&columns).unwrap();
    let layout = LhsLayout::new(1, 32, 1).unwrap();
    let lhs = PackedLhs::new(layout, vec![0; layout.packed_len()]).unwrap();
    let kernel = marlinspike::w4a8::fastest();
    let refused = multiply(kernel.as_ref(), &lhs, &rhs, ScalarType::FLOAT32).unwrap_err();
    assert!(matches!(refused, Error::Shape { .. }), "{refused}");
    let layout = LhsLayout::new(1, 64, 1).unwrap();
    let lhs = PackedLhs::new(layout, vec![0; layout.packed_len()]).unwrap();
    let refused = multiply(kernel.as_ref(), &lhs, &rhs, ScalarType::FLOAT16).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
}
