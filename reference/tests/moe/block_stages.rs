//! Blocks with stages around the router and the experts: transformers' outputs pass as a whole; a
//! changed input, a rule without one of its parts, and a loop without a stage fail.

use std::path::{Path, PathBuf};

use marlinspike::case::{Case, CaseConfig};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::moe::block::{Block, Stage};
use marlinspike::moe::families::RoutingRule;
use marlinspike::num::tensor::{DType, Tensor};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../golden/data/routers")
}

fn case(name: &str) -> Case<'static> {
    let bytes = std::fs::read(folder().join(format!("{name}.safetensors"))).unwrap();
    Case::parse(bytes.leak()).unwrap()
}

fn outputs(case: &Case<'_>) -> Vec<OutputReport> {
    check_case(case).unwrap().outputs
}

/// Outputs that fail.
fn failing(case: &Case<'_>) -> Vec<String> {
    let failed = outputs(case).into_iter().filter(|o| o.verdict == Verdict::Fail);
    failed.map(|o| o.name).collect()
}

const SMALL: [&str; 9] = [
    "axk1-small",
    "deepseek_v4-hash-small",
    "ernie4_5_vl_moe-small",
    "gemma4_text-small",
    "inkling-small",
    "inkling2-small",
    "muse_spark-small",
    "nemotron_h-latent-small",
    "zaya-skip-small",
];

#[track_caller]
fn passes_as_a_whole(name: &str, case: &Case<'_>) {
    let outputs = outputs(case);
    for part in ["router_logits", "topk_ids", "topk_weights", "y"] {
        assert!(outputs.iter().any(|o| o.name == part), "{name}: {part} is not judged");
    }
    for o in &outputs {
        assert_eq!(o.verdict, Verdict::Pass, "{name}: {} {:?}", o.name, o.diagnosis);
        assert_eq!(o.unbounded, 0, "{name}: {}", o.name);
    }
}

#[test]
fn transformers_blocks_pass_as_a_whole() {
    for name in SMALL {
        let case = case(name);
        passes_as_a_whole(name, &case);
        // Through a case file of this project, too.
        let written = case.to_bytes().unwrap();
        passes_as_a_whole(name, &Case::parse(&written).unwrap());
    }
}

/// Every file of a folder that `scripts/gen/router_blocks.py` made, if `MARLINSPIKE_ROUTER_BLOCKS`
/// names one: all pass, and each planted error is rejected.
#[test]
fn blocks_of_a_folder() {
    let Some(root) = std::env::var_os("MARLINSPIKE_ROUTER_BLOCKS") else { return };
    let mut files: Vec<_> =
        std::fs::read_dir(Path::new(&root)).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    let mut faults = Vec::new();
    for path in &files {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let bytes = std::fs::read(path).unwrap();
        let found = std::panic::catch_unwind(|| {
            let case = Case::parse(&bytes).unwrap();
            passes_as_a_whole(name, &case);
            planted(name, &case);
            for o in outputs(&case) {
                let ratio = o.max_error_over_bound.unwrap_or_default();
                println!("{name} {}: {ratio:.3} of the bound", o.name);
            }
        });
        if let Err(e) = found {
            let text = e.downcast_ref::<String>().cloned().unwrap_or_default();
            println!("{name}: {text}");
            faults.push(name.to_owned());
        }
    }
    println!("{} files", files.len());
    assert!(faults.is_empty(), "{faults:?}");
}

fn floats(t: &Tensor<'_>) -> Vec<f64> {
    match t.dtype() {
        DType::BF16 => {
            let wide = |&b: &u16| f64::from(f32::from_bits(u32::from(b) << 16));
            t.elements::<u16>().iter().map(wide).collect()
        }
        _ => t.elements::<f32>().iter().map(|&x| f64::from(x)).collect(),
    }
}

fn input(case: &Case<'_>, name: &str) -> Vec<f64> {
    floats(case.inputs.get(name).unwrap_or_else(|| panic!("{name}: {:?}", case.inputs.keys())))
}

fn output(case: &Case<'_>, name: &str) -> Vec<f64> {
    floats(case.output(name).unwrap())
}

