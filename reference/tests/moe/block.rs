//! Whole MoE blocks: transformers' outputs pass; outputs with a mistake, computed by loops over the
//! checkpoint's tensors written here, fail with its name.

use std::path::PathBuf;

use marlinspike::case::{Case, CaseConfig};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::container::Container;
use marlinspike::num::tensor::{DType, Tensor};

/// A file's bytes.
struct File(Vec<u8>);

/// What a computation does otherwise.
#[derive(Clone, Copy, Default)]
struct Wrong {
    no_weights: bool,
    exchanged: bool,
    halves: bool,
    plain: bool,
    unlimited: bool,
    no_bias: bool,
    last_slot: bool,
}

impl File {
    fn read(name: &str) -> Self {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../golden/data/routers");
        Self(std::fs::read(root.join(format!("{name}.safetensors"))).unwrap())
    }

    fn floats(&self, name: &str) -> Vec<f64> {
        let file = Container::parse(&self.0).unwrap();
        let t = file.tensor(name).unwrap();
        match t.dtype() {
            DType::BF16 => {
                let wide = |&b: &u16| f64::from(f32::from_bits(u32::from(b) << 16));
                t.elements::<u16>().iter().map(wide).collect()
            }
            _ => t.elements::<f32>().iter().map(|&x| f64::from(x)).collect(),
        }
    }

    fn ids(&self) -> Vec<usize> {
        let file = Container::parse(&self.0).unwrap();
        let ids = file.tensor("out.topk_ids").unwrap();
        ids.elements::<i32>().iter().map(|&id| id as usize).collect()
    }

    /// The case, with `y` of all tokens replaced.
    fn with_y(&self, y: Vec<f32>) -> OutputReport {
        let mut case = Case::parse(&self.0).unwrap();
        let shape = case.output("y").unwrap().shape().to_vec();
        case.add_output("y", Tensor::from_vec("y", DType::F32, shape, y).unwrap());
        let report = check_case(&case).unwrap();
        report.outputs.into_iter().find(|o| o.name == "y").unwrap()
    }

