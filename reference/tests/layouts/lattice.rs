//! Every layout over the whole lattice: each element has one place, each bit one element, and
//! unpacking inverts packing.

use super::bijection::is_a_bijection;
use marlinspike::act_order;
use marlinspike::case::{CaseConfig, LinearConfig, Op};
use marlinspike::layouts::Layout;
use marlinspike::layouts::marlin::{
    Activations, InputDtype, Options, ScaleLayout, ScalePermutation, WeightLayout, ZeroPointLayout,
    e4m3_scales, e4m3_scales_inverse, prepare,
};
use marlinspike::num::array::into_vec;
use marlinspike::num::dims::{GroupSize, LogicalK, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::{Rng, lattice, weight};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use ndarray::Axis;

const SIZES_N: [usize; 5] = [64, 128, 192, 320, 448];
const ACTIVATIONS: [Activations; 2] = [Activations::Bits16, Activations::Bits8];

fn random_codes(rng: &mut Rng, bits: u32, shape: Shape) -> Codes<'static> {
    let words: Vec<u32> = (0..shape.len() * bits as usize / 32).map(|_| rng.next_u32()).collect();
    Codes::from_words(bits, shape, words).unwrap()
}

fn random_perm(rng: &mut Rng, rows: usize) -> Vec<u32> {
    let mut perm: Vec<u32> = (0..rows as u32).collect();
    rng.shuffle(&mut perm);
    perm
}

#[test]
fn weights_fill_every_bit_once() {
    let mut rng = Rng::new(1);
    for activations in ACTIVATIONS {
        for bits in [4, 8] {
            for size_k in [32, 64, 128, 160] {
                for size_n in SIZES_N {
                    let shape = Shape::new(size_k, size_n);
                    let what = format!("{bits} bits {activations:?} {shape}");
                    let layout = WeightLayout::new(shape, bits, activations).unwrap();
                    is_a_bijection(&layout, size_k, size_n, 32, &what);
                    let codes = random_codes(&mut rng, bits, shape);
                    let packed = layout.pack(&codes, None).unwrap();
                    let slot = layout.offset(size_k - 1, 5);
                    let field = packed.as_slice().unwrap()[slot.element] >> slot.bit
                        & (u32::MAX >> (32 - bits));
                    assert_eq!(field, u32::from(codes.get(size_k - 1, 5)), "{what}");
                    assert_eq!(layout.unpack(packed.view(), None).unwrap(), codes, "{what}");
                    let perm = random_perm(&mut rng, size_k);
                    let ordered = layout.pack(&codes, Some(&perm)).unwrap();
                    let gathered = codes.gather_rows(&perm).unwrap();
                    assert_eq!(ordered, layout.pack(&gathered, None).unwrap(), "{what}");
                    assert_eq!(
                        layout.unpack(ordered.view(), Some(&perm)).unwrap(),
                        codes,
                        "{what}"
                    );
                }
            }
        }
    }
}

/// The rows of a tile that a lane holds follow the B fragment of mma.m16n8k16 and m16n8k32 in
/// PTX: group id lane / 4 is the column, and register r holds k from its half of the rows.
#[test]
fn fragments_are_the_instructions() {
    for activations in ACTIVATIONS {
        for bits in [4, 8] {
            let layout = WeightLayout::new(Shape::new(64, 192), bits, activations).unwrap();
            let (tile_k, tile_n) = (layout.tile_map().tile_k(), layout.tile_map().tile_n());
            let per_register = if activations == Activations::Bits16 { 2 } else { 4 };
            for k in 0..64 {
                for n in 0..192 {
                    let slot = layout.offset(k, n);
                    let f = layout.locate(slot.element, slot.bit).fragment.unwrap();
                    assert_eq!((f.tile_k, f.tile_n), (k / tile_k, n / tile_n));
                    assert_eq!(f.lane as usize / 4, n % 8);
                    assert_eq!(f.mma_n as usize, n % tile_n / 8);
                    assert_eq!(f.register as usize, k % tile_k / (tile_k / 2));
                    let in_half = k % (tile_k / 2);
                    assert_eq!(f.lane as usize % 4, in_half / per_register);
                    assert_eq!(f.part as usize, in_half % per_register);
                }
            }
        }
    }
}

