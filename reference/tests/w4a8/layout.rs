//! The packed layouts over the lattice of sizes, and quantization of rows whose result is known in
//! advance.

use std::collections::BTreeMap;

use marlinspike::Error;
use marlinspike::case::ActivationRounding::{HalfAway, HalfEven};
use marlinspike::layouts::kleidi::{
    Columns, LhsLayout, LhsPart, MR, NR, PackedLhs, PackedRhs, QuantizedRows, RhsLayout, RhsPart,
    padded_k,
};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::{Values, quantize};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

/// (K, group) of weights around every edge.
const DEPTHS: [(usize, i64); 12] = [
    (1, -1),
    (8, -1),
    (31, -1),
    (32, -1),
    (33, -1),
    (44, -1),
    (96, -1),
    (64, 64),
    (64, 32),
    (96, 32),
    (128, 64),
    (320, 160),
];

fn columns(shape: Shape, group: GroupSize, seed: u64) -> Columns {
    let mut rng = Rng::new(seed);
    let codes: Vec<i8> = (0..shape.len()).map(|_| rng.below(16) as i8 - 8).collect();
    let bias: Vec<f32> = (0..shape.size_n).map(|n| n as f32 + 0.5).collect();
    match group {
        GroupSize::Of(g) if g < shape.size_k => {
            let scales = (0..shape.size_n * shape.size_k / g).map(|i| 0x3c00 + i as u16).collect();
            Columns::group_wise(shape, g, codes, scales, Some(&bias))
        }
        _ => {
            let scales: Vec<f32> = (0..shape.size_n).map(|n| 0.01 + n as f32).collect();
            Columns::channel_wise(shape, codes, &scales, Some(&bias))
        }
    }
    .unwrap()
}

#[test]
fn weights_come_back_and_every_bit_has_its_place() {
    for (size_k, group) in DEPTHS {
        let group = GroupSize::from_config(group).unwrap();
        for (size_n, nr) in [1, 3, 4, 5, 8, 9, 17].into_iter().flat_map(|n| NR.map(|nr| (n, nr))) {
            let shape = Shape::new(size_k, size_n);
            let layout = RhsLayout::new(shape, group, nr).unwrap();
            let given = columns(shape, group, 7 + size_k as u64);
            let packed = layout.pack(&given).unwrap();
            assert_eq!(packed.bytes().len(), layout.packed_len(), "{shape} {group} {nr}");
            assert_eq!(packed.unpack(), given, "{shape} {group} {nr}");
            let again = PackedRhs::new(layout, packed.bytes()).unwrap();
            assert_eq!(again, packed);
            // Every bit belongs to one value, and each value is where its offset says.
            let mut bits = BTreeMap::new();
            for byte in 0..layout.packed_len() {
                for bit in 0..8 {
                    let place = layout.locate(byte, bit);
                    let first = (8 * place.start as u32) + place.bit;
                    let at = 8 * byte as u32 + bit;
                    assert!((first..first + place.bits).contains(&at), "{place}");
                    *bits.entry((first, place.bits)).or_insert(0) += 1;
                    if place.column >= size_n {
                        continue;
                    }
                    let n = place.column;
                    let start = match place.part {
                        RhsPart::Code { k } if k >= size_k => continue,
                        RhsPart::Code { k } => {
                            let slot = layout.offset(k, n);
                            assert_eq!((slot.bit, slot.width), (place.bit, place.bits), "{place}");
                            slot.element
                        }
                        RhsPart::Scale { group } => layout.scale_offset(group, n),
                        RhsPart::Sum => layout.sum_offset(n),
                        RhsPart::Bias => layout.bias_offset(n),
                    };
                    assert_eq!(start, place.start, "{place}");
                }
            }
            assert!(bits.iter().all(|((_, width), count)| width == count), "{shape} {nr}");
        }
    }
}

