//! int8 quantizers and products: recorded cases of numpy and big integers pass, wrong ones fail, and a
//! method's products equal integers computed here.

use std::path::Path;

use marlinspike::case::{Case, Op};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::formats::int8::static_range;
use marlinspike::method::{Activations, Arithmetic, Product, Scales};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{ScalarType, f32_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::prepare::w4a8_fp8::to_e4m3;
use marlinspike::products::{Int8Epilogue, Int8Product};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

const BF16: ScalarType = ScalarType::BFLOAT16;

/// Calls `each` with every recorded case of `op` from numpy.
pub(crate) fn recorded(op: Op, mut each: impl FnMut(&str, &Case<'_>)) -> usize {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/cases");
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with(&format!("{}-np_", op.name()))
        })
        .collect();
    paths.sort();
    for path in &paths {
        let bytes = std::fs::read(path).unwrap();
        let case = Case::parse(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        each(path.file_stem().unwrap().to_str().unwrap(), &case);
    }
    paths.len()
}

pub(crate) fn only(case: &Case<'_>) -> OutputReport {
    let mut report = check_case(case).expect("inputs that can be used");
    assert_eq!(report.outputs.len(), 1);
    report.outputs.remove(0)
}

/// The case with its output `y` changed.
fn with_y<'c>(case: &Case<'c>, change: impl Fn(usize, u16) -> u16) -> Case<'c> {
    let mut case = case.clone();
    let y = case.output("y").unwrap();
    let (dtype, shape) = (y.dtype(), y.shape().to_vec());
    let bits = y.elements::<u16>().iter().enumerate().map(|(i, &b)| change(i, b)).collect();
    case.add_output("y", Tensor::from_vec("out.y", dtype, shape, bits).unwrap());
    case
}

#[test]
fn recorded_cases_pass() {
    let pass = |path: &str, case: &Case<'_>| {
        let report = check_case(case).expect("inputs that can be used");
        assert_eq!(report.verdict, Verdict::Pass, "{path}: {report:?}");
    };
    assert_eq!(recorded(Op::StaticInt8Quant, pass), 4);
    assert_eq!(recorded(Op::DynamicInt8Quant, pass), 4);
    let mut notes = Vec::new();
    let count = recorded(Op::Int8Mm, |path, case| {
        let report = only(case);
        assert_eq!(report.verdict, Verdict::Pass, "{path}: {report:?}");
        notes.push(report.note.unwrap_or_default());
    });
    assert_eq!(count, 7);
    // Those that declare no epilogue are exact results, here with the bits of CUTLASS's.
    assert_eq!(notes.iter().filter(|n| n.ends_with("epilogue cutlass")).count(), 2, "{notes:?}");
    assert_eq!(notes.iter().filter(|n| n.contains("declared epilogue")).count(), 5, "{notes:?}");
}

/// A result on the other side of a tie than CUTLASS's is within the bound; one further away is not.
#[test]
fn the_bound_admits_the_other_order_of_scales_alone() {
    let (m, shape) = (96, Shape::new(64, 96));
    let mut rng = Rng::new(11);
    let weight = int8_weight(5, shape);
    let a: Vec<i8> = (0..m * shape.size_k).map(|_| rng.next_u32() as i8).collect();
    let a_scales: Vec<f32> =
        (0..m).map(|_| f32::from_bits(0x3c00_0000 | rng.next_u32() >> 9)).collect();
    let dtype = ScalarType::FLOAT16;
    let product =
        Int8Product { a: &a, a_scales: &a_scales, weight: &weight, router_weights: None, dtype };
    let sums = product.sums().unwrap();
    let own = product.outputs(&sums, Int8Epilogue::Cutlass);
    let mut open = 0;
    for (i, bound) in product.bounds(&sums).iter().enumerate() {
        let (row, n) = (i / shape.size_n, i % shape.size_n);
        let scale = weight.scales.value(0, n) as f32;
        // Both scales first.
        let y = dtype.encode_rne((sums[i] as f32 * (scale * a_scales[row])).into());
        for bits in [own[i], y] {
            assert!(bound.ratio(dtype.to_f64(bits)) <= 1.0, "{i}");
        }
        // Two results are possible only next to a tie.
        assert!(bound.ratio(bound.lo) <= 1.0 && bound.ratio(bound.hi) <= 1.0, "{i}");
        open += usize::from(bound.lo != bound.hi);
        let beyond = dtype.to_f64(own[i] + 2);
        assert!(bound.ratio(beyond) > 1.0, "{i}: {bound:?}");
    }
    assert!(open > 0 && open < own.len() / 50, "{open}");
}