#[test]
fn scales_and_zero_points_fill_every_element_once() {
    let mut rng = Rng::new(2);
    for size_n in SIZES_N {
        for groups in [1, 2, 5] {
            for order in [ScalePermutation::Grouped, ScalePermutation::Single] {
                let plain = ScaleLayout::new(groups, size_n, order, ScalarType::BFLOAT16).unwrap();
                is_a_bijection(&plain, groups, size_n, 16, &format!("{plain:?}"));
                let values = (0..groups * size_n).map(|_| rng.next_u32() as u16).collect();
                let table =
                    Table::new(ScalarType::BFLOAT16, groups, size_n, TableData::B16(values));
                let table = table.unwrap();
                let packed = plain.pack(&table).unwrap();
                let slot = plain.offset(groups - 1, 37);
                assert_eq!(packed.iter_bits().nth(slot.element), Some(table.bits(groups - 1, 37)));
                assert_eq!(plain.unpack(&packed).unwrap(), table);
                let quads = plain.with_quads();
                is_a_bijection(&quads, groups, size_n, 8, &format!("{quads:?}"));
                let bytes = (0..groups * size_n).map(|_| rng.next_u32() as u8).collect();
                let ty = ScalarType::FLOAT8_E8M0FNU;
                let bytes = Table::new(ty, groups, size_n, TableData::B8(bytes)).unwrap();
                assert_eq!(quads.unpack(&quads.pack(&bytes).unwrap()).unwrap(), bytes);
            }
            for bits in [4, 8] {
                for activations in ACTIVATIONS {
                    let layout = ZeroPointLayout::new(groups, size_n, bits, activations).unwrap();
                    is_a_bijection(&layout, groups, size_n, 32, &format!("{layout:?}"));
                    let ty = if bits == 4 { ScalarType::UINT4 } else { ScalarType::UINT8 };
                    let codes = (0..groups * size_n)
                        .map(|_| rng.next_u32() as u8 & (0xff >> (8 - bits)))
                        .collect();
                    let zeros = Table::new(ty, groups, size_n, TableData::B8(codes)).unwrap();
                    let packed = layout.pack(&zeros).unwrap();
                    assert_eq!(layout.unpack(packed.view(), ty).unwrap(), zeros);
                }
            }
        }
    }
}

/// NVFP4's block scales lose no value that the kernel can represent: 2^-6 and above.
#[test]
fn nvfp4_scales_come_back() {
    let ty = ScalarType::FLOAT8_E4M3FN;
    for size_n in SIZES_N {
        // 0x08 is 2^-6, the smallest normal number.
        let bytes = (0..2 * size_n).map(|i| (8 + i % (0x7f - 8)) as u8).collect();
        let scales = Table::new(ty, 2, size_n, TableData::B8(bytes)).unwrap();
        for order in [ScalePermutation::Grouped, ScalePermutation::Single] {
            let layout = ScaleLayout::new(2, size_n, order, ty).unwrap();
            let packed = e4m3_scales(&scales, layout, 1.0).unwrap();
            assert_eq!(e4m3_scales_inverse(&packed, layout, 1.0).unwrap(), scales);
        }
    }
}