fn f32s(shape: &[usize], values: Vec<f64>) -> Tensor<'static> {
    let values = values.into_iter().map(|x| x as f32).collect();
    Tensor::from_vec("", DType::F32, shape.to_vec(), values).unwrap()
}

/// The case with changed numbers of an output.
fn with_output<'a>(case: &Case<'a>, name: &str, change: impl Fn(&mut [f64])) -> Case<'a> {
    let (shape, mut values) = (case.output(name).unwrap().shape().to_vec(), output(case, name));
    change(&mut values);
    let mut case = case.clone();
    case.add_output(name, f32s(&shape, values));
    case
}

/// The case with changed numbers of an input.
fn with_input<'a>(case: &Case<'a>, name: &str, change: impl Fn(&mut [f64])) -> Case<'a> {
    let (shape, mut values) = (case.inputs[name].shape().to_vec(), input(case, name));
    change(&mut values);
    let mut case = case.clone();
    case.add_input(name, f32s(&shape, values));
    case
}

fn with_integers<'a>(case: &Case<'a>, name: &str, change: impl Fn(&mut [i32])) -> Case<'a> {
    let mut case = case.clone();
    let tensor = case.inputs[name].clone();
    let mut values = tensor.elements::<i32>().into_owned();
    change(&mut values);
    let shape = tensor.shape().to_vec();
    case.add_input(name, Tensor::from_vec("", DType::I32, shape, values).unwrap());
    case
}

fn with_config<'a>(case: &Case<'a>, change: impl Fn(&mut Block, &mut RoutingRule)) -> Case<'a> {
    let mut case = case.clone();
    let CaseConfig::Router(config) = &mut case.config else { panic!("a router") };
    let (Some(block), Some(rule)) = (&mut config.block, &mut config.rule) else {
        panic!("a block")
    };
    change(block, rule);
    case
}

#[track_caller]
fn rejected(name: &str, what: &str, case: &Case<'_>, output: &str) {
    let failing = failing(case);
    assert!(failing.iter().any(|f| f == output), "{name}, {what}: only {failing:?} fail");
}

/// Errors in the outputs of any block.
#[track_caller]
fn planted(name: &str, case: &Case<'_>) {
    let columns = case.output("y").unwrap().shape()[1];
    let scaled = with_output(case, "y", |y| y.iter_mut().for_each(|y| *y *= 1.003));
    rejected(name, "y times 1.003", &scaled, "y");
    let one = with_output(case, "y", |y| {
        let largest = y[columns..2 * columns].iter().fold(0.0, |a: f64, y| a.max(y.abs()));
        y[columns + 3] += 0.02 * largest;
    });
    rejected(name, "one value", &one, "y");
    let experts = case.output("router_logits").unwrap().shape()[1];
    let exchanged = with_output(case, "router_logits", |l| {
        l.chunks_mut(experts).for_each(|row| row.swap(0, 1));
    });
    rejected(name, "logits of two experts exchanged", &exchanged, "router_logits");
    let halved = with_output(case, "topk_weights", |w| {
        w.iter_mut().for_each(|w| *w *= 1.0001);
    });
    rejected(name, "weights times 1.0001", &halved, "topk_weights");
}

#[test]
fn planted_errors_are_rejected() {
    for name in SMALL {
        planted(name, &case(name));
    }
}

