//! The list of every value of a packed tensor, for viewers: matrices that fill no block, and several experts.

use std::collections::HashSet;

use marlinspike::Error;
use marlinspike::layouts::ALL;
use marlinspike::layouts::positions::{MAX_VALUES, Part, Positions, Request, positions};

fn request(layout: &str, sizes: [usize; 3], group_size: i64) -> Request {
    let mut request = Request::default();
    request.layout = layout.to_owned();
    [request.size_k, request.size_n, request.experts] = sizes;
    request.group_size = group_size;
    request
}

/// Every bit of the tensor belongs to one value, and every element of the matrix has one value.
fn expect_complete(name: &str, request: &Request, all: &Positions) {
    let len: usize = all.packed_shape.iter().product();
    let mut bits = vec![false; request.experts * len * all.element_bits as usize];
    let mut seen = HashSet::new();
    for v in &all.values {
        let start = v.element * all.element_bits as usize + v.bit as usize;
        for bit in &mut bits[start..start + v.width as usize] {
            assert!(!std::mem::replace(bit, true), "{name}: {v:?} overlaps");
        }
        // The values of an expert lie in its part of the tensor.
        assert_eq!(v.element / len, v.expert, "{name}: {v:?}");
        if v.part == Part::Padding {
            continue;
        }
        let rows = if matches!(v.part, Part::Sum | Part::Bias) { 1 } else { all.shape[0] };
        assert!(v.row < rows && v.col < all.shape[1], "{name}: {v:?} of {:?}", all.shape);
        assert!(seen.insert((v.part as u8, v.expert, v.row, v.col)), "{name}: {v:?} twice");
    }
    assert!(bits.into_iter().all(|bit| bit), "{name}: bits without a value");
    for part in [Part::Code, Part::Sum, Part::Bias, Part::ZeroPoint, Part::Scale] {
        let of_part = || all.values.iter().filter(|v| v.part == part);
        let rows: HashSet<usize> = of_part().map(|v| v.row).collect();
        let each = request.experts * rows.len() * all.shape[1];
        assert_eq!(of_part().count(), each, "{name}: {part:?}");
        assert!(rows.iter().all(|row| *row < rows.len()), "{name}: {part:?}");
    }
    let codes = all.values.iter().filter(|v| v.part == Part::Code).count();
    assert!([0, request.experts * all.shape[0] * all.shape[1]].contains(&codes), "{name}");
}

#[test]
fn matrices_that_fill_no_block() {
    let mut taken = HashSet::new();
    for named in ALL.iter().copied().flatten() {
        for (size_k, size_n) in [(256, 128), (128, 64), (64, 13), (96, 100), (40, 3), (33, 17)] {
            for group_size in [-1, 32] {
                for experts in [1, 3] {
                    let sizes = [size_k, size_n, experts];
                    let request = request(named.name, sizes, group_size);
                    let Ok(all) = positions(&request) else { continue };
                    expect_complete(named.name, &request, &all);
                    if size_n % 16 != 0 {
                        taken.insert(named.name);
                    }
                }
            }
        }
    }
    for name in ["kleidi_rhs", "kleidi_lhs", "block_scales_128x4"] {
        assert!(taken.contains(name), "{name} takes any N");
    }
}

#[test]
fn limits_of_the_number_of_values() {
    let of = |sizes| positions(&request("kleidi_lhs", sizes, -1));
    assert!(of([MAX_VALUES / 64, 32, 2]).is_ok());
    for sizes in [[MAX_VALUES / 64, 32, 3], [0, 32, 1], [32, 0, 1], [32, 32, 0]] {
        assert!(matches!(of(sizes), Err(Error::Size { .. })), "{sizes:?}");
    }
}

/// Each list of Marlin's scales says what upstream's steps do to a table, on scales that are all different in a run.
#[test]
fn scales_of_bytes_are_where_the_packing_puts_them() {
    use marlinspike::layouts::marlin::{Activations, ScaleLayout, ScalePermutation, e8m0_scales};
    use marlinspike::num::dims::{GroupSize, LogicalK};
    use marlinspike::num::scalar::ScalarType;
    use marlinspike::weight::{Table, TableData};

    let (groups, size_n, ty) = (4, 128, ScalarType::FLOAT8_E8M0FNU);
    let bytes: Vec<u8> = (0..groups * size_n).map(|i| (i % 199) as u8).collect();
    let scales = Table::new(ty, groups, size_n, TableData::B8(bytes.clone())).unwrap();
    for (bits, activations) in [(16, Activations::Bits16), (8, Activations::Bits8)] {
        for group_size in [32, -1] {
            let mut request = request("marlin_scales_8bit", [128, size_n, 1], group_size);
            request.activation_bits = bits;
            let all = positions(&request).unwrap();
            let size = GroupSize::from_config(group_size).unwrap();
            let order = ScalePermutation::choose(size, LogicalK(128), activations);
            let rows = all.shape[0];
            let layout = ScaleLayout::new(rows, size_n, order, ty).unwrap();
            let eight = activations == Activations::Bits8;
            let packed = e8m0_scales(
                &scales.slice_rows(0..rows).unwrap(),
                ScalarType::BFLOAT16,
                layout,
                eight,
            )
            .unwrap();
            for v in &all.values {
                let found = packed.bits(v.element / size_n, v.element % size_n);
                let byte = u32::from(bytes[v.row * size_n + v.col]);
                assert_eq!(found, byte + if eight { 6 } else { 0 }, "{bits} bits, {v:?}");
            }
        }
    }
    // Derived by hand from upstream's `marlin_permute_scales` with the single permutation: element 46.
    let mut request = request("marlin_scales_8bit", [128, 128, 1], 32);
    request.activation_bits = 8;
    let v = positions(&request).unwrap().values[46];
    assert_eq!((v.row, v.col), (0, 58));
}
