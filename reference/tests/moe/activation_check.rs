//! `activated` and `y` with known mistakes: the check must fail and name the place and the cause.

use marlinspike::case::{Activation, Case, CaseConfig, MoeConfig};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::moe::activation::bound::Bounds;
use marlinspike::moe::activation::{Columns, Definition, Function};
use marlinspike::moe::{Chain, sum};
use marlinspike::num::array::FloatView2;
use marlinspike::num::interval::Bound;
use marlinspike::num::scalar::{self, ScalarType};
use marlinspike::num::tensor::Tensor;
use marlinspike_golden::Manifest;

fn golden(name: &str) -> Vec<u8> {
    let golden = Manifest::load().expect("the golden manifest");
    let file = format!("{name}.safetensors");
    let entry = golden.cases().iter().find(|c| c.path.ends_with(&file)).expect("the case");
    std::fs::read(golden.path(&entry.path)).expect("a golden file")
}

fn config(case: &Case<'_>) -> MoeConfig {
    match &case.config {
        CaseConfig::Moe(c) => c.clone(),
        other => panic!("a layer, not {:?}", other.op()),
    }
}

fn halves(case: &Case<'_>, name: &str) -> Vec<u16> {
    case.output(name).expect("an output").elements().into_owned()
}

fn replace(case: &mut Case<'_>, name: &str, values: Vec<u16>) {
    let tensor = case.output(name).expect("an output");
    let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
    case.add_output(name, Tensor::from_vec(name, dtype, shape, values).expect("a tensor"));
}

fn widen(ty: ScalarType, bits: u16) -> f32 {
    if ty == ScalarType::FLOAT16 { scalar::f16_to_f32(bits) } else { scalar::bf16_to_f32(bits) }
}

fn narrow(ty: ScalarType, x: f32) -> u16 {
    if ty == ScalarType::FLOAT16 { scalar::f32_to_f16_rne(x) } else { scalar::f32_to_bf16_rne(x) }
}

/// Checks that output `name` of the golden layer fails after `make` of its values, with diagnosis
/// `id`.
fn expect(
    layer: &str,
    name: &str,
    id: &str,
    make: impl FnOnce(&mut Case<'_>, &MoeConfig) -> Vec<u16>,
) -> OutputReport {
    let bytes = golden(layer);
    let mut case = Case::parse(&bytes).expect("a case");
    // A config that does not state the layout of gate and up leaves both open.
    if let CaseConfig::Moe(c) = &mut case.config
        && c.activation == Activation::SwigluOai
    {
        c.rules.gate_up_layout = Some(Columns::Interleaved);
    }
    let c = config(&case);
    let values = make(&mut case, &c);
    // The stage is judged from the previous one; the next stage no longer follows from it.
    let before = if name == "y" { "down" } else { "gate_up" };
    case.outputs.retain(|n, _| [name, before, "topk_ids"].contains(&n.as_str()));
    replace(&mut case, name, values);
    let report = check_case(&case).expect("a report");
    let output = report.outputs.iter().find(|o| o.name == name).expect("the output").clone();
    assert_eq!(output.verdict, Verdict::Fail, "{layer} {name}: {id}");
    let diagnosis = output.diagnosis.clone().expect("a diagnosis");
    assert_eq!(diagnosis.id, id, "{layer}: {diagnosis:?}");
    assert!(output.mismatches > 0 && output.first_mismatch.is_some() && output.picture.is_some());
    assert!(output.max_error_over_bound.is_some_and(|r| r > 1.0));
    output
}

/// The nearest number of the type that lies 1.5 times the bound above the exact value, or next to
/// the bound where that is inside.
fn beyond(ty: ScalarType, bound: &Bound) -> u16 {
    let x = bound.exact + 1.5 * (bound.interval.hi - bound.exact).max(0.0);
    let mut bits = narrow(ty, x as f32);
    while f64::from(widen(ty, bits)) <= bound.interval.hi {
        // Up: away from zero for positive numbers, toward it for negative ones.
        bits = if bits == 0x8000 {
            1
        } else if bits & 0x8000 == 0 {
            bits + 1
        } else {
            bits - 1
        };
    }
    bits
}

#[test]
fn one_element_beyond_its_bound() {
    for layer in ["moe-fp8_f16_ch", "moe-mxfp4_bf16_big", "moe-ep0_bf16_u4"] {
        let o = expect(layer, "activated", "outside-bound", |case, c| {
            let (gate_up, mut values) = (halves(case, "gate_up"), halves(case, "activated"));
            let d = Definition::new(c.activation);
            let [gate, up] = d.places(77, c.intermediate_size).map(|p| gate_up[p]);
            let bound = Bounds::new(d, c.quant.dtype).expect("bounds").of_bits(gate, up);
            values[77] = beyond(c.quant.dtype, &bound);
            values
        });
        assert_eq!((o.mismatches, o.first_mismatch.expect("a place").index), (1, vec![0, 77]));
        assert!(o.equal_bits.is_some_and(|e| e < 1.0 && e > 0.999));
    }
    for layer in ["moe-fp8_f16_ch", "moe-top8_f16_u4", "moe-top1_f16_u4", "moe-ep0_bf16_u4"] {
        let o = expect(layer, "y", "outside-bound", |case, c| {
            let (down, mut y) = (halves(case, "down"), halves(case, "y"));
            let (ty, h) = (c.quant.dtype, c.hidden_size);
            let at = h + 5;
            let slot = |j| Bound::exactly(widen(ty, down[(c.top_k + j) * h + 5]).into());
            let slots: Vec<_> = (0..c.top_k).map(slot).collect();
            y[at] = beyond(ty, &sum::bound(&slots, ty));
            y
        });
        assert_eq!((o.mismatches, o.first_mismatch.expect("a place").index), (1, vec![1, 5]));
    }
}

#[test]
fn activations_made_wrong() {
    let with = |change: fn(&mut Definition)| {
        move |case: &mut Case<'_>, c: &MoeConfig| {
            let mut d = Definition::new(c.activation);
            change(&mut d);
            let (ty, mut gate_up) = (c.quant.dtype, halves(case, "gate_up"));
            if c.activation == Activation::SwigluOai {
                // The layer's own values stay below the limits.
                gate_up = gate_up.iter().map(|&b| narrow(ty, 8.0 * widen(ty, b))).collect();
                replace(case, "gate_up", gate_up.clone());
            }
            let width = d.width_in(c.intermediate_size);
            let rows = FloatView2::from_rows("gate_up", ty, width, &gate_up).expect("rows");
            d.apply(rows, Chain::Upstream).expect("rows").into_bits()
        }
    };
    let (silu, oai) = ("moe-nvfp4_f16", "moe-mxfp4_bf16_big");
    let expect = |layer, id, change| expect(layer, "activated", id, with(change));
    expect(silu, "gate-up-swapped", |d| d.exchanged = true);
    expect(oai, "gate-up-swapped", |d| d.exchanged = true);
    expect(silu, "columns-interleaved", |d| d.columns = Columns::Interleaved);
    expect(oai, "columns-halved", |d| d.columns = Columns::Halves);
    expect(oai, "clamp-of-gate-forgotten", |d| d.gate_limit = None);
    expect(oai, "clamp-of-up-forgotten", |d| d.up_limit = None);
    expect(oai, "clamp-forgotten", |d| (d.gate_limit, d.up_limit) = (None, None));
    expect(oai, "alpha-forgotten", |d| d.alpha = 1.0);
    expect(oai, "shift-forgotten", |d| d.up_shift = 0.0);
    expect(silu, "activation-gelu", |d| d.function = Function::Gelu);
    expect(silu, "activation-gelu_tanh", |d| d.function = Function::GeluTanh);
}