    /// y without shared experts, for 96 features and 32 between the products.
    fn y(&self, expert: impl Fn(usize, &[f64], Wrong) -> Vec<f64>, wrong: Wrong) -> Vec<f64> {
        let (x, ids, weights) =
            (self.floats("in.hidden_states"), self.ids(), self.floats("out.topk_weights"));
        let (h, tokens) = (96, x.len() / 96);
        let k = ids.len() / tokens;
        let mut y = vec![0.0; x.len()];
        for s in 0..ids.len() {
            let (t, j) = (s / k, s % k);
            if wrong.last_slot && j + 1 == k {
                continue;
            }
            let w = if wrong.no_weights { 1.0 } else { weights[s] };
            let out = expert(ids[s], &x[t * h..][..h], wrong);
            y[t * h..][..h].iter_mut().zip(out).for_each(|(y, o)| *y += w * o);
        }
        y
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn silu(x: f64, alpha: f64) -> f64 {
    x / (1.0 + (-alpha * x).exp())
}

fn round(y: &[f64]) -> Vec<f32> {
    y.iter().map(|&y| y as f32).collect()
}

/// An expert of mixtral: matrices `[32, 96]` and `[96, 32]`.
fn mixtral(file: &File) -> impl Fn(usize, &[f64], Wrong) -> Vec<f64> {
    let matrices: Vec<[Vec<f64>; 3]> = (0..8)
        .map(|e| {
            ["w1", "w3", "w2"]
                .map(|p| file.floats(&format!("in.block_sparse_moe.experts.{e}.{p}.weight")))
        })
        .collect();
    move |e, x, wrong| {
        let [gate, up, down] = &matrices[e];
        let rows = |m: &[f64]| m.chunks(96).map(|r| dot(r, x)).collect::<Vec<_>>();
        let (mut g, mut u) = (rows(gate), rows(up));
        if wrong.exchanged {
            std::mem::swap(&mut g, &mut u);
        }
        let a: Vec<f64> = g.iter().zip(&u).map(|(g, u)| silu(*g, 1.0) * u).collect();
        down.chunks(32).map(|r| dot(r, &a)).collect()
    }
}

/// An expert of gpt-oss: `[96, 64]` with alternating columns, `[32, 96]`, biases.
fn gpt_oss(file: &File) -> impl Fn(usize, &[f64], Wrong) -> Vec<f64> {
    let [gate_up, gate_up_bias, down, down_bias] =
        ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
            .map(|p| file.floats(&format!("in.mlp.experts.{p}")));
    move |e, x, wrong| {
        let bias = |b: &[f64], i: usize| if wrong.no_bias { 0.0 } else { b[i] };
        let column = |c: usize| -> f64 {
            let product = (0..96).map(|h| x[h] * gate_up[(e * 96 + h) * 64 + c]);
            product.sum::<f64>() + bias(&gate_up_bias, e * 64 + c)
        };
        let a: Vec<f64> = (0..32)
            .map(|i| {
                let (g, u) = match wrong.halves {
                    true => (column(i), column(32 + i)),
                    false => (column(2 * i), column(2 * i + 1)),
                };
                if wrong.plain {
                    return silu(g, 1.0) * u;
                }
                let limit = if wrong.unlimited { f64::INFINITY } else { 7.0 };
                silu(g.min(limit), 1.702) * (u.clamp(-limit, limit) + 1.0)
            })
            .collect();
        let out = |h: usize| -> f64 {
            let product = (0..32).map(|i| a[i] * down[(e * 32 + i) * 96 + h]);
            product.sum::<f64>() + bias(&down_bias, e * 96 + h)
        };
        (0..96).map(out).collect()
    }
}

#[test]
fn a_naive_loop_passes() {
    for (name, right) in [
        ("mixtral", File::read("mixtral").y(mixtral(&File::read("mixtral")), Wrong::default())),
        ("gpt_oss", File::read("gpt_oss").y(gpt_oss(&File::read("gpt_oss")), Wrong::default())),
    ] {
        let report = File::read(name).with_y(round(&right));
        assert_eq!(report.verdict, Verdict::Pass, "{name}: {:?}", report.diagnosis);
    }
}

#[track_caller]
fn named(report: &OutputReport, id: &str) {
    assert_eq!(report.verdict, Verdict::Fail, "{id}");
    let diagnosis = report.diagnosis.as_ref().unwrap();
    assert_eq!(diagnosis.id, id, "{}", diagnosis.text);
    assert_eq!(diagnosis.unexplained, 0);
}

#[test]
fn mistakes_are_named() {
    let none = Wrong::default();
    let file = File::read("mixtral");
    for (wrong, id) in [
        (Wrong { no_weights: true, ..none }, "router-weight-missing"),
        (Wrong { exchanged: true, ..none }, "gate-up-swapped"),
        (Wrong { last_slot: true, ..none }, "slot-dropped"),
    ] {
        named(&file.with_y(round(&file.y(mixtral(&file), wrong))), id);
    }
    let file = File::read("gpt_oss");
    for (wrong, id) in [
        (Wrong { halves: true, ..none }, "gate-up-in-halves"),
        (Wrong { plain: true, ..none }, "plain-silu"),
        (Wrong { no_bias: true, ..none }, "bias-missing"),
    ] {
        named(&file.with_y(round(&file.y(gpt_oss(&file), wrong))), id);
    }
    // The routed sum where the whole block belongs.
    let file = File::read("deepseek_v3");
    named(&file.with_y(round(&file.floats("out.y_experts"))), "shared-expert-left-out");
}

/// One value that is off by 2^-9 of the row's largest.
#[test]
fn one_wrong_value_fails() {
    for name in ["qwen3_moe", "glm4_moe", "llama4_text-top2"] {
        let file = File::read(name);
        let mut y = round(&file.floats("out.y"));
        let largest = y[..96].iter().fold(0f32, |a, y| a.max(y.abs()));
        y[17] += largest * 2f32.powi(-9);
        let report = file.with_y(y);
        assert_eq!((report.verdict, report.mismatches), (Verdict::Fail, 1), "{name}");
        assert_eq!(report.first_mismatch.unwrap().index, [0, 17]);
    }
}

/// The case with its block is written and read back.
#[test]
fn a_block_survives_a_file() {
    let bytes = File::read("deepseek_v3").0;
    let case = Case::parse(&bytes).unwrap();
    let written = case.to_bytes().unwrap();
    let again = Case::parse(&written).unwrap();
    assert_eq!(again.inputs.keys().collect::<Vec<_>>(), case.inputs.keys().collect::<Vec<_>>());
    let CaseConfig::Router(config) = &again.config else { panic!("a router") };
    assert_eq!(config.block.as_ref().unwrap().shared_intermediate_size, 32);
    let verdicts = |case: &Case<'_>| -> Vec<_> {
        check_case(case).unwrap().outputs.iter().map(|o| (o.name.clone(), o.verdict)).collect()
    };
    assert_eq!(verdicts(&again), verdicts(&case));
}

/// Inputs of another shape or with NaN are refused by name.
#[test]
fn inputs_are_refused_by_name() {
    let bytes = File::read("mixtral").0;
    let case = Case::parse(&bytes).unwrap();
    let refused = |name: &str, tensor: Tensor<'static>| {
        let mut case = case.clone();
        case.add_input(name, tensor);
        case.validate().unwrap_err().to_string()
    };
    let zeros = |shape: Vec<usize>| {
        let len = shape.iter().product();
        Tensor::from_vec("", DType::F32, shape, vec![0f32; len]).unwrap()
    };
    let error = refused("w2", zeros(vec![8, 32, 96]));
    assert!(error.contains("in.w2") && error.contains("[8, 96, 32]"), "{error}");
    let error = refused("hidden_states", zeros(vec![3, 96]));
    assert!(error.contains("in.hidden_states") && error.contains("rows"), "{error}");
    let nan = Tensor::from_vec("", DType::F32, vec![8, 96, 32], vec![f32::NAN; 8 * 96 * 32]);
    let error = refused("w2", nan.unwrap());
    assert!(error.contains("in.w2") && error.contains("NaN"), "{error}");
}

