//! Act-order quantization compared with upstream's function (producer: `scripts/gen`), and groups
//! by `g_idx` compared with the same values.

use approx::abs_diff_eq;
use marlinspike::Error;
use marlinspike::num::array::{FloatView2, rows_of};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::element::{Float16, bf16, f16};
use marlinspike::num::scalar::ScalarType;
use marlinspike::quantize::{gptq_quantize_weights, quantize_by_group, quantize_weights};
use marlinspike::weight::Groups;
use ndarray::{Array2, Axis};
use serde_json::Value;

const SIZE_N: usize = 3;

fn facts() -> Value {
    serde_json::from_str(include_str!("../data/act_order_quantize.json")).expect("the facts")
}

fn ints(v: &Value) -> Vec<i64> {
    v.as_array().expect("a list").iter().map(|x| x.as_i64().expect("an integer")).collect()
}

fn each_case(mut with: impl FnMut(FloatView2<'_>, ScalarType, &[u32], &Value)) {
    let facts = facts();
    let w: Vec<f32> = ints(&facts["w"]).iter().map(|&b| f32::from_bits(b as u32)).collect();
    let perm: Vec<u32> = ints(&facts["perm"]).iter().map(|&k| k as u32).collect();
    for case in facts["cases"].as_array().expect("cases") {
        let ty =
            |k: &str| ScalarType::from_name(case[k].as_str().expect("a name")).expect("a type");
        let (dtype, weight_type) = (ty("dtype"), ty("weight_type"));
        let bits: Vec<u16> = w.iter().map(|v| dtype.encode_rne(f64::from(*v)) as u16).collect();
        let shape = [w.len() / SIZE_N, SIZE_N];
        let w = match dtype {
            ScalarType::FLOAT32 => rows_of("w", &w, SIZE_N).expect("rows").into(),
            _ => FloatView2::from_bits("w", dtype, shape, &bits).expect("a view"),
        };
        with(w, weight_type, &perm, case);
    }
}

#[test]
fn act_order_is_upstreams() {
    let mut cases = 0;
    each_case(|w, weight_type, perm, case| {
        let group = GroupSize::Of(32);
        let made = gptq_quantize_weights(w, weight_type, group, Some(perm));
        let made = made.expect("a weight");
        let size_k = made.shape().size_k;
        let codes: Vec<i64> = (0..size_k * SIZE_N)
            .map(|i| i64::from(made.codes.get(i / SIZE_N, i % SIZE_N)))
            .collect();
        assert_eq!(codes, ints(&case["q"]));
        let scales: Vec<i64> =
            made.scales.iter_bits().map(|b| i64::from(b as u16 as i16)).collect();
        assert_eq!(scales, ints(&case["s"]));
        let Groups::Indexed { g_idx, .. } = &made.groups else { panic!("{:?}", made.groups) };
        assert_eq!(g_idx.iter().map(|&g| i64::from(g)).collect::<Vec<_>>(), ints(&case["g_idx"]));
        cases += 1;
    });
    assert_eq!(cases, 4);
}

/// Rows that are permuted first and grouped by `g_idx` afterwards give the same codes.
#[test]
fn groups_by_index_are_upstreams() {
    each_case(|w, weight_type, perm, case| {
        let dtype = w.scalar_type();
        let w = rows_of("w", &w.widened(), SIZE_N)
            .expect("rows")
            .select(Axis(0), &perm.iter().map(|&k| k as usize).collect::<Vec<_>>());
        let g_idx: Vec<u32> = ints(&case["g_idx"]).iter().map(|&g| g as u32).collect();
        let made = match dtype {
            ScalarType::FLOAT16 => quantize_by_group(
                w.mapv(<f16 as Float16>::from_f32_rne).view(),
                weight_type,
                &g_idx,
            ),
            ScalarType::BFLOAT16 => quantize_by_group(
                w.mapv(<bf16 as Float16>::from_f32_rne).view(),
                weight_type,
                &g_idx,
            ),
            _ => quantize_by_group(w.view(), weight_type, &g_idx),
        };
        let made = made.expect("a weight");
        assert_eq!(made.codes.iter().map(|&c| i64::from(c)).collect::<Vec<_>>(), ints(&case["q"]));
        let bits = |s: &f32| i64::from(dtype.encode_rne(f64::from(*s)) as u16 as i16);
        assert_eq!(made.scales.iter().map(bits).collect::<Vec<_>>(), ints(&case["s"]));
    });
}

/// A weight is within half a step of each quantized value.
#[test]
fn the_weight_is_near_the_floats() {
    let w: Vec<f32> = (0..64 * 5).map(|i| ((i * 37 % 101) as f32 - 40.0) / 64.0).collect();
    for weight_type in [ScalarType::UINT4, ScalarType::UINT8, ScalarType::UINT4B8] {
        let group = GroupSize::Of(16);
        let made = quantize_weights(rows_of("w", &w, 5).expect("rows"), weight_type, group);
        let weight = made.expect("codes").into_weight(Groups::Uniform(group));
        let weight = weight.expect("a weight");
        assert_eq!(weight.zeros.is_some(), weight_type.bias() == 0);
        for (i, &v) in w.iter().enumerate() {
            let (k, n) = (i / 5, i % 5);
            let step = weight.scales.value(k / 16, n);
            // Symmetric codes reach 8 steps down and 7 up; zero points are whole steps.
            // The quotient, which is below 256, is off by an f32's rounding.
            let epsilon = step * (1.0 + 256.0 * f64::from(f32::EPSILON));
            let found = weight.dequantize(k, n);
            assert!(abs_diff_eq!(found, f64::from(v), epsilon = epsilon), "{weight_type} {i}");
        }
    }
}

#[test]
fn bad_orders_are_refused() {
    let w = Array2::from_elem((64, 2), 0.5f32);
    let int4 = ScalarType::UINT4B8;
    let gptq = |weight_type, group, perm: &[u32]| {
        gptq_quantize_weights(w.view(), weight_type, group, Some(perm)).expect_err("a refusal")
    };
    let perm: Vec<u32> = (0..64).collect();
    let group = GroupSize::Of(32);
    assert!(matches!(gptq(ScalarType::UINT4, group, &perm), Error::Unsupported { .. }));
    assert!(matches!(gptq(int4, GroupSize::Channel, &perm), Error::Size { .. }));
    assert!(matches!(gptq(int4, GroupSize::Of(64), &perm), Error::Size { .. }));
    assert!(matches!(gptq(int4, group, &perm[1..]), Error::Shape { .. }));
    assert!(matches!(gptq(int4, group, &[0; 64]), Error::Value { .. }));
    let by = |g_idx: &[u32]| quantize_by_group(w.view(), int4, g_idx).expect_err("a refusal");
    assert!(matches!(by(&[0; 63]), Error::Shape { .. }));
    assert!(matches!(by(&[u32::MAX; 64]), Error::Value { .. }));
    let mut hole = vec![0; 64];
    hole[5] = 2;
    assert!(matches!(by(&hole), Error::Value { .. }));
}