#[test]
fn factors_left_out() {
    let made = |f: fn(f32, f32) -> f32| {
        move |case: &mut Case<'_>, c: &MoeConfig| {
            let (ty, i) = (c.quant.dtype, c.intermediate_size);
            let d = Definition::new(c.activation);
            let rows = halves(case, "gate_up");
            let of = |row: &[u16]| {
                let one = |n| {
                    let [gate, up] = d.places(n, i).map(|p| widen(ty, row[p]));
                    narrow(ty, f(gate, up))
                };
                (0..i).map(one).collect::<Vec<_>>()
            };
            rows.chunks_exact(2 * i).flat_map(of).collect()
        }
    };
    let silu = "moe-bf16_u8b128_g32_act1";
    let o = expect(silu, "activated", "activation-forgotten", made(|g, u| g * u));
    // The first value's expert is known from the case.
    assert!(o.first_mismatch.expect("a place").expert.is_some());
    expect(silu, "activated", "up-forgotten", made(|g, _| g / (1.0 + (-g).exp())));
    // No known mistake: the place is named instead.
    let o = expect(silu, "activated", "outside-bound", made(|g, u| 1.01 * g * u));
    assert!(o.diagnosis.expect("a text").text.contains("first token 0, slot 0"));
}

#[test]
fn sums_made_wrong() {
    let made = |f: fn(&[f32], ScalarType) -> f32| {
        move |case: &mut Case<'_>, c: &MoeConfig| {
            let (ty, h, k) = (c.quant.dtype, c.hidden_size, c.top_k);
            let down = halves(case, "down");
            let of = |i: usize| {
                let term = |j| widen(ty, down[(i / h * k + j) * h + i % h]);
                narrow(ty, f(&(0..k).map(term).collect::<Vec<_>>(), ty))
            };
            (0..c.size_m * h).map(of).collect()
        }
    };
    let (two, eight) = ("moe-fp8_f16_ch", "moe-top8_f16_u4");
    let half = |t: &[f32], ty| t.iter().fold(0.0, |a, x| widen(ty, narrow(ty, a + x)));
    expect(eight, "y", "sum-in-activation-type", made(half));
    let back = |t: &[f32], ty| t.iter().rev().fold(0.0, |a, x| widen(ty, narrow(ty, a + x)));
    expect(eight, "y", "sum-in-another-order", made(back));
    let o = expect(eight, "y", "slot-dropped", made(|t, _| t[..3].iter().chain(&t[4..]).sum()));
    assert!(o.diagnosis.expect("a text").text.contains("slot 3"));
    expect(two, "y", "slot-dropped", made(|t, _| t[0]));
    expect(two, "y", "slot-doubled", made(|t, _| t[0] + 2.0 * t[1]));
    expect(two, "y", "slot-subtracted", made(|t, _| t[0] - t[1]));
    expect(two, "y", "mean-of-slots", made(|t, _| t.iter().sum::<f32>() / 2.0));
    expect(two, "y", "slots-transposed", |case, c| {
        let (ty, m, h) = (c.quant.dtype, c.size_m, c.hidden_size);
        let down = halves(case, "down");
        let of = |i: usize| narrow(ty, widen(ty, down[i]) + widen(ty, down[m * h + i]));
        (0..m * h).map(of).collect()
    });
}

