//! Scaled int8 sums beyond 2^31: a kernel that adds them in 32 bits, over two halves of K, is rejected
//! and named. Loops in this file compute both.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::num::scalar::{f16_to_f32, f64_to_f16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::{self, Rng};
use serde_json::{Value, json};

const M: usize = 3;
const N: usize = 64;
const K: usize = 2048;
const GROUP: usize = 128;
/// Columns whose codes are all -8.
const LOW: [usize; 4] = [3, 17, 18, 60];
/// The scale of even groups, half of it that of odd ones; their int16 scales are 4096 and 2048.
const SCALE: f32 = 1.0 / 1024.0;
/// The scale of each row of activations, times 1 / 4096 of the largest scale, which restores the int16 scales.
const ROW_SCALE: f32 = SCALE / 4096.0 / 8.0;

/// A case of int8 activations and uint4b8 weights: row 1 is -120, so that the sum of a column of [`LOW`] is
/// 6.04e9 over K and 3.02e9 over each half of it.
fn case() -> (Case<'static>, Vec<i8>, Vec<u32>) {
    let config = json!({
        "checkpoint_format": "gptq", "weight_type": "uint4b8", "input_dtype": "int8", "desc_act": false,
        "is_k_full": true, "group_size": GROUP, "size_m": M, "size_n": N, "size_k": K, "has_bias": false,
        "dtype": "float16",
    });
    let Value::Object(config) = config else { panic!("keys") };
    let config = CaseConfig::from_json(Op::Linear, &config).expect("a config");
    let mut case = vectors::case_of(config.clone(), &mut Rng::new(7)).expect("a case");
    // The number of rows is drawn as well.
    case.config = config;
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let mut a: Vec<i8> = (0..M * K).map(|_| (next() % 41) as i8 - 20).collect();
    a[K..2 * K].fill(-120);
    let mut words: Vec<u32> = (0..K / 8 * N).map(|_| next() << 8 ^ next()).collect();
    for row in words.chunks_mut(N) {
        LOW.into_iter().for_each(|n| row[n] = 0);
    }
    let signed = words.iter().map(|&w| w.cast_signed()).collect();
    let scale = |i: usize| half(if (i / N).is_multiple_of(2) { SCALE } else { SCALE / 2.0 });
    let scales: Vec<u16> = (0..K / GROUP * N).map(scale).collect();
    let put = [
        Tensor::from_vec("a_q", DType::I8, vec![M, K], a.clone()),
        Tensor::from_vec("a_scales", DType::F32, vec![M, 1], vec![ROW_SCALE; M]),
        Tensor::from_vec("qweight", DType::I32, vec![K / 8, N], signed),
        Tensor::from_vec("scales", DType::F16, vec![K / GROUP, N], scales),
    ];
    case.inputs.remove("x");
    case.outputs.clear();
    for tensor in put {
        let tensor = tensor.expect("a tensor");
        let name = tensor.name().to_owned();
        case.add_input(&name, tensor);
    }
    (case, a, words)
}

fn half(x: f32) -> u16 {
    f64_to_f16_rne(x.into())
}

/// y of sums over `parts` of K, each by `add` from one product to the next.
fn judged(parts: usize, add: impl Fn(i64, i64) -> i64) -> OutputReport {
    let (mut case, a, words) = case();
    let mut y = Vec::with_capacity(M * N);
    for m in 0..M {
        for n in 0..N {
            let term = |k: usize| {
                let code = i64::from(words[k / 8 * N + n] >> (k % 8 * 4) & 15) - 8;
                i64::from(a[m * K + k])
                    * code
                    * if (k / GROUP).is_multiple_of(2) { 4096 } else { 2048 }
            };
            let per = K / parts;
            let sums = (0..parts).map(|p| (p * per..(p + 1) * per).map(term).fold(0, &add));
            let sum: f64 = sums.map(|s| s as f64).sum();
            y.push(f64_to_f16_rne(sum * f64::from(ROW_SCALE)));
        }
    }
    let largest = y.iter().map(|&bits| f16_to_f32(bits).abs()).fold(0.0, f32::max);
    assert!((1.0..1000.0).contains(&largest), "{largest}");
    case.add_output("y", Tensor::from_vec("y", DType::F16, vec![M, N], y).expect("y"));
    let report = check_case(&case).expect("a report");
    report.outputs.iter().find(|o| o.name == "y").expect("y").clone()
}

fn wraps(sum: i64, term: i64) -> i64 {
    i64::from((sum + term) as i32)
}

#[test]
fn sums_in_64_bits_pass() {
    for parts in [1, 2, 4] {
        let report = judged(parts, |sum, term| sum + term);
        assert_eq!(report.verdict, Verdict::Pass, "{parts}: {report:?}");
    }
    // No eighth of K reaches 2^31.
    assert_eq!(judged(8, wraps).verdict, Verdict::Pass);
}

#[test]
fn sums_that_wrap_are_named() {
    for (parts, text) in [(1, "added in 32 bits, where"), (2, "several parts of K")] {
        let report = judged(parts, wraps);
        assert_eq!((report.verdict, report.mismatches), (Verdict::Fail, LOW.len()), "{parts}");
        assert_eq!(report.first_mismatch.expect("a place").index, [1, LOW[0]]);
        let diagnosis = report.diagnosis.expect("a cause");
        assert_eq!(diagnosis.id, "int8-accumulation-overflow", "{parts}: {diagnosis:?}");
        assert_eq!(diagnosis.unexplained, 0, "{diagnosis:?}");
        assert!(diagnosis.text.contains(text), "{}", diagnosis.text);
    }
}

#[test]
fn sums_that_saturate_are_named() {
    let clamps = |sum: i64, term: i64| (sum + term).clamp(i32::MIN.into(), i32::MAX.into());
    let diagnosis = judged(1, clamps).diagnosis.expect("a cause");
    assert_eq!(diagnosis.id, "int8-accumulation-overflow", "{diagnosis:?}");
    assert!(diagnosis.text.contains("saturate"), "{}", diagnosis.text);
}

/// What overflows by another number than 2^32 has another cause.
#[test]
fn other_differences_are_not_named_so() {
    let report = judged(1, |sum, term| {
        let next = sum + term;
        if next > i64::from(i32::MAX) { next - (5 << 28) } else { next }
    });
    assert_eq!(report.verdict, Verdict::Fail);
    assert_ne!(report.diagnosis.expect("a place").id, "int8-accumulation-overflow");
}
