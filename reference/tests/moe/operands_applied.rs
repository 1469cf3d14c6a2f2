//! A schedule that drops an operand of its product (router weights, a bias, scales) explains no output:
//! an undeclared one is not tried, a declared one is an error.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::num::scalar::{ScalarType, f64_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::{Rng, case_of};
use serde_json::{Value, json};

const M: usize = 3;
const E: usize = 4;
const T: usize = 2;
const H: usize = 32;
const I: usize = 64;
const ROUTER: [f32; 6] = [0.5, 0.25, 2.0, 0.5, 4.0, 0.125];
const IDS: [i32; 6] = [2, 0, 1, 3, 3, 2];

/// Codes of ±1 and ±2 in e4m3, whose products have the same sum in every order.
fn codes(rng: &mut Rng, count: usize) -> Vec<u8> {
    (0..count).map(|_| rng.pick(&[0x38, 0x40, 0xb8, 0xc0])).collect()
}

fn value(code: u8) -> f64 {
    ScalarType::FLOAT8_E4M3FN.to_f64(code.into())
}

/// A layer whose second product has a scale of 2^-2 for each row and of 2^-1 for each column.
struct Layer {
    a2q: Vec<u8>,
    w2: Vec<u8>,
}

impl Layer {
    fn new() -> Self {
        let mut rng = Rng::new(5);
        Self { a2q: codes(&mut rng, M * T * I), w2: codes(&mut rng, E * H * I) }
    }

    /// `down` with `weight(slot)` as the router weight. Sums and scales are exact.
    fn down(&self, weight: impl Fn(usize) -> f64) -> Vec<u16> {
        let one = |i: usize| {
            let (r, n) = (i / H, i % H);
            let row = (IDS[r] as usize * H + n) * I;
            let terms = (0..I).map(|k| value(self.a2q[r * I + k]) * value(self.w2[row + k]));
            f64_to_bf16_rne(terms.sum::<f64>() * 0.25 * 0.5 * weight(r))
        };
        (0..M * T * H).map(one).collect()
    }

    fn report(&self, down: Vec<u16>) -> OutputReport {
        let config = json!({"dtype": "bfloat16", "size_m": M, "num_experts": E, "top_k": T,
            "hidden_size": H, "intermediate_size": I, "activation": "silu",
            "per_act_token_quant": true, "per_out_ch_quant": true});
        let config = CaseConfig::from_json(Op::Fp8Moe, config.as_object().unwrap()).unwrap();
        let mut case = Case::new("layer", config, "computed here");
        let e4m3 = |shape: &[usize], bytes: Vec<u8>| {
            Tensor::new("e4m3", DType::F8E4M3, shape.to_vec(), bytes).unwrap()
        };
        let floats = |shape: &[usize], values: Vec<f32>| {
            Tensor::from_vec("f32", DType::F32, shape.to_vec(), values).unwrap()
        };
        let halves = |shape: &[usize], bits: Vec<u16>| {
            Tensor::from_vec("bf16", DType::BF16, shape.to_vec(), bits).unwrap()
        };
        case.add_input("x", halves(&[M, H], vec![0x3f80; M * H]));
        case.add_input("topk_weights", floats(&[M, T], ROUTER.to_vec()));
        let ids = Tensor::from_vec("ids", DType::I32, vec![M, T], IDS.to_vec()).unwrap();
        case.add_input("topk_ids", ids);
        case.add_input("w13_weight", e4m3(&[E, 2 * I, H], vec![0x38; E * 2 * I * H]));
        case.add_input("w13_weight_scale", floats(&[E, 2 * I, 1], vec![0.5; E * 2 * I]));
        case.add_input("w2_weight", e4m3(&[E, H, I], self.w2.clone()));
        case.add_input("w2_weight_scale", floats(&[E, H, 1], vec![0.5; E * H]));
        case.add_output("a2q", e4m3(&[M * T, I], self.a2q.clone()));
        case.add_output("a2q_scale", floats(&[M * T, 1], vec![0.25; M * T]));
        case.add_output("down", halves(&[M * T, H], down));
        case.validate().unwrap();
        let outputs = check_case(&case).unwrap().outputs;
        outputs.into_iter().find(|o| o.name == "down").unwrap()
    }
}