/// One dropped slot of a token, in an otherwise correct batch.
#[test]
fn a_slot_dropped_in_one_token() {
    let o = expect("moe-top8_f16_u4", "y", "slot-dropped", |case, c| {
        let (ty, h, k) = (c.quant.dtype, c.hidden_size, c.top_k);
        let (down, mut y) = (halves(case, "down"), halves(case, "y"));
        for (n, y) in y[2 * h..3 * h].iter_mut().enumerate() {
            let term = |j| widen(ty, down[(2 * k + j) * h + n]);
            *y = narrow(ty, (0..k).filter(|&j| j != 6).map(term).sum());
        }
        y
    });
    let text = o.diagnosis.expect("a text").text;
    assert!(text.contains("1 tokens; first in token 2: slot 6 (expert "), "{text}");
}

/// A NaN or an infinity never matches a number.
#[test]
fn nothing_but_numbers() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (name, at) in [("activated", 300), ("y", 300)] {
            let o = expect("moe-fp8_f16_ch", name, "not-finite", |case, c| {
                let mut values = halves(case, name);
                values[at] = narrow(c.quant.dtype, bad);
                values
            });
            assert_eq!(o.mismatches, 1);
        }
    }
}

/// Zeros everywhere are a failure of every stage.
#[test]
fn all_zero() {
    for name in ["activated", "y"] {
        let bytes = golden("moe-fp8_f16_ch");
        let mut case = Case::parse(&bytes).expect("a case");
        let zeros = vec![0; halves(&case, name).len()];
        replace(&mut case, name, zeros);
        let report = check_case(&case).expect("a report");
        let output = report.outputs.iter().find(|o| o.name == name).expect("the output");
        assert_eq!(output.verdict, Verdict::Fail);
    }
}

/// The first half of every row along the last axis: the gate's columns.
fn first_half(tensor: &Tensor<'_>) -> Tensor<'static> {
    let mut shape = tensor.shape().to_vec();
    let cols = shape.last_mut().expect("an axis");
    let row = *cols * tensor.dtype().bytes();
    *cols /= 2;
    let bytes: Vec<u8> =
        tensor.bytes().chunks_exact(row).flat_map(|r| &r[..row / 2]).copied().collect();
    Tensor::new(tensor.name(), tensor.dtype(), shape, bytes).expect("half a tensor")
}

/// Without an up projection w13 has I columns. Marlin's tiles and scale blocks are 64 columns wide,
/// so the gate's half of upstream's outputs is what upstream gives for the gate alone.
#[test]
fn a_layer_without_up() {
    let bytes = golden("moe-top8_f16_u4");
    let mut case = Case::parse(&bytes).expect("a case");
    let mut c = config(&case);
    c.activation = Activation::SiluNoMul;
    let d = Definition::new(c.activation);
    let of_w13 = |n: &str| n.starts_with("w13_") || n == "gate_up";
    for tensors in [&mut case.inputs, &mut case.outputs] {
        for (_, tensor) in tensors.iter_mut().filter(|(n, _)| of_w13(n)) {
            *tensor = first_half(tensor);
        }
    }
    // These were computed with up.
    case.outputs.retain(|n, _| !["down", "y"].contains(&n.as_str()));
    let gate = halves(&case, "gate_up");
    let rows = FloatView2::from_rows("gate", c.quant.dtype, c.intermediate_size, &gate);
    let activated = d.apply(rows.expect("rows"), Chain::Upstream).expect("rows");
    replace(&mut case, "activated", activated.into_bits());
    case.config = CaseConfig::Moe(c);
    // Through a file, whose reader checks every shape against the config.
    case.raw_config.clear();
    let bytes = case.to_bytes().expect("bytes");
    let case = Case::parse(&bytes).expect("a case");
    let report = check_case(&case).expect("a report");
    assert_eq!(report.verdict, Verdict::Pass, "{report:#?}");
    for name in ["activated", "gate_up", "w13_marlin_qweight", "w13_marlin_scales"] {
        assert!(report.outputs.iter().any(|o| o.name == name), "{name}");
    }
    let mut wrong = case.clone();
    replace(&mut wrong, "activated", gate);
    let report = check_case(&wrong).expect("a report");
    let output = report.outputs.iter().find(|o| o.name == "activated").expect("the output");
    assert_eq!(output.diagnosis.as_ref().expect("a cause").id, "activation-forgotten");
}