/// A wrong number in each tensor that a stage or a rule reads, and a rule without one of its parts.
#[test]
fn changed_stages_are_rejected() {
    let plus_one = |x: &mut [f64]| x.iter_mut().for_each(|x| *x += 1.0);
    let bump = |x: &mut [f64]| x[x.len() / 2] += 0.25;
    for (name, tensor, output) in [
        ("axk1-small", "post_mlp_layernorm_weight", "y"),
        ("gemma4_text-small", "router_scale", "router_logits"),
        ("gemma4_text-small", "pre_feedforward_layernorm_2_weight", "y"),
        ("gemma4_text-small", "post_feedforward_layernorm_2_weight", "y"),
        ("gemma4_text-small", "expert_scale", "topk_weights"),
        ("nemotron_h-latent-small", "fc1_latent_proj_weight", "y"),
        ("nemotron_h-latent-small", "fc2_latent_proj_weight", "y"),
        ("muse_spark-small", "pre_expert_norm_weight", "y"),
        ("muse_spark-small", "pre_expert_proj_weight", "y"),
        ("muse_spark-small", "experts_post_expert_norm_weight", "y"),
        ("muse_spark-small", "post_expert_proj_weight", "y"),
        ("inkling-small", "expert_scale", "topk_weights"),
        ("inkling-small", "shared_w13", "y"),
        ("inkling-small", "shared_w2", "y"),
        ("zaya-skip-small", "gate_down_proj_weight", "router_logits"),
        ("zaya-skip-small", "gate_router_mlp_norm_weight", "router_logits"),
        ("zaya-skip-small", "gate_router_mlp_fc1_bias", "router_logits"),
        ("zaya-skip-small", "gate_router_mlp_fc2_weight", "router_logits"),
    ] {
        let case = case(name);
        rejected(name, &format!("{tensor} + 1"), &with_input(&case, tensor, plus_one), output);
        rejected(
            name,
            &format!("one number of {tensor}"),
            &with_input(&case, tensor, bump),
            output,
        );
    }
    let config = |name: &str, output: &str, change: &dyn Fn(&mut Block, &mut RoutingRule)| {
        rejected(name, "config", &with_config(&case(name), |b, r| change(b, r)), output);
    };
    config("inkling2-small", "y", &|b, _| b.gate_softcap = None);
    config("inkling2-small", "y", &|b, _| b.up_softcap = Some(5.0));
    config("inkling2-small", "y", &|b, _| b.interleaved = false);
    config("muse_spark-small", "router_logits", &|b, _| b.logit_multiplier = None);
    config("muse_spark-small", "y", &|b, _| b.expert_output.clear());
    let first = |stages: &mut Vec<Stage>, first: bool| {
        let Some(Stage::RmsNorm { weight_first, .. }) = stages.last_mut() else { panic!("a norm") };
        *weight_first = first;
    };
    config("muse_spark-small", "y", &|b, _| first(&mut b.expert_output, false));
    config("axk1-small", "y", &|b, _| b.output.clear());
    config("gemma4_text-small", "router_logits", &|b, _| {
        b.router_input.pop();
    });
    config("inkling-small", "topk_weights", &|_, r| r.routed_scaling_factor = 4.0);
}

