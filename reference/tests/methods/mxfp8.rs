//! W8A8-MXFP8: a case's `y` is `cutlass_scaled_mm` with blocks [1, 32] and UE8M0 scales. Exact results and
//! those of the block-scaled instruction pass; wrong scales fail.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{Verdict, check_case};
use marlinspike::method::{Activations, Arithmetic, Product, Scales};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{ScalarType, f64_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use serde_json::json;

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const BF16: ScalarType = ScalarType::BFLOAT16;
const M: usize = 3;
const N: usize = 24;
const K: usize = 256;

/// Codes without NaN and exponents of scales, `[rows, K]` and `[rows, K / 32]`.
fn operand(rng: &mut Rng, rows: usize) -> (Vec<u8>, Vec<u8>) {
    let code = |c: u8| if c & 0x7f == 0x7f { 0x11 } else { c };
    let codes = (0..rows * K).map(|_| code((rng.next_u32() >> 9) as u8)).collect();
    (codes, (0..rows * K / 32).map(|_| 116 + (rng.next_u32() >> 30) as u8).collect())
}

fn case(a: &(Vec<u8>, Vec<u8>), w: &(Vec<u8>, Vec<u8>), y: &[u16]) -> Case<'static> {
    let config = json!({"dtype": "bfloat16", "size_m": M, "size_n": N, "size_k": K,
        "weight_block_size": [1, 32]});
    let config = CaseConfig::from_json(Op::ScaledMm, config.as_object().unwrap()).unwrap();
    let mut case = Case::new("mxfp8", config, "computed here");
    let tensor = |name: &str, dtype, shape: [usize; 2], bytes: &[u8]| {
        Tensor::new(name, dtype, shape.to_vec(), bytes.to_vec()).unwrap()
    };
    case.add_input("a", tensor("in.a", DType::F8E4M3, [M, K], &a.0));
    case.add_input("a_scales", tensor("in.a_scales", DType::F8E8M0, [M, K / 32], &a.1));
    case.add_input("weight", tensor("in.weight", DType::F8E4M3, [N, K], &w.0));
    case.add_input("weight_scale", tensor("in.weight_scale", DType::F8E8M0, [N, K / 32], &w.1));
    case.add_output("y", Tensor::from_vec("out.y", DType::BF16, vec![M, N], y.to_vec()).unwrap());
    case.validate().unwrap();
    case
}

/// Sums in f64, which is exact here: e4m3 products are multiples of 2^-18 below 2^18, and the exponents of
/// a pair of scales differ by at most 6 from those of another.
fn exact(a: &(Vec<u8>, Vec<u8>), w: &(Vec<u8>, Vec<u8>)) -> Vec<u16> {
    let value = |x: &(Vec<u8>, Vec<u8>), row: usize, k: usize| {
        let exponent = i32::from(x.1[(row * K + k) / 32]) - 127;
        E4M3.to_f64(x.0[row * K + k].into()) * 2f64.powi(exponent)
    };
    let one = |i: usize| {
        let products = (0..K).map(|k| value(a, i / N, k) * value(w, i % N, k));
        f64_to_bf16_rne(products.sum())
    };
    (0..M * N).map(one).collect()
}

fn by_instruction(a: &(Vec<u8>, Vec<u8>), w: &(Vec<u8>, Vec<u8>)) -> Vec<u16> {
    let scales: Vec<u8> = (0..K / 32 * N).map(|i| w.1[i % N * (K / 32) + i / N]).collect();
    let weight = Weight {
        name: "w".to_owned(),
        ty: E4M3,
        codes: Codes::from_fn(8, Shape::new(K, N), |k, n| w.0[n * K + k]).unwrap(),
        scales: Table::new(ScalarType::FLOAT8_E8M0FNU, K / 32, N, TableData::B8(scales)).unwrap(),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(32)),
        global_scale: None,
        bias: None,
    };
    let values = a.1.iter().map(|&e| 2f32.powi(i32::from(e) - 127)).collect();
    let rows = Activations {
        ty: E4M3,
        size_k: K,
        codes: a.0.iter().map(|&c| c.into()).collect(),
        scales: Scales::Group { size: 32, values },
        zeros: None,
        globals: None,
    };
    let product = Product {
        rows: &rows,
        expert_of: &[Some(0); M],
        weights: std::slice::from_ref(&weight),
        halves: None,
        router_weights: None,
        dtype: BF16,
    };
    let found = product.compute(Arithmetic::Tcgen05).unwrap().into_bits();
    assert_eq!(product.define(Arithmetic::Tcgen05).unwrap().into_bits(), found);
    found
}

#[test]
fn mxfp8_outputs_are_bounded() {
    let mut rng = Rng::new(32);
    for _ in 0..4 {
        let (a, w) = (operand(&mut rng, M), operand(&mut rng, N));
        for (name, y) in [("exact", exact(&a, &w)), ("tcgen05", by_instruction(&a, &w))] {
            let report = check_case(&case(&a, &w, &y)).unwrap();
            assert_eq!(report.verdict, Verdict::Pass, "{name}: {report:?}");
        }
        // The scales of one group of 32 k off by a factor of two.
        let mut other = w.clone();
        other.1[5] += 1;
        let report = check_case(&case(&a, &w, &exact(&a, &other))).unwrap();
        assert_eq!(report.verdict, Verdict::Fail, "a group's scale doubled");
        // Scales of rows and of groups exchanged.
        let mut moved = a.clone();
        moved.1.rotate_left(1);
        let report = check_case(&case(&a, &w, &exact(&moved, &w))).unwrap();
        assert_eq!(report.verdict, Verdict::Fail, "scales of the next group");
    }
}
