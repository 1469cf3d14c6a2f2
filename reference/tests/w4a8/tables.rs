//! Weights with zero points and with rows in another order (act-order): every kernel, thread count and
//! cut gives the bits that plain loops over the checkpoint's codes give.

use marlinspike::case::ActivationRounding;
use marlinspike::container::{Container, write_container};
use marlinspike::layouts::cpu::CpuTables;
use marlinspike::layouts::kleidi::{Columns, PackedRhs, PackedStack, RhsLayout, operator_scales};
use marlinspike::moe::layer::Routed;
use marlinspike::num::dims::{GroupSize, LogicalK, Shape};
use marlinspike::num::scalar::{ScalarType, bf16_to_f32};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::Rng;
use marlinspike::w4a8::moe::{Layer, MoeLayer, Workspace};
use marlinspike::w4a8::scalar::{Scalar, product};
use marlinspike::w4a8::stored::{self, LinearDescription};
use marlinspike::w4a8::{Linear, LinearWorkspace, Values, kernels, linear, quantize};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use marlinspike::{Error, act_order};

use super::layers::{Batch, Given, Sizes};

const ROUNDING: ActivationRounding = ActivationRounding::HalfAway;
const BOTH: CpuTables = CpuTables { zero_points: true, act_order: true };
const TABLES: [CpuTables; 3] = [
    BOTH,
    CpuTables { zero_points: true, act_order: false },
    CpuTables { zero_points: false, act_order: true },
];

/// A checkpoint's weight with these tables, its scales in the operator's type.
fn weight(shape: Shape, group: GroupSize, tables: CpuTables, rng: &mut Rng) -> Weight<'static> {
    let groups = group.groups(LogicalK(shape.size_k)).unwrap();
    let len = groups * shape.size_n;
    let codes = Codes::from_fn(4, shape, |_, _| rng.below(16) as u8).unwrap();
    let scales = (0..len).map(|_| 0x3b00 + rng.below(0x180) as u16).collect();
    let scales = Table::new(ScalarType::BFLOAT16, groups, shape.size_n, TableData::B16(scales));
    let zeros = tables.zero_points.then(|| {
        let zeros = (0..len).map(|_| rng.below(17) as u8).collect();
        Table::new(ScalarType::UINT4, groups, shape.size_n, TableData::B8(zeros)).unwrap()
    });
    let mut g_idx: Vec<u32> =
        (0..shape.size_k).map(|k| (k * groups / shape.size_k) as u32).collect();
    for k in (1..g_idx.len()).rev() {
        g_idx.swap(k, rng.below(k + 1));
    }
    let bias: Vec<u32> =
        (0..shape.size_n).map(|_| (rng.below(100) as f32 / 64.0).to_bits()).collect();
    let mut weight = Weight {
        name: "w".to_owned(),
        ty: if tables.zero_points { ScalarType::UINT4 } else { ScalarType::UINT4B8 },
        codes,
        scales: scales.unwrap(),
        zeros,
        groups: match tables.act_order {
            true => Groups::Indexed { g_idx, group_size: group },
            false => Groups::Uniform(group),
        },
        global_scale: None,
        bias: Some(Table::new(ScalarType::FLOAT32, 1, shape.size_n, TableData::B32(bias)).unwrap()),
    };
    weight.scales = operator_scales(&weight, false).unwrap();
    weight
}