/// The values of a tensor of a case, as numbers.
fn numbers(case: &Case<'_>, name: &str) -> Vec<f64> {
    let t = case.inputs.get(name).or(case.outputs.get(name)).unwrap();
    match t.dtype() {
        DType::BF16 => {
            let wide = |&b: &u16| f64::from(f32::from_bits(u32::from(b) << 16));
            t.elements::<u16>().iter().map(wide).collect()
        }
        _ => t.elements::<f32>().iter().map(|&x| f64::from(x)).collect(),
    }
}

fn f32s(shape: &[usize], values: &[f64]) -> Tensor<'static> {
    Tensor::from_vec("", DType::F32, shape.to_vec(), round(values)).unwrap()
}

fn verdict_on_y(case: &Case<'_>) -> (Verdict, Option<String>) {
    let report = check_case(case).unwrap();
    let y = report.outputs.into_iter().find(|o| o.name == "y").unwrap();
    (y.verdict, y.diagnosis.map(|d| d.id))
}

/// What the shared expert of the golden block added, under another rule for the sum.
#[test]
fn gates_means_and_biases_of_the_sum() {
    let bytes = File::read("deepseek_v3").0;
    let golden = Case::parse(&bytes).unwrap();
    let (x, routed, y) =
        (numbers(&golden, "hidden_states"), numbers(&golden, "y_experts"), numbers(&golden, "y"));
    let tokens = y.len() / 96;
    let with = |change: &dyn Fn(&mut Case<'_>), y: &[f64]| {
        let mut case = golden.clone();
        change(&mut case);
        case.add_output("y", f32s(&[tokens, 96], y));
        verdict_on_y(&case)
    };
    let fails = |id: &str| (Verdict::Fail, Some(id.to_owned()));

    let gate: Vec<f64> = (0..96).map(|h| f64::from(h % 7) / 16.0 - 0.2).collect();
    let gated: Vec<f64> = (0..y.len())
        .map(|i| {
            let logit = dot(&gate, &x[i / 96 * 96..][..96]);
            routed[i] + (y[i] - routed[i]) / (1.0 + (-logit).exp())
        })
        .collect();
    let add_gate = |case: &mut Case<'_>| case.add_input("shared_gate", f32s(&[1, 96], &gate));
    assert_eq!(with(&add_gate, &gated), (Verdict::Pass, None));
    assert_eq!(with(&add_gate, &y), fails("shared-gate-left-out"));

    let mean: Vec<f64> = y.iter().map(|y| y / 2.0).collect();
    let averaged = |case: &mut Case<'_>| {
        let CaseConfig::Router(config) = &mut case.config else { panic!("a router") };
        config.block.as_mut().unwrap().shared_is_averaged = true;
    };
    assert_eq!(with(&averaged, &mean), (Verdict::Pass, None));
    assert_eq!(with(&averaged, &y), fails("shared-expert-added"));

    let bias: Vec<f64> = (0..96).map(|h| 0.5 - f64::from(h) / 64.0).collect();
    let biased: Vec<f64> = y.iter().enumerate().map(|(i, y)| y + bias[i % 96]).collect();
    let add_bias = |case: &mut Case<'_>| case.add_input("output_bias", f32s(&[96], &bias));
    assert_eq!(with(&add_bias, &biased), (Verdict::Pass, None));
    assert_eq!(with(&add_bias, &y), fails("output-bias-left-out"));
}

