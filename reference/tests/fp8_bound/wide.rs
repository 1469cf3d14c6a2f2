//! Causes of long products of e4m3 operands, whose bound is a third of the value: many false causes fit
//! such a bound. Numbers come from loops over k in f64, rounded once.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{Diagnosis, Strength, Verdict, check_case};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::{self, Rng};
use serde_json::{Value, json};

use crate::data::values;

const BF16: ScalarType = ScalarType::BFLOAT16;
const BLOCK: usize = 128;
const SIZE_N: usize = 128;
const SIZE_K: usize = 2048;
const GROUPS: usize = SIZE_K / BLOCK;

/// Operands of one product, and the scale of each k.
#[derive(Clone)]
struct Operands {
    /// `[M, K]` and `[N, K]`.
    a: Vec<f64>,
    w: Vec<f64>,
    /// `[M, groups]` and `[groups]`.
    a_scales: Vec<f64>,
    w_scales: Vec<f64>,
    /// Group of each k, of the activations and of the weight.
    groups: [Vec<usize>; 2],
}

struct Product {
    case: Case<'static>,
    size_m: usize,
    right: Operands,
}

impl Product {
    fn new(size_m: usize, seed: u64) -> Self {
        let Value::Object(config) = json!({
            "dtype": "bfloat16", "size_m": size_m, "size_n": SIZE_N, "size_k": SIZE_K,
            "weight_block_size": [BLOCK, BLOCK],
        }) else {
            panic!("keys")
        };
        let config = CaseConfig::from_json(Op::ScaledMm, &config).expect("a config");
        let mut case = vectors::case_of(config, &mut Rng::new(seed)).expect("a case");
        let mut rng = Rng::new(seed + 100);
        let mut put = |name: &str, shape: Vec<usize>| -> Vec<f64> {
            let scale = |_| 0.01 + 0.03 * (rng.below(1 << 20) as f32 / (1 << 20) as f32);
            let all: Vec<f32> = (0..shape.iter().product()).map(scale).collect();
            let tensor = Tensor::from_vec("", DType::F32, shape, all.clone()).expect("scales");
            case.add_input(name, tensor);
            all.into_iter().map(f64::from).collect()
        };
        let a_scales = put("a_scales", vec![size_m, GROUPS]);
        let w_scales = put("weight_scale", vec![1, GROUPS]);
        let codes = |name: &str| -> Vec<f64> {
            let tensor = case.input(name).expect("codes");
            values(&tensor.elements::<u8>().iter().map(|&b| b.into()).collect::<Vec<u32>>())
        };
        let (a, w) = (codes("a"), codes("weight"));
        let own: Vec<usize> = (0..SIZE_K).map(|k| k / BLOCK).collect();
        let groups = [own.clone(), own];
        let right = Operands { a, w, a_scales, w_scales, groups };
        Self { case, size_m, right }
    }

    fn y(&self, o: &Operands) -> Vec<f64> {
        let at = |(m, n): (usize, usize)| {
            let term = |k: usize| {
                let scale = o.a_scales[m * GROUPS + o.groups[0][k]] * o.w_scales[o.groups[1][k]];
                o.a[m * SIZE_K + k] * o.w[n * SIZE_K + k] * scale
            };
            (0..SIZE_K).map(term).sum()
        };
        (0..self.size_m * SIZE_N).map(|i| at((i / SIZE_N, i % SIZE_N))).collect()
    }

    /// The verdict on the output of changed operands, changed.
    fn judged(
        &self,
        change: impl FnOnce(&mut Operands),
        after: impl FnOnce(&mut [f64]),
    ) -> (Verdict, Option<Diagnosis>) {
        let mut operands = self.right.clone();
        change(&mut operands);
        let mut y = self.y(&operands);
        after(&mut y);
        let y = y.into_iter().map(|y| BF16.encode_rne(y) as u16).collect();
        let mut case = self.case.clone();
        let y = Tensor::from_vec("", DType::BF16, vec![self.size_m, SIZE_N], y).expect("y");
        case.add_output("y", y);
        let report = check_case(&case).expect("inputs that can be used");
        let y = report.outputs.into_iter().find(|o| o.name == "y").expect("y");
        (y.verdict, y.diagnosis)
    }

    /// Checks that no cause is named.
    #[track_caller]
    fn expect_place(&self, change: impl FnOnce(&mut Operands), after: impl FnOnce(&mut [f64])) {
        let (verdict, diagnosis) = self.judged(change, after);
        assert_eq!(verdict, Verdict::Fail);
        let diagnosis = diagnosis.expect("a place");
        assert_eq!(diagnosis.strength, Strength::Place, "{diagnosis:?}");
    }

    #[track_caller]
    fn expect_cause(&self, id: &str, text: &str, change: impl FnOnce(&mut Operands)) {
        let (verdict, diagnosis) = self.judged(change, |_| ());
        assert_eq!(verdict, Verdict::Fail);
        let diagnosis = diagnosis.expect("a cause");
        assert_eq!(diagnosis.id, id, "{diagnosis:?}");
        assert!(diagnosis.text.contains(text), "{diagnosis:?}");
    }
}

/// Lost signs, rotated k, exchanged tiles of 16 k: columns that hold others within the bound are no cause.
#[test]
fn no_columns_were_moved() {
    let product = Product::new(4, 3);
    product.expect_place(|o| o.a.iter_mut().for_each(|a| *a = a.abs()), |_| ());
    product.expect_place(|o| o.a.chunks_mut(SIZE_K).for_each(|row| row.rotate_left(1)), |_| ());
    product.expect_place(
        |o| {
            for pair in o.a.chunks_mut(32) {
                pair.rotate_left(16);
            }
        },
        |_| (),
    );
}

/// The near miss: columns that were moved are named, since their numbers are near, not only within the
/// bound.
#[test]
fn columns_were_moved() {
    let product = Product::new(4, 3);
    let (verdict, diagnosis) =
        product.judged(|_| (), |y| y.chunks_mut(SIZE_N).for_each(|row| row.rotate_left(64)));
    assert_eq!(verdict, Verdict::Fail);
    assert_eq!(diagnosis.expect("a cause").id, "columns-moved");
}

/// Ratios from 0.5 to 4 are no constant factor, one factor is.
#[test]
fn scales_rounded_up_are_no_factor() {
    let product = Product::new(4, 5);
    let up = |s: &mut f64| *s = s.log2().ceil().exp2();
    product.expect_place(
        |o| {
            o.a_scales.iter_mut().for_each(up);
            o.w_scales.iter_mut().for_each(up);
        },
        |_| (),
    );
    product.expect_cause("constant-factor", "times 2", |o| {
        o.a_scales.iter_mut().for_each(|s| *s *= 2.0);
    });
}

/// Groups of 32 and of 16 k give numbers within each other's bounds: the nearer ones win.
#[test]
fn the_nearest_group_size_wins() {
    for size_m in [4, 5] {
        let product = Product::new(size_m, 7);
        for (size, name) in [(16, "groups of 16 k"), (32, "groups of 32 k"), (64, "groups of 64 k")]
        {
            product.expect_cause("wrong-group-size", name, |o| {
                o.groups[1] = (0..SIZE_K).map(|k| (k / size).min(GROUPS - 1)).collect();
            });
        }
    }
}