/// The configurations of `vectors`, thinned, as weights.
fn weights(step: usize) -> impl Iterator<Item = (LinearConfig, Weight<'static>)> {
    let mut rng = Rng::new(3);
    let all = lattice(Op::Linear).unwrap().into_iter().step_by(step);
    all.filter_map(move |config| {
        let CaseConfig::Linear(c) = config else { return None };
        let whole = match c.quant.tensor_parallel {
            Some(tp) if !c.quant.is_k_full => c.size_k * tp.size,
            _ => c.size_k,
        };
        let shape = Shape::new(c.size_k, c.size_n);
        let weight = weight(&mut rng, "weight", &c.quant, shape, whole).unwrap();
        Some((c, weight))
    })
}

/// The kernel's inputs hold the whole weight for every format: each part unpacks to its source.
#[test]
fn prepared_weights_unpack() {
    let mut seen = 0;
    for (c, w) in weights(7) {
        let q = &c.quant;
        let input_dtype = InputDtype::from_config(q.input_dtype).unwrap();
        let options = Options { input_dtype, ..Options::new(q.dtype) };
        let p = prepare(std::slice::from_ref(&w), options).unwrap();
        let perm = p.sorted.as_ref().map(|s| s[0].perm.as_slice());
        let codes = p.weight_layout.unpack(p.qweight.index_axis(Axis(0), 0), perm).unwrap();
        let rewritten = input_dtype == InputDtype::Fp8 && w.ty != ScalarType::FLOAT4_E2M1F;
        for k in (0..c.size_k).step_by(5) {
            for n in 0..c.size_n {
                let code = w.codes.get(k, n);
                // int4 under fp8 activations: sign and distance from the zero point.
                let expected = match &w.zeros {
                    _ if !rewritten => code,
                    zeros => {
                        let zero = zeros.as_ref().map_or(8, |z| z.bits(w.groups.group_of(k), n));
                        let above = i32::from(code) - zero as i32;
                        if above >= 0 { above as u8 } else { 15 - code }
                    }
                };
                assert_eq!(codes.get(k, n), expected, "{c:?} ({k}, {n})");
            }
        }
        if let Some(sorted) = &p.sorted {
            let Groups::Indexed { g_idx, .. } = &w.groups else { panic!("{c:?}") };
            act_order::expect_sorting(g_idx, &sorted[0].perm).unwrap();
            assert!(sorted[0].g_idx.is_sorted());
            assert_eq!(p.groups(), w.scales.rows(), "all scales of the whole matrix");
        }
        if let Some((layout, words)) = &p.zeros {
            assert_eq!(
                Some(layout.unpack(words.index_axis(Axis(0), 0), w.ty).unwrap()),
                w.zeros,
                "{c:?}"
            );
        }
        if let (Some(packed), Some(bias)) = (&p.bias, &w.bias) {
            let layout = ScaleLayout::bias(c.size_n, q.dtype).unwrap();
            assert_eq!(layout.unpack(packed).unwrap(), *bias, "{c:?}");
        }
        // Scales that are only permuted are restored unchanged.
        let moved = q.input_dtype.is_none() && w.scales.ty() == q.dtype;
        if moved && w.ty != ScalarType::FLOAT8_E4M3FN {
            assert_eq!(p.scale_layout.unpack(&p.scales).unwrap(), w.scales, "{c:?}");
        }
        seen += 1;
    }
    assert!(seen > 500, "{seen}");
}