/// An id after the last expert adds the token itself.
#[test]
fn zero_experts_add_their_input() {
    let bytes = File::read("mixtral").0;
    let mut case = Case::parse(&bytes).unwrap();
    let CaseConfig::Router(config) = &mut case.config else { panic!("a router") };
    config.rule.as_mut().unwrap().zero_experts = 1;
    let [tokens, experts] = case.input("router_logits").unwrap().dims2().unwrap();
    // The zero expert's logit is the lowest, but the last slot of each token goes to it.
    let logits = numbers(&case, "router_logits");
    let wider: Vec<f64> =
        logits.chunks(experts).flat_map(|r| r.iter().copied().chain([-9.0])).collect();
    case.inputs.remove("router_weight");
    case.outputs.remove("router_logits");
    case.add_input("router_logits", f32s(&[tokens, experts + 1], &wider));
    let file = File::read("mixtral");
    let (x, mut ids, weights) =
        (file.floats("in.hidden_states"), file.ids(), file.floats("out.topk_weights"));
    let kept = file.y(mixtral(&file), Wrong { last_slot: true, ..Wrong::default() });
    let y: Vec<f64> =
        kept.iter().enumerate().map(|(i, y)| y + weights[i / 96 * 2 + 1] * x[i]).collect();
    ids.iter_mut().skip(1).step_by(2).for_each(|id| *id = experts);
    let ids: Vec<i32> = ids.into_iter().map(|id| id as i32).collect();
    case.add_output("topk_ids", Tensor::from_vec("", DType::I32, vec![tokens, 2], ids).unwrap());
    case.add_output("y", f32s(&[tokens, 96], &y));
    assert_eq!(verdict_on_y(&case), (Verdict::Pass, None));
    case.add_output("y", f32s(&[tokens, 96], &kept));
    assert_eq!(verdict_on_y(&case), (Verdict::Fail, Some("slot-dropped".to_owned())));
}
