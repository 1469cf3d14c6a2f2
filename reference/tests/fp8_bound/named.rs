//! Causes of wrong products of e4m3 operands whose output follows no schedule: numbers that loops over k
//! compute in f64, rounded once.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::{self, Rng};
use serde_json::{Value, json};

use crate::data::values;

const BF16: ScalarType = ScalarType::BFLOAT16;
const SIZES: [usize; 3] = [5, 130, 384];
const BLOCK: usize = 128;

/// A product with blocks of 128 by 128, the last of N two columns wide. `scale` gives the scale of a
/// block of N and a group of k.
struct Blocks {
    case: Case<'static>,
    scales: Vec<f32>,
}

impl Blocks {
    fn new(scale: impl Fn(usize, usize) -> f32) -> Self {
        let [size_m, size_n, size_k] = SIZES;
        let Value::Object(config) = json!({
            "dtype": "bfloat16", "size_m": size_m, "size_n": size_n, "size_k": size_k,
            "weight_block_size": [BLOCK, BLOCK],
        }) else {
            panic!("keys")
        };
        let config = CaseConfig::from_json(Op::ScaledMm, &config).expect("a config");
        let mut case = vectors::case_of(config, &mut Rng::new(7)).expect("a case");
        let groups = size_k / BLOCK;
        let scales: Vec<f32> = (0..2 * groups).map(|i| scale(i / groups, i % groups)).collect();
        let tensor = Tensor::from_vec("", DType::F32, vec![2, groups], scales.clone());
        case.add_input("weight_scale", tensor.expect("scales"));
        let rows = (0..size_m * groups).map(|i| 0.01 + 0.003 * (i % 7) as f32).collect();
        let rows = Tensor::from_vec::<f32>("", DType::F32, vec![size_m, groups], rows);
        case.add_input("a_scales", rows.expect("scales"));
        Self { case, scales }
    }

    /// The verdict on an output with the weight's scales of block `from(block of N, group)`.
    fn judged(&self, from: impl Fn(usize, usize) -> [usize; 2]) -> OutputReport {
        let [size_m, size_n, size_k] = SIZES;
        let groups = size_k / BLOCK;
        let codes = |name: &str| -> Vec<f64> {
            let tensor = self.case.input(name).expect("codes");
            values(&tensor.elements::<u8>().iter().map(|&b| b.into()).collect::<Vec<u32>>())
        };
        let (a, w) = (codes("a"), codes("weight"));
        let of_rows = self.case.input("a_scales").expect("scales").elements::<f32>().into_owned();
        let mut y = Vec::new();
        for (m, n) in (0..size_m * size_n).map(|i| (i / size_n, i % size_n)) {
            let mut sum = 0.0;
            for g in 0..groups {
                let [block, group] = from(n / BLOCK, g);
                let scale = f64::from(of_rows[m * groups + g])
                    * f64::from(self.scales[block * groups + group]);
                let ks = g * BLOCK..(g + 1) * BLOCK;
                let part: f64 = ks.map(|k| a[m * size_k + k] * w[n * size_k + k]).sum();
                sum += part * scale;
            }
            y.push(BF16.encode_rne(sum) as u16);
        }
        let mut case = self.case.clone();
        let y = Tensor::from_vec("", DType::BF16, vec![size_m, size_n], y).expect("y");
        case.add_output("y", y);
        let report = check_case(&case).expect("inputs that can be used");
        report.outputs.into_iter().find(|o| o.name == "y").expect("y")
    }
}

#[track_caller]
fn expect_cause(report: &OutputReport, id: &str) {
    assert_eq!(report.verdict, Verdict::Fail, "{report:?}");
    let diagnosis = report.diagnosis.as_ref().expect("a diagnosis");
    assert_eq!((&*diagnosis.id, diagnosis.unexplained), (id, 0), "{diagnosis:?}");
}

/// With one scale for each block of N, the wrong elements of 128 of 130 columns also have one factor.
#[test]
fn scales_of_the_next_block_are_no_constant_factor() {
    let of_n: fn(usize, usize) -> f32 = |block, _| [0.25, 0.7][block];
    let of_both: fn(usize, usize) -> f32 = |block, g| 0.2 + 0.3 * block as f32 + 0.07 * g as f32;
    for scale in [of_n, of_both] {
        let product = Blocks::new(scale);
        assert_eq!(product.judged(|b, g| [b, g]).verdict, Verdict::Pass);
        expect_cause(&product.judged(|b, g| [(b + 1) % 2, g]), "weight-scale-of-next-block");
    }
    let product = Blocks::new(of_both);
    expect_cause(&product.judged(|b, _| [b, 0]), "weight-scale-of-first-group");
}

/// A factor that no block's scales have stays a factor.
#[test]
fn a_factor_of_every_element_is_named_as_one() {
    let mut product = Blocks::new(|block, g| 0.2 + 0.3 * block as f32 + 0.07 * g as f32);
    product.scales.iter_mut().for_each(|s| *s *= 3.0);
    expect_cause(&product.judged(|b, g| [b, g]), "constant-factor");
}
