//! int4 weights in groups times int8 and e4m3 rows: exact products, rounded once.

use marlinspike::method::{Arithmetic, Product, Quantizer};
use marlinspike::num::array::FloatView2;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::quantize::Int8Quantizer;
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

const F16: ScalarType = ScalarType::FLOAT16;
const BF16: ScalarType = ScalarType::BFLOAT16;

/// f16 scales from 2^-6 to 2^-4.
fn weight(shape: Shape, group: usize) -> Weight<'static> {
    let mut rng = Rng::new(21);
    let groups = shape.size_k / group;
    let scales = (0..groups * shape.size_n).map(|_| 0x2400 + (rng.next_u32() >> 21) as u16);
    let scales = TableData::B16(scales.collect());
    Weight {
        name: "w".to_owned(),
        ty: ScalarType::UINT4B8,
        codes: Codes::from_fn(4, shape, |_, _| rng.next_u32() as u8 & 15).unwrap(),
        scales: Table::new(F16, groups, shape.size_n, scales).unwrap(),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(group)),
        global_scale: None,
        bias: None,
    }
}

/// `value` · 2^-`point` rounded to the 8 bits of a normal bf16, halves to even.
fn to_bf16(value: i128, point: i32) -> u16 {
    let size = 128 - value.unsigned_abs().leading_zeros() as i32;
    if value == 0 {
        return 0;
    }
    let (magnitude, drop) = (value.unsigned_abs(), size - 8);
    assert!(drop > 0, "more bits than bf16 has");
    let (whole, rest, half) = (magnitude >> drop, magnitude & ((1 << drop) - 1), 1 << (drop - 1));
    let up = rest > half || rest == half && whole & 1 == 1;
    // A carry into the next power of two is a carry into the exponent.
    let exponent = (127 + 7 + drop - point) as u128;
    let bits = (exponent << 7) + (whole + u128::from(up)) - 0x80;
    u16::from(value < 0) << 15 | bits as u16
}

/// A float as an integer times 2^-`point`.
fn fixed(value: f64, point: i32) -> i128 {
    let scaled = value * 2f64.powi(point);
    assert!(scaled.fract() == 0.0 && scaled.abs() < 2f64.powi(53), "{value}");
    scaled as i128
}

#[test]
fn exact_products_equal_big_integers() {
    let (m, shape) = (3, Shape::new(256, 16));
    let mut rng = Rng::new(22);
    let x: Vec<u16> = (0..m * shape.size_k)
        .map(|_| (rng.next_u32() >> 16) as u16 & 0x8000 | (0x3e00 + (rng.next_u32() >> 24) as u16))
        .collect();
    for group in [128, 32] {
        let weight = weight(shape, group);
        for quantizer in [Quantizer::Int8(Int8Quantizer::Token), Quantizer::Fp8Token] {
            let experts = vec![Some(0); m];
            let view = FloatView2::from_rows("x", BF16, shape.size_k, &x).unwrap();
            let rows = quantizer.quantize(view, &experts).unwrap();
            let product = Product {
                rows: &rows,
                expert_of: &experts,
                weights: std::slice::from_ref(&weight),
                halves: None,
                router_weights: None,
                dtype: BF16,
            };
            let found = product.compute(Arithmetic::Exact).unwrap().into_bits();
            assert_eq!(product.define(Arithmetic::Exact).unwrap().into_bits(), found);
            let mut moved = 0;
            for (i, &bits) in found.iter().enumerate() {
                let (row, n) = (i / shape.size_n, i % shape.size_n);
                let term = |k: usize, from: usize| -> i128 {
                    // Codes are multiples of 2^-9, scales of 2^-24.
                    let a = fixed(rows.ty.to_f64(rows.row(row)[k]), 9);
                    let q = i128::from(weight.codes.get(k, n)) - 8;
                    a * q * fixed(weight.scales.value(from, n), 24)
                };
                let scale = fixed(f64::from(rows.scale(row, 0)), 60);
                let sum: i128 = (0..shape.size_k).map(|k| term(k, k / group)).sum();
                assert_eq!(bits, to_bf16(sum * scale, 93), "{quantizer:?} {group} {row} {n}");
                // The first group's scale for all gives other bits.
                let wrong: i128 = (0..shape.size_k).map(|k| term(k, 0)).sum();
                moved += usize::from(bits != to_bf16(wrong * scale, 93));
            }
            assert!(moved > found.len() / 2, "{moved} of {}", found.len());
        }
    }
}