#[test]
fn damaged_outputs_fail() {
    recorded(Op::Int8Mm, |path, case| {
        let ulp = with_y(case, |i, bits| if i == 5 { bits ^ 2 } else { bits });
        let report = only(&ulp);
        assert_eq!(report.verdict, Verdict::Fail, "{path}: two units in the last place");
        let place = report.first_mismatch.expect("a place");
        assert!(format!("{place:?}").contains('5'), "{path}: {place:?}");
        let zeros = only(&with_y(case, |_, _| 0));
        assert_eq!(zeros.verdict, Verdict::Fail, "{path}: zeros");
    });
}

/// The kernel without a declared epilogue: known mistakes fail and have a name.
#[test]
fn mistakes_are_named_under_the_bound() {
    let mut named = 0;
    recorded(Op::Int8Mm, |path, case| {
        for id in marlinspike::check::mistakes(Op::Int8Mm) {
            let Some(wrong) = marlinspike::check::mistaken(case, id).unwrap() else { continue };
            let report = only(&wrong);
            assert_eq!(report.verdict, Verdict::Fail, "{path}: {id}");
            named += usize::from(report.diagnosis.is_some_and(|d| d.id == id));
        }
    });
    assert!(named >= 40, "{named}");
}

#[test]
fn an_azp_adj_of_another_weight_is_refused() {
    let mut tried = 0;
    recorded(Op::Int8Mm, |path, case| {
        let Some(adj) = case.inputs.get("azp_adj") else { return };
        let mut values = adj.elements::<i32>().to_vec();
        values[3] += 1;
        let shape = adj.shape().to_vec();
        let mut wrong = case.clone();
        let tensor = Tensor::from_vec("in.azp_adj", DType::I32, shape, values.clone()).unwrap();
        wrong.add_input("azp_adj", tensor);
        let error = wrong.validate().expect_err("another azp_adj").to_string();
        for part in ["in.azp_adj", "[3]", &values[3].to_string(), "the weight's row"] {
            assert!(error.contains(part), "{path}: {error}");
        }
        tried += 1;
    });
    assert_eq!(tried, 4);
}

#[test]
fn shards_with_static_zero_points_share_the_smallest_range() {
    // Ranges [-1.28, 1.27] and [0, 2.55]: together 3.83 / 255.
    let (scale, zero) = static_range("qkv", &[0.01, 0.01], &[0, -128]).unwrap();
    assert!((scale - 3.83 / 255.0).abs() < 1e-6, "{scale}");
    assert_eq!(zero, (-128.0 + 1.28 / scale) as i32);
    assert!(static_range("qkv", &[], &[]).is_err());
    assert!(static_range("qkv", &[0.0], &[3]).unwrap_err().to_string().contains("qkv"));
}

fn int8_weight(seed: u64, shape: Shape) -> Weight<'static> {
    let mut rng = Rng::new(seed);
    let scales = (0..shape.size_n).map(|_| 0x3a80_0000 + (rng.next_u32() >> 10)).collect();
    Weight {
        name: "w".to_owned(),
        ty: ScalarType::INT8,
        codes: Codes::from_fn(8, shape, |_, _| rng.next_u32() as u8).unwrap(),
        scales: Table::new(ScalarType::FLOAT32, 1, shape.size_n, TableData::B32(scales)).unwrap(),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Channel),
        global_scale: None,
        bias: None,
    }
}