/// K split among ranks with act-order: each rank packs its rows of the whole matrix with the groups
/// of the whole matrix, and holds every scale.
#[test]
fn row_parallel_ranks_hold_their_rows_and_all_scales() {
    let mut rng = Rng::new(4);
    for (ranks, size_n, group) in [(2, 64, 32), (2, 192, 128), (4, 128, 64)] {
        let size_k = 512;
        let shape = Shape::new(size_k, size_n);
        let codes = random_codes(&mut rng, 4, shape);
        let groups = size_k / group;
        let mut g_idx: Vec<u32> = (0..size_k).map(|k| (k / group) as u32).collect();
        rng.shuffle(&mut g_idx);
        let values = (0..groups * size_n).map(|i| 0x2000 + i as u16 % 0x1000).collect();
        let scales =
            Table::new(ScalarType::FLOAT16, groups, size_n, TableData::B16(values)).unwrap();
        let whole = Weight {
            name: "whole".into(),
            ty: ScalarType::UINT4B8,
            codes,
            scales,
            zeros: None,
            groups: Groups::Indexed { g_idx: g_idx.clone(), group_size: GroupSize::Of(group) },
            global_scale: None,
            bias: None,
        };
        for rank in 0..ranks {
            let rows = act_order::k_slice(size_k, ranks, rank).unwrap();
            let part = Shape::new(rows.len(), size_n);
            let slice = Codes::from_fn(4, part, |k, n| whole.codes.get(rows.start + k, n)).unwrap();
            let local = Weight {
                codes: slice,
                groups: Groups::Indexed {
                    g_idx: g_idx[rows.clone()].to_vec(),
                    group_size: GroupSize::Of(group),
                },
                ..whole.clone()
            };
            let p = prepare(&[local], Options::new(ScalarType::FLOAT16)).unwrap();
            assert_eq!(p.groups(), groups);
            assert_eq!(p.scale_layout.unpack(&p.scales).unwrap(), whole.scales);
            let sorted = &p.sorted.as_ref().unwrap()[0];
            let back = p.weight_layout.unpack(p.qweight.index_axis(Axis(0), 0), None).unwrap();
            for (k, (&row, &g)) in sorted.perm.iter().zip(&sorted.g_idx).enumerate() {
                let source = rows.start + row as usize;
                assert_eq!(g, g_idx[source], "rank {rank} sorted row {k}");
                for n in 0..size_n {
                    assert_eq!(
                        back.get(k, n),
                        whole.codes.get(source, n),
                        "rank {rank} ({k}, {n})"
                    );
                }
            }
        }
    }
}

/// Without act-order, a rank's packed weight is a range of the whole weight's tile rows.
#[test]
fn row_parallel_slices_are_tile_rows() {
    let mut rng = Rng::new(5);
    for activations in ACTIVATIONS {
        for bits in [4, 8] {
            let shape = Shape::new(256, 192);
            let codes = random_codes(&mut rng, bits, shape);
            let packed = WeightLayout::new(shape, bits, activations).unwrap();
            let packed = into_vec(packed.pack(&codes, None).unwrap());
            for rank in 0..4 {
                let rows = act_order::k_slice(256, 4, rank).unwrap();
                let part = Shape::new(64, 192);
                let layout = WeightLayout::new(part, bits, activations).unwrap();
                let slice =
                    Codes::from_fn(bits, part, |k, n| codes.get(rows.start + k, n)).unwrap();
                let words = packed.len() / 4;
                let found = into_vec(layout.pack(&slice, None).unwrap());
                assert_eq!(found, packed[rank * words..][..words]);
            }
        }
    }
}

/// A column-parallel rank has the tile columns of the whole packed weight, and its columns of the
/// scales, zero points and bias.
#[test]
fn column_parallel_slices_are_tile_columns() {
    let mut rng = Rng::new(6);
    for activations in ACTIVATIONS {
        for bits in [4, 8] {
            let shape = Shape::new(128, 384);
            let codes = random_codes(&mut rng, bits, shape);
            let layout = WeightLayout::new(shape, bits, activations).unwrap();
            let packed = into_vec(layout.pack(&codes, None).unwrap());
            let row_words = 384 / layout.tile_map().tile_n() * layout.tile_map().words();
            for (rank, n0) in [0, 192].into_iter().enumerate() {
                let part = Shape::new(128, 192);
                let slice = Codes::from_fn(bits, part, |k, n| codes.get(k, n0 + n)).unwrap();
                let found = WeightLayout::new(part, bits, activations).unwrap();
                let found = into_vec(found.pack(&slice, None).unwrap());
                let expected: Vec<u32> = packed
                    .chunks_exact(row_words)
                    .flat_map(|row| row[rank * row_words / 2..][..row_words / 2].to_vec())
                    .collect();
                assert_eq!(found, expected, "{bits} bits {activations:?} rank {rank}");
            }
        }
    }
    for order in [ScalePermutation::Grouped, ScalePermutation::Single] {
        let ty = ScalarType::FLOAT16;
        let table = Table::new(ty, 3, 384, TableData::B16((0..3 * 384).collect())).unwrap();
        let whole = ScaleLayout::new(3, 384, order, ty).unwrap().pack(&table).unwrap();
        for n in [0..192, 192..384] {
            let part = ScaleLayout::new(3, 192, order, ty).unwrap();
            let part = part.pack(&table.slice_columns(n.clone()).unwrap()).unwrap();
            assert_eq!(part, whole.slice_columns(n).unwrap());
        }
    }
}