#[test]
fn activations_come_back_and_every_byte_has_its_place() {
    let mut rng = Rng::new(3);
    for size_k in [1, 8, 31, 32, 33, 72, 96] {
        for (size_m, mr) in [0, 1, 3, 4, 5, 9].into_iter().flat_map(|m| MR.map(|mr| (m, mr))) {
            let given = QuantizedRows {
                size_m,
                size_k,
                codes: (0..size_m * padded_k(size_k)).map(|_| rng.below(256) as u8 as i8).collect(),
                negated_zero_points: (0..size_m).map(|m| m as i32 - 128).collect(),
                reciprocals: (0..size_m).map(|m| m as f32 + 0.25).collect(),
            };
            let layout = LhsLayout::new(size_m, size_k, mr).unwrap();
            let packed = layout.pack(&given).unwrap();
            assert_eq!(packed.unpack(), given, "M {size_m} K {size_k} mr {mr}");
            let mut rest = 0;
            for byte in 0..layout.packed_len() {
                let place = layout.locate(byte);
                if place.row >= size_m {
                    assert_eq!(packed.bytes()[byte], 0, "{place}");
                    rest += 1;
                    continue;
                }
                let start = match place.part {
                    LhsPart::Code { k } => layout.code_offset(place.row, k),
                    LhsPart::ZeroPoint => layout.zero_point_offset(place.row),
                    LhsPart::Reciprocal => layout.reciprocal_offset(place.row),
                };
                assert_eq!(start, place.start, "{place}");
                assert!((start..start + place.bytes).contains(&byte), "{place}");
            }
            assert_eq!(layout.packed_len() - rest, size_m * (padded_k(size_k) + 8));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let channel = GroupSize::Channel;
    let shape = Shape::new(64, 8);
    let size = |e: Error| matches!(e, Error::Size { .. });
    let wrong_shape = |e: Error| matches!(e, Error::Shape { .. });
    assert!(size(LhsLayout::new(4, 64, 2).unwrap_err()));
    assert!(size(LhsLayout::new(4, 0, 4).unwrap_err()));
    assert!(size(LhsLayout::new(usize::MAX / 2, 64, 4).unwrap_err()));
    assert!(size(RhsLayout::new(shape, channel, 16).unwrap_err()));
    assert!(size(RhsLayout::new(Shape::new(0, 8), channel, 8).unwrap_err()));
    assert!(size(RhsLayout::new(Shape::new(usize::MAX, 8), channel, 8).unwrap_err()));
    assert!(size(RhsLayout::new(shape, GroupSize::Of(16), 8).unwrap_err()));
    assert!(size(RhsLayout::new(Shape::new(96, 8), GroupSize::Of(64), 8).unwrap_err()));
    let layout = RhsLayout::new(shape, channel, 8).unwrap();
    assert!(wrong_shape(PackedRhs::new(layout, vec![0; 3]).unwrap_err()));
    assert!(wrong_shape(PackedLhs::new(LhsLayout::new(1, 64, 1).unwrap(), vec![0]).unwrap_err()));
    let grouped = columns(shape, GroupSize::Of(32), 1);
    assert!(size(layout.pack(&grouped).unwrap_err()));
    assert!(wrong_shape(layout.pack(&columns(Shape::new(32, 8), channel, 1)).unwrap_err()));
    let too_large = Columns::channel_wise(Shape::new(2, 1), vec![0, 8], &[1.0], None).unwrap_err();
    let Error::Value { index, found, .. } = &too_large else { panic!("{too_large}") };
    assert_eq!((index.as_slice(), found.as_str()), (&[0, 1][..], "8"));
    let few = Columns::channel_wise(Shape::new(2, 2), vec![0; 4], &[1.0], None).unwrap_err();
    assert!(wrong_shape(few));
    let bias = Columns::channel_wise(Shape::new(2, 1), vec![0; 2], &[1.0], Some(&[])).unwrap_err();
    assert!(wrong_shape(bias));
    assert!(wrong_shape(quantize(&Values::F32(vec![0.0; 7]), 2, HalfAway).unwrap_err()));
    let other = Values::from_f32(vec![0.0], ScalarType::FLOAT16).unwrap_err();
    assert!(matches!(other, Error::Unsupported { .. }));
}

/// A `Weight` gives the same columns as its parts.
#[test]
fn a_weight_becomes_columns() {
    let shape = Shape::new(64, 3);
    let code = |k: usize, n: usize| ((7 * k + 5 * n) % 16) as u8;
    let scales: Vec<u16> = (0..6).map(|i| 0x3c00 + i).collect();
    let weight = |ty, scales: Table, group| Weight {
        name: "w".to_owned(),
        ty,
        codes: Codes::from_fn(4, shape, code).unwrap(),
        scales,
        zeros: None,
        groups: Groups::Uniform(group),
        global_scale: None,
        bias: None,
    };
    let u4b8 = ScalarType::UINT4B8;
    let bf16 = Table::new(ScalarType::BFLOAT16, 2, 3, TableData::B16(scales.clone())).unwrap();
    let codes: Vec<i8> = (0..3).flat_map(|n| (0..64).map(move |k| code(k, n) as i8 - 8)).collect();
    let by_column = [0, 3, 1, 4, 2, 5].map(|i| scales[i]).to_vec();
    let expected = Columns::group_wise(shape, 32, codes.clone(), by_column, None).unwrap();
    let found = Columns::from_weight(&weight(u4b8, bf16.clone(), GroupSize::Of(32))).unwrap();
    assert_eq!(found, expected);
    let values = [0.5f32, 2.0, -3.0];
    let bits = TableData::B32(values.iter().map(|v| v.to_bits()).collect());
    let f32s = Table::new(ScalarType::FLOAT32, 1, 3, bits).unwrap();
    let expected = Columns::channel_wise(shape, codes, &values, None).unwrap();
    for group in [GroupSize::Channel, GroupSize::Of(64)] {
        let found = Columns::from_weight(&weight(u4b8, f32s.clone(), group)).unwrap();
        assert_eq!(found, expected);
    }
    let refused = |w: &Weight<'_>| {
        let refused = Columns::from_weight(w).unwrap_err();
        assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    };
    refused(&weight(ScalarType::UINT4, bf16.clone(), GroupSize::Of(32)));
    let single = Table::new(ScalarType::BFLOAT16, 1, 3, TableData::B16(vec![0x3c00; 3])).unwrap();
    refused(&weight(u4b8, single, GroupSize::Channel));
    let mut ordered = weight(u4b8, bf16, GroupSize::Of(32));
    let g_idx = (0..64).map(|k| k % 2).collect();
    ordered.groups = Groups::Indexed { g_idx, group_size: GroupSize::Of(32) };
    refused(&ordered);
}

fn codes(row: &[f32], rounding: marlinspike::case::ActivationRounding) -> (Vec<i8>, i32, f32) {
    let rows = quantize(&Values::F32(row.to_vec()), row.len(), rounding).unwrap();
    (rows.codes, rows.negated_zero_points[0], rows.reciprocals[0])
}

/// With a range of 255 the scale is 1, and a code is the activation rounded, plus the zero point.
#[test]
fn halves_are_rounded_by_the_rule_and_away_in_the_tail() {
    let mut row = vec![0.0f32; 16];
    row[..8].copy_from_slice(&[-100.0, 155.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]);
    let zero = -28; // −128 + 100
    let all = |rounded: [i32; 8]| rounded.map(|q| (q + zero) as i8).to_vec();
    let (away, z, reciprocal) = codes(&row, HalfAway);
    assert_eq!((z, reciprocal), (28, 1.0));
    assert_eq!(away[..8], all([-100, 155, 1, 2, 3, -1, -2, -3]));
    let (even, ..) = codes(&row, HalfEven);
    assert_eq!(even[..8], all([-100, 155, 0, 2, 2, 0, -2, -2]));
    // Twelve values: the last four, and their padding with the last one, are rounded away.
    row.truncate(12);
    row[8..].copy_from_slice(&[0.5, 2.5, -2.5, 2.5]);
    let (even, ..) = codes(&row, HalfEven);
    assert_eq!(even.len(), 32);
    assert_eq!(even[8..12], [1, 3, -3, 3].map(|q| (q + zero) as i8));
    assert!(even[12..].iter().all(|&q| i32::from(q) == 3 + zero));
}

#[test]
fn rows_without_a_usable_range() {
    // All zero: scale 1, zero point 127 − 0.
    assert_eq!(codes(&[0.0; 32], HalfAway), (vec![127; 32], -127, 1.0));
    assert_eq!(codes(&[-0.0; 32], HalfAway), (vec![127; 32], -127, 1.0));
    // A range beyond f32: scale and reciprocal 0.
    let mut row = [0.0; 32];
    (row[3], row[4]) = (3e38, -3e38);
    assert_eq!(codes(&row, HalfAway), (vec![127; 32], -127, 0.0));
    // A range so small that the scale is infinite: ±∞ saturates int16 and wraps there with the
    // zero point −128, so that the least value becomes the largest code; zeros are NaN, hence 0.
    let mut row = [0.0; 32];
    (row[3], row[4]) = (1e-40, -1e-40);
    let (q, z, reciprocal) = codes(&row, HalfAway);
    assert_eq!((z, reciprocal), (128, 0.0));
    assert_eq!(q[..6], [-128, -128, -128, 127, 127, -128]);
    // A NaN that the range includes, and one in the tail, which it ignores.
    let mut row = [1.0; 36];
    row[35] = f32::NAN;
    let (q, z, reciprocal) = codes(&row, HalfAway);
    assert_eq!((z, reciprocal), (128, 1.0 / 255.0));
    assert_eq!((q[0], q[34], q[35], q[63]), (127, 127, -128, -128));
    row[0] = f32::NAN;
    let (q, z, reciprocal) = codes(&row, HalfAway);
    assert_eq!((q, z), (vec![-128; 64], 128));
    assert!(reciprocal.is_nan());
}

/// Dequantized values are at most half a step off, or a whole step if the range's ends were
/// clamped.
#[test]
fn codes_stand_for_their_activations() {
    let mut rng = Rng::new(11);
    for size_k in [32, 40, 100] {
        for _ in 0..200 {
            let row: Vec<f32> =
                (0..size_k).map(|_| (rng.below(20001) as f32 - 8000.0) / 777.0).collect();
            let (q, z, reciprocal) = codes(&row, HalfEven);
            let step = f64::from(reciprocal);
            for (q, x) in q.iter().zip(&row) {
                let back = f64::from(i32::from(*q) + z) * step;
                assert!((back - f64::from(*x)).abs() <= 1.0001 * step, "{x} became {back}");
            }
        }
    }
}

/// The first value that differs, and layouts that cannot be compared.
#[test]
fn packed_buffers_are_compared_by_value() {
    let layout = |nr| RhsLayout::new(Shape::new(96, 9), GroupSize::Of(32), nr).unwrap();
    let given = columns(Shape::new(96, 9), GroupSize::Of(32), 5);
    let packed = layout(4).pack(&given).unwrap();
    assert_eq!(packed.compare(&packed), Ok(None));
    let slot = layout(4).offset(55, 6);
    let mut bytes = packed.bytes().to_vec();
    bytes[slot.element] ^= 2 << slot.bit;
    let place = packed.compare(&PackedRhs::new(layout(4), bytes).unwrap()).unwrap().unwrap();
    assert_eq!((place.part, place.column, place.bit), (RhsPart::Code { k: 55 }, 6, slot.bit));
    let other = layout(8).pack(&given).unwrap();
    assert!(matches!(packed.compare(&other), Err(Error::Size { .. })));
    let layout = LhsLayout::new(5, 40, 4).unwrap();
    let packed = PackedLhs::new(layout, vec![7; layout.packed_len()]).unwrap();
    let mut bytes = packed.bytes().to_vec();
    bytes[layout.zero_point_offset(4) + 3] = 0;
    let place = packed.compare(&PackedLhs::new(layout, bytes).unwrap()).unwrap().unwrap();
    assert_eq!((place.part, place.row, place.block), (LhsPart::ZeroPoint, 4, 1));
}