fn pack(weight: &Weight<'_>, nr: usize, tables: CpuTables) -> PackedRhs<'static> {
    let layout = RhsLayout::new(weight.shape(), weight.groups.group_size(), nr).unwrap();
    layout.with_tables(tables).unwrap().pack_weight(weight).unwrap()
}

/// y in f32 by plain loops from the checkpoint's weight, and in float64 with the size of its terms.
fn expected(
    x: &Values,
    weight: &Weight<'_>,
    rounding: ActivationRounding,
) -> (Vec<f32>, Vec<[f64; 2]>) {
    let Shape { size_k, size_n } = weight.shape();
    let order = match &weight.groups {
        Groups::Indexed { g_idx, .. } => act_order::sort(g_idx).perm,
        Groups::Uniform(_) => (0..size_k as u32).collect(),
    };
    let sorted: Vec<f32> =
        x.to_f32().chunks(size_k).flat_map(|row| act_order::gather(row, &order)).collect();
    let rows = quantize(&Values::from_f32(sorted, x.ty()).unwrap(), size_k, rounding).unwrap();
    // The symmetric weight with the same codes, by the operator's definition.
    let plain = Weight {
        ty: ScalarType::UINT4B8,
        codes: weight.codes.gather_rows(&order).unwrap(),
        zeros: None,
        groups: Groups::Uniform(weight.groups.group_size()),
        ..weight.clone()
    };
    let columns = Columns::from_weight(&plain).unwrap();
    let mut y = product(&rows, &columns, ScalarType::FLOAT32).unwrap().to_f32();
    let groups = weight.scales.rows();
    let length = size_k / groups;
    let mut exact = Vec::new();
    for m in 0..rows.size_m {
        let codes: Vec<i64> = rows.row(m)[..size_k]
            .iter()
            .map(|&q| i64::from(q) + i64::from(rows.negated_zero_points[m]))
            .collect();
        for n in 0..size_n {
            let mut rest = 0.0f32;
            for g in 0..groups {
                let sum: i64 = codes[g * length..][..length].iter().sum();
                let zero = weight.zeros.as_ref().map_or(8, |z| z.bits(g, n) as i32);
                let bits = weight.scales.bits(g, n);
                let scale = match weight.scales.ty() {
                    ScalarType::FLOAT32 => f32::from_bits(bits),
                    _ => bf16_to_f32(bits as u16),
                };
                rest += sum as f32 * ((8 - zero) as f32 * scale);
            }
            if weight.zeros.is_some() {
                let y = &mut y[m * size_n + n];
                *y = (*y + rest * rows.reciprocals[m]).clamp(f32::MIN, f32::MAX);
            }
            let bias = weight.bias.as_ref().unwrap().value(0, n);
            let (mut sum, mut size) = (bias, bias.abs());
            for (k, &code) in codes.iter().enumerate() {
                let row = order[k] as usize;
                let value = code as f64 * f64::from(rows.reciprocals[m]);
                sum += value * weight.dequantize(row, n);
                // The two parts of a weight are added apart.
                size += value.abs() * 24.0 * weight.scales.value(weight.groups.group_of(row), n);
            }
            exact.push([sum, size * (groups as f64 + 6.0) * f64::from(f32::EPSILON)]);
        }
    }
    (y, exact)
}

fn activations(size_m: usize, size_k: usize, ty: ScalarType, rng: &mut Rng) -> Values {
    let x = (0..size_m * size_k).map(|_| (rng.below(4001) as f32 - 1800.0) / 512.0).collect();
    Values::from_f32(x, ty).unwrap()
}

#[test]
fn every_kernel_gives_the_bits_of_plain_loops() {
    let mut rng = Rng::new(0x2e);
    let mut workspace = LinearWorkspace::default();
    let pools = [1, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap());
    for round in 0..if cfg!(target_arch = "aarch64") { 12 } else { 36 } {
        let sides = [(96, -1), (96, 32), (256, 128), (192, 64), (320, 32)];
        let (size_k, group) = sides[rng.below(sides.len())];
        let (shape, tables) = (Shape::new(size_k, 1 + rng.below(150)), TABLES[round % 3]);
        let group = GroupSize::from_config(group).unwrap();
        let weight = weight(shape, group, tables, &mut rng);
        let packed = pack(&weight, [4, 8][round / 3 % 2], tables);
        let ty = [ScalarType::FLOAT32, ScalarType::BFLOAT16][rng.below(2)];
        let rounding = [ROUNDING, ActivationRounding::HalfEven][rng.below(2)];
        let size_m = [1, 2, 8, 9, 33][rng.below(5)];
        let x = activations(size_m, size_k, ty, &mut rng);
        let (y, exact) = expected(&x, &weight, rounding);
        for (i, (&y, [exact, bound])) in y.iter().zip(&exact).enumerate() {
            assert!((f64::from(y) - exact).abs() <= *bound, "{i}: {y}, {exact}, {bound}");
        }
        let y = Values::from_f32(y, ty).unwrap().bits();
        assert_eq!(linear(&Scalar, &x, &packed, rounding).unwrap().bits(), y, "{shape} {group}");
        for kernel in kernels() {
            let what =
                format!("{shape} group {group} M {size_m} {ty} {tables:?} {}", kernel.name());
            let layer = Linear::new(packed.clone(), rounding).with_kernel(kernel);
            let mut out = Values::from_f32(vec![f32::NAN; size_m * shape.size_n], ty).unwrap();
            let (x, view) = (x.view(size_k).unwrap(), out.view_mut(shape.size_n).unwrap());
            pools[rng.below(2)].install(|| layer.forward(x, &mut workspace, view)).unwrap();
            assert_eq!(out.bits(), y, "{what}");
        }
    }
}

/// The packed bytes give back the checkpoint's weights, exactly.
#[test]
fn packed_weights_come_back() {
    let mut rng = Rng::new(5);
    for (tables, group) in [(BOTH, 32), (BOTH, -1), (TABLES[1], 64), (TABLES[2], 32)] {
        let group = GroupSize::from_config(group).unwrap();
        let weight = weight(Shape::new(192, 11), group, tables, &mut rng);
        for nr in [4, 8] {
            let floats = pack(&weight, nr, tables).dequantized();
            for (i, &float) in floats.iter().enumerate() {
                assert_eq!(f64::from(float), weight.dequantize(i % 192, i / 192), "{tables:?} {i}");
            }
        }
    }
}

/// Experts, each with an order of its own.
#[test]
fn experts_with_tables() {
    let mut rng = Rng::new(0x31);
    let pools = [1, 2].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap());
    let mut workspace = Workspace::default();
    for round in 0..if cfg!(target_arch = "aarch64") { 6 } else { 18 } {
        let tables = TABLES[round % 3];
        let groups = [GroupSize::Of(32); 2];
        let sizes =
            Sizes { experts: 4, size_h: 192, size_i: 320, groups, nr: [4, 8][round / 3 % 2] };
        let mut given = Given::new(sizes, rng.next_u64());
        given.config.router_weight_on_input = round / 6 % 2 == 1;
        let mut matrices = |shape: Shape| -> Vec<PackedRhs<'static>> {
            let one = |_| pack(&weight(shape, groups[0], tables, &mut rng), sizes.nr, tables);
            (0..sizes.experts).map(one).collect()
        };
        given.w13 = matrices(Shape::new(sizes.size_h, 2 * sizes.size_i));
        given.w2 = matrices(Shape::new(sizes.size_i, sizes.size_h));
        let (tokens, top_k) = ([1, 5, 9, 40][rng.below(4)], 2);
        let ty = [ScalarType::FLOAT32, ScalarType::BFLOAT16][rng.below(2)];
        let any = |rng: &mut Rng, _| rng.below(4) as i32;
        let batch = Batch::new(sizes, ty, tokens, top_k, &mut rng, any);
        let oracle: Layer<'_> = given.oracle();
        let y = oracle.forward(&Scalar, &batch.x, batch.routed()).unwrap().bits();
        for kernel in kernels() {
            let what = format!("{tables:?} {tokens} tokens {ty} {}", kernel.name());
            let layer: MoeLayer<'_> = given.engine().with_kernel(kernel);
            let forward = |workspace: &mut Workspace, tokens: std::ops::Range<usize>| {
                let (h, slots) = (sizes.size_h, tokens.start * top_k..tokens.end * top_k);
                let x = match &batch.x {
                    Values::F32(x) => Values::F32(x[tokens.start * h..tokens.end * h].to_vec()),
                    Values::Bf16(x) => Values::Bf16(x[tokens.start * h..tokens.end * h].to_vec()),
                };
                let mut out = Values::from_f32(vec![f32::NAN; tokens.len() * h], ty).unwrap();
                let (ids, weights) = (&batch.topk_ids[slots.clone()], &batch.topk_weights[slots]);
                let routed = Routed::from_rows(top_k, ids, weights).unwrap();
                let (x, view) = (x.view(h).unwrap(), out.view_mut(h).unwrap());
                layer.forward_routed(x, routed, workspace, view).unwrap();
                out.bits()
            };
            let whole = pools[rng.below(2)].install(|| forward(&mut workspace, 0..tokens));
            assert_eq!(whole, y, "{what}");
            let cut = rng.below(tokens + 1);
            let parts = [forward(&mut workspace, 0..cut), forward(&mut workspace, cut..tokens)];
            assert_eq!(parts.concat(), y, "{what}, cut at {cut}");
        }
    }
}

