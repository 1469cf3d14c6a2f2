//! The effect of the conventions on a sum, on numbers small enough to compute by hand.

use approx::assert_relative_eq;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{ScalarType, f32_to_bf16_rne, f32_to_f16_rne};
use marlinspike::products::{Bounded, Class, Convention, Extras, Judge, Recipe, Rows};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

const F16: ScalarType = ScalarType::FLOAT16;
const BF16: ScalarType = ScalarType::BFLOAT16;

fn table(ty: ScalarType, values: &[f32]) -> Table {
    let narrow = if ty == F16 { f32_to_f16_rne } else { f32_to_bf16_rne };
    let data = TableData::B16(values.iter().map(|&v| narrow(v)).collect());
    Table::new(ty, 1, values.len(), data).expect("a table")
}

/// One column, one scale.
fn column(ty: ScalarType, codes: &[u8], dtype: ScalarType, scale: f32) -> Weight<'static> {
    let shape = Shape::new(codes.len(), 1);
    let bits = if ty.size_bits() <= 4 { 4 } else { 8 };
    Weight {
        name: "weight".to_owned(),
        ty,
        codes: Codes::from_fn(bits, shape, |k, _| codes[k]).expect("codes"),
        scales: table(dtype, &[scale]),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Channel),
        global_scale: None,
        bias: None,
    }
}

fn one(weight: &Weight<'_>, x: &[f64], convention: Convention, router: Option<f32>) -> Bounded {
    let dtype = weight.scales.ty();
    let router = router.map(|r| [r]);
    let extras =
        Extras { activation_scales: None, router_weights: router.as_ref().map(|r| r.as_slice()) };
    let recipe = Recipe::new(convention, weight, dtype, extras).expect("a recipe");
    let class = Class::exact();
    let judge = Judge { weight, order: None, recipe: &recipe, class: &class, extras };
    let rows = Rows::new(x.len(), x.to_vec()).expect("rows");
    judge.bounds(&rows, None).expect("bounds")[0]
}

/// 4 bits, one scale: the sum is rounded, then multiplied, then the bias is added, then the router
/// weight, itself rounded, multiplies; each step rounds. Canonical rounds once.
#[test]
fn four_roundings_or_one() {
    let codes = [9, 9, 9, 9, 8, 8, 8, 8];
    let mut weight = column(ScalarType::UINT4B8, &codes, F16, 0.5);
    weight.bias = Some(table(F16, &[0.25]));
    // The sum is 2051: in f16, with steps of 2, 2052 (a tie, to even).
    let x = [2048.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0];
    let b = one(&weight, &x, Convention::Marlin, None);
    assert_eq!(b.exact, 2051.0 * 0.5 + 0.25);
    // 2052 · 0.5 + 0.25 = 1026.25, in steps of 1.
    assert_eq!((b.lo, b.hi), (1026.0, 1026.0));
    let b = one(&weight, &x, Convention::Canonical, None);
    // 1025.75.
    assert_eq!((b.lo, b.hi), (1026.0, 1026.0));
    let third = f32_to_f16_rne(1.0 / 3.0);
    let b = one(&weight, &x, Convention::Marlin, Some(1.0 / 3.0));
    assert_eq!(b.lo, F16.to_f64(f32_to_f16_rne((1026.0 * F16.to_f64(third.into())) as f32).into()));
    let b = one(&weight, &x, Convention::Canonical, Some(1.0 / 3.0));
    let exact = 1025.75 * f64::from(1f32 / 3.0);
    // Both factors fit f64's product, so that one rounding is left.
    assert_relative_eq!(b.exact, exact, max_relative = f64::EPSILON);
    assert_eq!((b.lo, b.hi), (342.0, 342.0), "{b:?}");
}

/// 8 bits, one scale: it multiplies the f32 sum.
#[test]
fn eight_bits_scale_before_the_rounding() {
    let codes = [129, 129, 129, 129];
    let weight = column(ScalarType::UINT8B128, &codes, F16, 0.5);
    let b = one(&weight, &[2048.0, 1.0, 1.0, 1.0], Convention::Marlin, None);
    // 1025.5 in steps of 1, to even; the scale after the rounding would give 1026 from 2052.
    assert_eq!((b.lo, b.hi, b.exact), (1026.0, 1026.0, 1025.5));
    let b = one(&weight, &[2048.0, 1.0, 0.0, 0.0], Convention::Marlin, None);
    // 1024.5 to even; the scale after the rounding would give 1024 from 2048 as well.
    assert_eq!((b.lo, b.hi), (1024.0, 1024.0));
}

/// e4m3's NaN codes: a number to kernels that move bits, NaN to a conversion.
#[test]
fn a_nan_code_follows_the_convention() {
    for dtype in [F16, BF16] {
        let weight = column(ScalarType::FLOAT8_E4M3FN, &[0x7f, 0xff, 0x38, 0x00], dtype, 2.0);
        let b = one(&weight, &[1.0, 0.5, 1.0, 1.0], Convention::Marlin, None);
        assert_eq!((b.exact, b.lo, b.hi), (482.0, 482.0, 482.0), "{dtype}");
        let b = one(&weight, &[1.0, 0.5, 1.0, 1.0], Convention::Canonical, None);
        assert!(b.exact.is_nan());
        assert_eq!(b.ratio(f64::NAN), 0.0);
        assert_eq!(b.ratio(482.0), f64::INFINITY);
    }
}

/// NVFP4 with a bias and a router weight: (a·w·global + bias) · router. Upstream scales the bias by
/// the global scale as well, which no convention here does.
#[test]
fn the_global_scale_does_not_touch_the_bias() {
    let e4m3 = |v: u8| {
        Table::new(ScalarType::FLOAT8_E4M3FN, 1, 1, TableData::B8(vec![v])).expect("scales")
    };
    let mut weight = column(ScalarType::FLOAT4_E2M1F, &[2; 16], F16, 1.0);
    (weight.scales, weight.groups) = (e4m3(0x38), Groups::Uniform(GroupSize::Of(16)));
    (weight.global_scale, weight.bias) = (Some(0.25), Some(table(F16, &[8.0])));
    for convention in [Convention::Marlin, Convention::Canonical] {
        let router = [0.5f32];
        let extras = Extras { activation_scales: None, router_weights: Some(&router) };
        let recipe = Recipe::new(convention, &weight, F16, extras).expect("a recipe");
        let class = Class::any_order();
        let judge = Judge { weight: &weight, order: None, recipe: &recipe, class: &class, extras };
        let rows = Rows::new(16, vec![1.0; 16]).expect("rows");
        let b = judge.bounds(&rows, None).expect("bounds")[0];
        assert_eq!((b.exact, b.lo, b.hi), (6.0, 6.0, 6.0), "{convention:?}");
    }
}

/// Activations of any other type are errors that name the type.
#[test]
fn other_types_are_refused() {
    let weight = column(ScalarType::UINT4B8, &[9; 8], F16, 1.0);
    let error = Recipe::new(Convention::Marlin, &weight, ScalarType::FLOAT32, Extras::default())
        .expect_err("refused");
    assert!(error.to_string().contains("float32"), "{error}");
}