#[test]
fn down_without_router_weights_is_no_known_schedules() {
    let layer = Layer::new();
    let weight = |r: usize| f64::from(ROUTER[r]);
    let right = layer.report(layer.down(weight));
    assert_eq!(right.verdict, Verdict::Pass, "{right:?}");
    assert!(right.note.as_ref().is_some_and(|n| n.contains("known schedule")), "{right:?}");
    let missing = layer.report(layer.down(|_| 1.0));
    assert_eq!(missing.verdict, Verdict::Fail, "{missing:?}");
    let id = missing.diagnosis.map(|d| d.id);
    assert_eq!(id.as_deref(), Some("router-weight-missing"));
    let twice = layer.report(layer.down(|r| weight(r) * weight(r)));
    assert_eq!(twice.verdict, Verdict::Fail, "{twice:?}");
}

/// A schedule of e4m3 operands with these steps in f32.
fn schedule(steps: &[&str]) -> Value {
    let mut epilogue: Vec<Value> =
        steps.iter().map(|op| json!({"op": op, "type": "float32"})).collect();
    epilogue.push(json!({"op": "round", "type": "bfloat16"}));
    json!({"unit": {"architecture": "hopper", "instruction": "wgmma", "a": "float8_e4m3fn",
        "b": "float8_e4m3fn", "accumulator": "float32", "size_k": 32},
        "weights": {"form": "unscaled"}, "chunk_sum": {"order": "ascending", "type": "float32"},
        "epilogue": epilogue})
}

/// What `check` says to a case whose outputs a declared schedule made.
fn declared(op: Op, config: &Value) -> Result<Vec<Verdict>, String> {
    let config = CaseConfig::from_json(op, config.as_object().unwrap()).unwrap();
    let case = case_of(config, &mut Rng::new(3)).unwrap();
    let report = check_case(&case).map_err(|e| e.to_string())?;
    Ok(report.outputs.iter().map(|o| o.verdict).collect())
}

#[test]
fn a_declared_schedule_that_drops_an_operand_is_an_error() {
    let product = |steps: &[&str]| {
        let config = json!({"dtype": "bfloat16", "size_m": 3, "size_n": 32, "size_k": 64,
            "per_act_token_quant": true, "per_out_ch_quant": true, "has_bias": true,
            "schedule": schedule(steps)});
        declared(Op::ScaledMm, &config)
    };
    let layer = |steps: &[&str]| {
        let config = json!({"dtype": "bfloat16", "size_m": M, "num_experts": E, "top_k": T,
            "hidden_size": 64, "intermediate_size": 64, "activation": "silu",
            "per_act_token_quant": true, "per_out_ch_quant": true,
            "schedule_w13": schedule(steps), "schedule_w2": schedule(steps)});
        declared(Op::Fp8Moe, &config)
    };
    for (found, dropped) in [
        (product(&["channel_scale", "activation_scale", "bias"]), None),
        (product(&["channel_scale", "activation_scale_bias"]), None),
        (product(&["channel_scale", "activation_scale"]), Some("bias")),
        (product(&["activation_scale", "bias"]), Some("channel_scale")),
        (product(&["channel_scale", "bias"]), Some("activation_scale")),
        (layer(&["activation_scale", "channel_scale", "router_weight"]), None),
        (layer(&["activation_scale", "channel_scale"]), Some("router_weight")),
    ] {
        match dropped {
            None => assert!(found.unwrap().iter().all(|v| *v == Verdict::Pass)),
            Some(step) => {
                let error = found.expect_err(step);
                assert!(error.contains(&format!("expected a step like `{step}`")), "{error}");
            }
        }
    }
}