/// Damage of either table changes the result: the tests above would notice.
#[test]
fn tables_matter() {
    let mut rng = Rng::new(8);
    let shape = Shape::new(128, 16);
    let packed = pack(&weight(shape, GroupSize::Of(32), BOTH, &mut rng), 8, BOTH);
    let x = activations(3, 128, ScalarType::FLOAT32, &mut rng);
    let y = linear(&Scalar, &x, &packed, ROUNDING).unwrap();
    let (layout, bytes) = (packed.layout(), packed.bytes());
    let mut zeros = bytes.to_vec();
    zeros[layout.blocks_len()] ^= 1;
    let mut order = bytes.to_vec();
    let at = layout.blocks_len() + layout.zero_points_len();
    // The first two rows exchanged.
    let (first, second) = order[at..].split_at_mut(4);
    first.swap_with_slice(&mut second[..4]);
    for damaged in [zeros, order] {
        let damaged = PackedRhs::new(layout, damaged).unwrap();
        assert_ne!(linear(&Scalar, &x, &damaged, ROUNDING).unwrap(), y);
    }
}

#[test]
fn wrong_tables_are_refused() {
    let mut rng = Rng::new(9);
    let group = GroupSize::Of(32);
    let good = weight(Shape::new(64, 8), group, BOTH, &mut rng);
    let layout = RhsLayout::new(good.shape(), group, 8).unwrap().with_tables(BOTH).unwrap();
    let packed = layout.pack_weight(&good).unwrap();
    let order = layout.blocks_len() + layout.zero_points_len();
    for (row, part) in [(64u32, "order of rows"), (u32::MAX, "order of rows")] {
        let mut bytes = packed.bytes().to_vec();
        bytes[order + 8..][..4].copy_from_slice(&row.to_le_bytes());
        let error = PackedStack::new("w13_packed", layout, bytes.clone()).unwrap_err();
        assert!(matches!(error, Error::Value { ref index, .. } if index == &[2]), "{error}");
        assert!(error.to_string().contains(part) && error.to_string().contains("w13_packed"));
        assert!(matches!(PackedRhs::new(layout, bytes), Err(Error::Value { .. })));
    }
    let mut twice = packed.bytes().to_vec();
    twice.copy_within(order..order + 4, order + 4);
    assert!(matches!(PackedRhs::new(layout, twice), Err(Error::Value { .. })));
    // Groups of different sizes; a zero point out of range; a table that the weight lacks.
    let mut uneven = good.clone();
    let Groups::Indexed { g_idx, .. } = &mut uneven.groups else { panic!("no order") };
    let at = g_idx.iter().position(|&g| g == 1).unwrap();
    g_idx[at] = 0;
    let error = layout.pack_weight(&uneven).unwrap_err().to_string();
    assert!(error.contains("w: g_idx") && error.contains("32 rows in each group"), "{error}");
    let mut far = good.clone();
    far.zeros = Some(Table::new(ScalarType::UINT4, 2, 8, TableData::B8(vec![17; 16])).unwrap());
    let error = layout.pack_weight(&far).unwrap_err().to_string();
    assert!(error.contains("zero points") && error.contains("at most 16"), "{error}");
    let symmetric = weight(Shape::new(64, 8), group, TABLES[2], &mut rng);
    assert!(matches!(layout.pack_weight(&symmetric), Err(Error::Unsupported { .. })));
    let plain = RhsLayout::new(good.shape(), group, 8).unwrap();
    assert!(matches!(plain.pack_weight(&good), Err(Error::Unsupported { .. })));
    // Padding of K would enter the sums of a group.
    let tail = RhsLayout::new(Shape::new(40, 8), GroupSize::Channel, 8).unwrap();
    assert!(matches!(tail.with_tables(BOTH), Err(Error::Size { .. })));
}

