//! The three properties that make the bounds tight, and classes read from JSON.

use marlinspike::num::scalar::ScalarType;
use marlinspike::products::{Class, Inputs, Rows, product};
use marlinspike::vectors::Rng;

use crate::data::{Data, operands, values};
use crate::simulated::Plain;

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// Operands and the bound of each element, below and above.
fn bounds(class: &Class, a: &[f64], w: &[f64], size_k: usize) -> Vec<[f64; 2]> {
    let columns = Plain { size_k, columns: w.chunks_exact(size_k).map(<[f64]>::to_vec).collect() };
    let rows = Rows::new(size_k, a.to_vec()).expect("rows");
    let output = ScalarType::BFLOAT16;
    let inputs = Inputs { activations: E4M3, weights: E4M3, output, group_scales: None };
    let request = &mut Vec::new();
    let request = class.request(request);
    product(&rows, &columns, request, |e| class.bound(e, size_k, inputs)).expect("a product")
}

/// A sum of any length lies between the sums of the negative and of the positive products.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn no_bound_reaches_past_the_sums_of_either_sign() {
    let mut random = Rng::new(1);
    for data in [Data::Normal, Data::OneSigned, Data::Spiked] {
        let size_k = 8192;
        let [a, w] = operands(&mut random, data, [4, 8, size_k]).map(|codes| values(&codes));
        for class in [Class::fp8_any_order(), Class::fp8_contiguous(), Class::fp8_hopper()] {
            for (i, bound) in bounds(&class, &a, &w, size_k).into_iter().enumerate() {
                let (m, n) = (i / 8, i % 8);
                let term = |k: usize| a[m * size_k + k] * w[n * size_k + k];
                let positive: f64 = (0..size_k).map(|k| term(k).max(0.0)).sum();
                let negative: f64 = (0..size_k).map(|k| (-term(k)).max(0.0)).sum();
                for (bound, side, other) in
                    [(bound[0], positive, negative), (bound[1], negative, positive)]
                {
                    assert!(bound.is_finite(), "{}: {data:?}", class.name);
                    assert!(bound <= side + 0.001 * (side + other) + 1e-30, "{bound} of {side}");
                }
            }
        }
    }
}

/// Three fraction bits are lost to subnormals alone: one instruction of normal numbers.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn normal_operands_have_all_fraction_bits() {
    let class = Class::fp8_any_order();
    let a: Vec<f64> = (0..32).map(|k| 1.0 + f64::from(k % 8) / 8.0).collect();
    let w: Vec<f64> = (0..32).map(|k| if k % 2 == 0 { 1.125 } else { -1.25 }).collect();
    let sum: f64 = a.iter().zip(&w).filter(|(_, w)| **w > 0.0).map(|(a, w)| a * w).sum();
    let other: f64 = a.iter().zip(&w).filter(|(_, w)| **w < 0.0).map(|(a, w)| -a * w).sum();
    // 16 products of either sign lose less than a unit each, an accumulator two units at most, in
    // two sums of 16.
    let unit = f64::exp2(sum.max(other).log2().floor() - 13.0);
    let bound = bounds(&class, &a, &w, 32)[0];
    for bound in bound {
        assert!(bound <= (16.0 + 2.0 * 2.0) * unit * 1.001, "{bound} of units {unit}");
    }
    // Subnormals: each factor counts with 2^-6, however small it is.
    let subnormal: Vec<f64> = (0..32).map(|k| f64::from(k % 8) / 512.0).collect();
    let bound = bounds(&class, &subnormal, &subnormal, 32)[0];
    assert!(bound[0] >= 28.0 * f64::exp2(-12.0 - 13.0), "{bound:?}");
}

/// A product loses at most its own magnitude, which bounds the loss of products below the unit.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn small_products_lose_themselves_only() {
    let class = Class::fp8_any_order();
    let size_k = 1024;
    let mut a = vec![0.0625; size_k];
    a[0] = 448.0;
    let w: Vec<f64> = a.clone();
    let small = (size_k - 1) as f64 * 0.0625 * 0.0625;
    let bound = bounds(&class, &a, &w, size_k)[0];
    // In addition to the small products: the large product and the losses of 64 accumulators.
    let unit = f64::exp2(17.0 - 13.0);
    assert!(bound[0] <= small + (2.0 + 2.0 * 64.0) * unit, "{bound:?}");
    assert!(bound[0] >= small, "{bound:?}: all of them vanish next to the large one");
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn members_differ_in_more_than_the_order_of_f32_additions() {
    let class = Class::fp8_hopper();
    class.validate().expect("a class");
    assert_eq!(class.members(32).len(), 2, "one instruction: two units");
    let members = class.members(2048);
    let names: std::collections::HashSet<&str> = members.iter().map(|m| &*m.name).collect();
    assert_eq!(names.len(), members.len());
    assert!(names.contains("fp8-hopper: wgmma of Hopper, k ascending"));
    assert!(
        names.contains("fp8-hopper: wgmma of Hopper, k ascending, promoted to f32 every 128 k")
    );
    assert!(names.contains("fp8-hopper: wgmma of Hopper, k ascending, parts of 512 k"));
    // A part of 512 k with a promotion every 128 has the same sums as a whole with it.
    assert!(!names.iter().any(|n| n.contains("parts of 512 k, promoted to f32 every 128")));
    assert_eq!(Class::fp8_any_order().members(2048), [Class::fp8_any_order()]);
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn sets_of_orders_are_read_and_refused_by_number() {
    let json = serde_json::to_value(Class::fp8_hopper()).expect("JSON");
    let back: Class = serde_json::from_value(json.clone()).expect("a class");
    assert_eq!(back, Class::fp8_hopper());
    let refused = |path: &str, value: serde_json::Value| {
        let mut json = json.clone();
        *json.pointer_mut(path).expect(path) = value;
        let class: Class = serde_json::from_value(json).expect("a class");
        class.validate().expect_err(path).to_string()
    };
    let order = "/order/ascending";
    let of = |key: &str| format!("{order}/{key}");
    assert!(refused(&of("units"), serde_json::json!([])).contains("members"));
    assert!(refused(&of("promotions"), serde_json::json!([0, 100])).contains("100"));
    assert!(refused(&of("splits"), serde_json::json!([{"length": 48}])).contains("48"));
    assert!(refused(&of("splits"), serde_json::json!([{"length": 0}])).contains('0'));
    let none = serde_json::json!([{"parts": {"parts": 0, "tile": 64}}]);
    assert!(refused(&of("splits"), none).contains("parts: 0"));
    assert!(refused(&of("units/0/accumulator"), "float16".into()).contains("float32"));
    assert!(refused(&of("units/0/size_k"), 16.into()).contains("table of matrix units"));
    assert!(refused("/adder", serde_json::json!("exact")).contains("matrix unit"));
    let long: Vec<usize> = (1..2000).map(|i| 32 * i).collect();
    assert!(refused(&of("promotions"), serde_json::json!(long)).contains("1 to 4096"));
}