/// Tables and types of tokens.
#[test]
fn changed_tokens_are_rejected() {
    let hash = case("deepseek_v4-hash-small");
    let first = hash.inputs["token_ids"].elements::<i32>()[0] as usize;
    // The row of the first token gets other experts: those that it does not have.
    let other = with_integers(&hash, "token_table", |table| {
        let free: Vec<i32> = (0..4).filter(|e| !table[2 * first..][..2].contains(e)).collect();
        table[2 * first..][..2].copy_from_slice(&free);
    });
    rejected("hash", "another row", &other, "topk_ids");
    let outside = with_integers(&hash, "token_ids", |ids| ids[0] = 1 << 20);
    assert!(outside.validate().unwrap_err().to_string().contains("in.token_ids"));
    let twice = with_integers(&hash, "token_table", |t| t[2 * first + 1] = t[2 * first]);
    assert!(check_case(&twice).unwrap_err().to_string().contains("distinct experts"));

    let types = case("ernie4_5_vl_moe-small");
    let kinds = types.inputs["token_types"].elements::<i32>().into_owned();
    assert!(kinds.contains(&0) && kinds.contains(&1), "{kinds:?}");
    let flipped = with_integers(&types, "token_types", |t| t.iter_mut().for_each(|t| *t = 1 - *t));
    for output in ["router_logits", "y"] {
        rejected("ernie", "text as vision", &flipped, output);
    }
    let third = with_integers(&types, "token_types", |t| t[1] = 2);
    assert!(third.validate().unwrap_err().to_string().contains("in.token_types"));

    // Logits of the shared experts, stated and wrong.
    let shared = case("inkling-small");
    let mut stated = shared.clone();
    stated.add_input("shared_logits", f32s(&[6, 2], vec![0.0; 12]));
    rejected("inkling", "shared logits", &stated, "topk_weights");

    // A skipped token that is not skipped.
    let zaya = case("zaya-skip-small");
    let weights = output(&zaya, "topk_weights");
    let skipped = weights.iter().position(|w| *w == 0.0).expect("a skipped token");
    let ran = with_output(&zaya, "topk_weights", |w| w[skipped] = 0.3);
    assert!(!failing(&ran).is_empty());
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The diagnosis of the case with this `y`.
fn diagnosis(case: &Case<'_>, y: Vec<f64>) -> (Verdict, Option<String>) {
    let mut case = case.clone();
    let shape = case.output("y").unwrap().shape().to_vec();
    case.add_output("y", f32s(&shape, y));
    let y = outputs(&case).into_iter().find(|o| o.name == "y").unwrap();
    (y.verdict, y.diagnosis.map(|d| d.id))
}

/// axk1's block by loops: 16 features, the shared expert 4.
#[test]
fn an_output_without_its_norm_is_named() {
    let case = case("axk1-small");
    let (x, routed) = (input(&case, "hidden_states"), output(&case, "y_experts"));
    let (w13, w2) = (input(&case, "shared_w13"), input(&case, "shared_w2"));
    let weight = input(&case, "post_mlp_layernorm_weight");
    let (mut sum, mut normed) = (Vec::new(), Vec::new());
    for (x, routed) in x.chunks(16).zip(routed.chunks(16)) {
        let gate_up: Vec<f64> = w13.chunks(16).map(|row| dot(row, x)).collect();
        let size_s = gate_up.len() / 2;
        let a: Vec<f64> =
            (0..size_s).map(|i| gate_up[i] * sigmoid(gate_up[i]) * gate_up[size_s + i]).collect();
        let y: Vec<f64> = w2.chunks(size_s).zip(routed).map(|(row, r)| r + dot(row, &a)).collect();
        let root = (dot(&y, &y) / 16.0 + 1e-6).sqrt();
        normed.extend(y.iter().zip(&weight).map(|(y, w)| y / root * w));
        sum.extend(y);
    }
    assert_eq!(diagnosis(&case, normed), (Verdict::Pass, None));
    assert_eq!(diagnosis(&case, sum), (Verdict::Fail, Some("output-norm-left-out".to_owned())));
}

/// inkling2's experts by loops: 16 features, 4 between the products, gate and up alternate.
#[test]
fn an_activation_without_its_caps_is_named() {
    let case = case("inkling2-small");
    let (x, w13, w2) = (input(&case, "hidden_states"), input(&case, "w13"), input(&case, "w2"));
    let ids = case.output("topk_ids").unwrap().elements::<i32>().into_owned();
    let weights = output(&case, "topk_weights");
    let (k, i) = (ids.len() / 6, 4);
    let block = |cap: &dyn Fn(f64, f64) -> f64| {
        let mut y = vec![0.0; 6 * 16];
        for (s, (&e, w)) in ids.iter().zip(&weights).enumerate() {
            let (e, x) = (e as usize, &x[s / k * 16..][..16]);
            let row = |n: usize| dot(&w13[(e * 2 * i + n) * 16..][..16], x);
            let a: Vec<f64> = (0..i)
                .map(|j| (row(2 * j), row(2 * j + 1)))
                .map(|(g, u)| cap(g, 4.0) * sigmoid(g) * cap(u, 25.0))
                .collect();
            for h in 0..16 {
                y[s / k * 16 + h] += w * dot(&w2[(e * 16 + h) * i..][..i], &a);
            }
        }
        y
    };
    let capped = block(&|x, c| c * (x / c).tanh());
    assert_eq!(diagnosis(&case, capped), (Verdict::Pass, None));
    let named = (Verdict::Fail, Some("softcap-left-out".to_owned()));
    assert_eq!(diagnosis(&case, block(&|x, _| x)), named);
}