#[test]
fn stored_tables() {
    let mut rng = Rng::new(10);
    for tables in TABLES {
        let weight = weight(Shape::new(96, 12), GroupSize::Of(32), tables, &mut rng);
        let packed = pack(&weight, 8, tables);
        let described = LinearDescription::int4(packed.layout(), GroupSize::Of(32));
        let bytes = packed.bytes().to_vec();
        let tensor = Tensor::from_vec("a.rhs_packed", DType::U8, vec![bytes.len()], bytes).unwrap();
        let file = |text: String| {
            let metadata = [(stored::key("a"), text)].into_iter().collect();
            write_container(std::slice::from_ref(&tensor), &metadata, Vec::new()).unwrap()
        };
        let json = described.to_json();
        let bytes = file(json.to_string());
        let parsed = Container::parse(&bytes).unwrap();
        assert_eq!(LinearDescription::read(&parsed, "a").unwrap(), described);
        assert_eq!(stored::linear(&parsed, "a").unwrap(), packed);
        // The keys belong to version 2, which needs both.
        for (version, key) in [(1, "zero_points"), (2, "act_order")] {
            let mut wrong = json.clone();
            wrong["version"] = version.into();
            if version == 2 {
                wrong.as_object_mut().unwrap().remove(key);
            }
            let bytes = file(wrong.to_string());
            let error = stored::linear(&Container::parse(&bytes).unwrap(), "a").unwrap_err();
            assert!(error.to_string().contains(key), "{error}");
        }
    }
}