/// The order of scales depends on the matrix's K: K = group is "single", K = 2 groups is not.
#[test]
fn group_equal_to_k_is_single() {
    let choose = |group, k, act| ScalePermutation::choose(group, LogicalK(k), act);
    for g in [32, 64, 128] {
        let group = GroupSize::Of(g);
        assert_eq!(choose(group, g, Activations::Bits16), ScalePermutation::Single);
        assert_eq!(choose(group, 2 * g, Activations::Bits16), ScalePermutation::Grouped);
        assert_eq!(choose(group, 2 * g, Activations::Bits8), ScalePermutation::Single);
    }
    assert_eq!(choose(GroupSize::Channel, 4096, Activations::Bits16), ScalePermutation::Single);
}

/// A table of another shape is refused, and the error states both shapes.
#[test]
fn scales_of_another_shape_are_refused() {
    let layout = ScaleLayout::new(2, 128, ScalePermutation::Grouped, ScalarType::BFLOAT16).unwrap();
    for (groups, size_n) in [(1, 128), (3, 128), (2, 64), (2, 192)] {
        let values = TableData::B16(vec![0; groups * size_n]);
        let table = Table::new(ScalarType::BFLOAT16, groups, size_n, values).unwrap();
        for refused in [layout.pack(&table), layout.unpack(&table)] {
            let text = refused.unwrap_err().to_string();
            let found = format!("[{groups}, {size_n}]");
            assert!(text.contains(&found) && text.contains("[2, 128]"), "{text}");
        }
    }
}

/// As many words as the packed weight has, in another shape.
#[test]
fn packed_weights_of_another_shape_are_refused() {
    let layout = WeightLayout::new(Shape::new(128, 64), 4, Activations::Bits16).unwrap();
    for (rows, columns) in [(16, 64), (4, 256), (128, 8), (1, 1024)] {
        let packed = ndarray::Array2::<u32>::zeros((rows, columns));
        let text = layout.unpack(packed.view(), None).unwrap_err().to_string();
        assert!(
            text.contains(&format!("[{rows}, {columns}]")) && text.contains("[8, 128]"),
            "{text}"
        );
    }
    assert!(layout.unpack(ndarray::Array2::zeros((8, 128)).view(), None).is_ok());
}

#[test]
fn columns_beyond_a_table_are_refused() {
    let values = TableData::B16(vec![1, 2, 3, 4, 5, 6]);
    let table = Table::new(ScalarType::BFLOAT16, 2, 3, values).unwrap();
    let cut = |range| table.slice_columns(range);
    assert!(matches!(cut(1..3).unwrap().data(), TableData::B16(v) if v[..] == [2, 3, 5, 6]));
    assert_eq!(cut(3..3).unwrap().cols(), 0);
    #[allow(clippy::reversed_empty_ranges)]
    for range in [2..4, 2..1, 4..4] {
        let text = cut(range.clone()).unwrap_err().to_string();
        assert!(text.contains(&format!("{range:?}")) && text.contains('3'), "{text}");
    }
}