/// Both algorithms equal i128 sums and IEEE operations, for zero points of any size.
#[test]
fn integer_products_are_exact_modulo_two_to_the_32() {
    let (shape, m) = (Shape::new(64, 24), 6);
    let weight = int8_weight(3, shape);
    let mut rng = Rng::new(9);
    let codes: Vec<u32> = (0..m * shape.size_k).map(|_| rng.next_u32() & 0xff).collect();
    let scales: Vec<f32> = (0..m).map(|i| 0.001 * (i + 1) as f32).collect();
    let zeros = vec![0, -128, 77, i32::MIN, i32::MAX, 123_456_789];
    let rows = Activations {
        ty: ScalarType::INT8,
        size_k: shape.size_k,
        codes: codes.clone(),
        scales: Scales::Row(scales.clone()),
        zeros: Some(zeros.clone()),
        globals: None,
    };
    let experts = vec![Some(0); m];
    let product = Product {
        rows: &rows,
        expert_of: &experts,
        weights: std::slice::from_ref(&weight),
        halves: None,
        router_weights: None,
        dtype: BF16,
    };
    let found = product.compute(Arithmetic::Cutlass).unwrap().into_bits();
    assert_eq!(product.define(Arithmetic::Cutlass).unwrap().into_bits(), found);
    let bounds = product.bounds(Arithmetic::Cutlass).unwrap();
    for (i, &bits) in found.iter().enumerate() {
        let (row, n) = (i / shape.size_n, i % shape.size_n);
        let sum: i128 = (0..shape.size_k)
            .map(|k| {
                let a = i128::from(codes[row * shape.size_k + k] as u8 as i8);
                (a - i128::from(zeros[row])) * i128::from(weight.codes.get(k, n) as i8)
            })
            .sum();
        let low = (sum & 0xffff_ffff) as u32 as i32;
        let scaled = low as f32 * weight.scales.value(0, n) as f32;
        assert_eq!(bits, f32_to_bf16_rne(scaled * scales[row]), "{row} {n}");
        assert!(bounds[i].ratio(BF16.to_f64(bits.into())) <= 1.0);
        // A sum with a wrong bit that bf16 shows is outside its bound.
        let off =
            f32_to_bf16_rne((low as f32 * 1.02) * weight.scales.value(0, n) as f32 * scales[row]);
        assert!(low == 0 || bounds[i].ratio(BF16.to_f64(off.into())) > 1.0, "{row} {n}");
    }
    let refused = product.compute(Arithmetic::Canonical).unwrap_err().to_string();
    assert!(refused.contains("exact and cutlass"), "{refused}");
}

/// int4 with e4m3 activations: every code is a group's scale, rounded to e4m3 in two steps, times the
/// int4 code, rounded to e4m3.
#[test]
fn int4_groups_become_e4m3() {
    let shape = Shape::new(256, 16);
    let mut rng = Rng::new(4);
    let bits: Vec<u16> = (0..2 * 16).map(|_| 0x3b00 + (rng.next_u32() >> 23) as u16).collect();
    let weight = Weight {
        name: "w".to_owned(),
        ty: ScalarType::UINT4B8,
        codes: Codes::from_fn(4, shape, |_, _| rng.next_u32() as u8 & 15).unwrap(),
        scales: Table::new(BF16, 2, 16, TableData::B16(bits)).unwrap(),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(128)),
        global_scale: None,
        bias: None,
    };
    let made = to_e4m3(&weight).unwrap();
    assert_eq!((made.ty, made.scales.rows()), (ScalarType::FLOAT8_E4M3FN, 1));
    let e4m3 = ScalarType::FLOAT8_E4M3FN;
    let nearest = |x: f64| e4m3.to_f64(e4m3.encode_rne_saturating(x));
    for n in 0..16 {
        let own = [0, 1].map(|g| weight.scales.value(g, n) as f32);
        let of_column = own[0].max(own[1]) / 448.0;
        assert_eq!(made.scales.value(0, n), f64::from(of_column * 8.0));
        for k in 0..256 {
            let scale = nearest(nearest(f64::from(own[k / 128] / of_column)) / 8.0);
            let q = f64::from(weight.codes.get(k, n)) - 8.0;
            let code = made.codes.get(k, n);
            assert_eq!(e4m3.to_f64(code.into()), nearest(q * scale), "{k} {n}");
        }
    }
    let wide = Weight { ty: ScalarType::UINT4, ..weight };
    assert!(to_e4m3(&wide).is_err());
}
