//! Router logits of −∞ mask their experts; compared with a sort of f64 scores.

use marlinspike::Error;
use marlinspike::case::{Case, CaseConfig, GroupedTopk, RouterConfig, ScoringFunc};
use marlinspike::check::{Verdict, check_case};
use marlinspike::moe::router::Router;
use marlinspike::num::array::rows_of;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_golden::Manifest;

const NEVER: f32 = f32::NEG_INFINITY;

/// Ids and weights of one row: scores in f64, the best `top_k`, the lower id first.
fn naive(
    row: &[f32],
    scoring: ScoringFunc,
    top_k: usize,
    renormalize: bool,
) -> (Vec<i32>, Vec<f64>) {
    let max = row.iter().copied().fold(NEVER, f32::max);
    let scores: Vec<f64> = match scoring {
        ScoringFunc::Sigmoid => row.iter().map(|&x| 1.0 / (1.0 + f64::from(-x).exp())).collect(),
        _ => {
            let e: Vec<f64> = row.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.iter().map(|e| e / sum).collect()
        }
    };
    let mut left: Vec<usize> = (0..row.len()).collect();
    let mut ids = Vec::new();
    for _ in 0..top_k {
        let mut best = 0;
        for i in 1..left.len() {
            if scores[left[i]] > scores[left[best]] {
                best = i;
            }
        }
        ids.push(left.remove(best));
    }
    let sum: f64 = ids.iter().map(|&i| scores[i]).sum();
    let by = if renormalize && sum > 0.0 { sum } else { 1.0 };
    (ids.iter().map(|&i| i as i32).collect(), ids.iter().map(|&i| scores[i] / by).collect())
}

fn floats(shape: &[usize], values: Vec<f32>) -> Tensor<'static> {
    Tensor::from_vec("", DType::F32, shape.to_vec(), values).expect("a tensor")
}

fn ints(shape: &[usize], values: Vec<i32>) -> Tensor<'static> {
    Tensor::from_vec("", DType::I32, shape.to_vec(), values).expect("a tensor")
}

/// Rows of eight experts with none, some and nearly all masked.
fn logits() -> Vec<f32> {
    let mut all = vec![0.5, -1.0, 2.0, 0.25, 1.5, -3.0, 0.0, 1.0];
    all.extend([NEVER, 1.0, NEVER, 1.0, 0.5, NEVER, -200.0, 3.0]);
    // One expert is left: the others follow by their ids.
    all.extend([NEVER, NEVER, NEVER, NEVER, NEVER, -7.5, NEVER, NEVER]);
    // exp(−300) is zero in f32 too: the masked expert 0 ties with it and is lower.
    all.extend([NEVER, 0.0, -300.0, NEVER, 0.0, NEVER, NEVER, NEVER]);
    all
}

fn case(
    scoring_func: ScoringFunc,
    top_k: usize,
    renormalize: bool,
    logits: &[f32],
) -> Case<'static> {
    let rows = logits.len() / 8;
    let config = RouterConfig {
        scoring_func,
        top_k,
        renormalize,
        grouped: None,
        rule: None,
        block: None,
        topk_order: Default::default(),
    };
    let mut case = Case::new("masked", CaseConfig::Router(config), "anyone");
    case.add_input("router_logits", floats(&[rows, 8], logits.to_vec()));
    let routed = logits.chunks(8).map(|row| naive(row, scoring_func, top_k, renormalize));
    let (ids, weights): (Vec<_>, Vec<_>) = routed.unzip();
    let weights = weights.concat().into_iter().map(|w| w as f32).collect();
    case.add_output("topk_ids", ints(&[rows, top_k], ids.concat()));
    case.add_output("topk_weights", floats(&[rows, top_k], weights));
    case
}

#[test]
fn masked_experts_have_probability_zero() {
    for scoring in [ScoringFunc::Softmax, ScoringFunc::Sigmoid] {
        for (top_k, renormalize) in [(1, false), (2, true), (4, false), (4, true), (8, true)] {
            // f64 tells e^-300 from zero, f32 does not: that row by itself.
            let logits = &logits()[..24];
            let right = case(scoring, top_k, renormalize, logits);
            let report = check_case(&right).expect("legal logits");
            assert_eq!(report.verdict, Verdict::Pass, "{scoring:?} {top_k}: {report:#?}");
            // A masked expert instead of the best one.
            let mut wrong = right.clone();
            let mut ids = right.outputs["topk_ids"].elements::<i32>().into_owned();
            let row = ids[top_k..2 * top_k].to_vec();
            let masked = [0, 2, 5].into_iter().find(|e| !row.contains(e));
            ids[top_k] = masked.unwrap_or(0);
            wrong.add_output("topk_ids", ints(&[3, top_k], ids));
            assert_eq!(check_case(&wrong).expect("a report").verdict, Verdict::Fail);
            // A masked expert with a weight.
            let mut weights = right.outputs["topk_weights"].elements::<f32>().into_owned();
            if top_k > 1 {
                weights[2 * top_k + 1] = 1e-3;
                let mut wrong = right.clone();
                wrong.add_output("topk_weights", floats(&[3, top_k], weights));
                assert_eq!(check_case(&wrong).expect("a report").verdict, Verdict::Fail);
            }
        }
    }
}

#[test]
fn ties_at_zero_go_to_the_lower_id() {
    let router = Router::new(ScoringFunc::Softmax, 4, true);
    let routing =
        router.route(rows_of("x", &logits()[24..], 8).expect("rows")).expect("legal logits");
    assert_eq!(routing.topk_ids, ndarray::array![[1, 4, 0, 2]]);
    assert_eq!(routing.topk_weights, ndarray::array![[0.5, 0.5, 0.0, 0.0]]);
    let mut one = case(ScoringFunc::Softmax, 4, true, &logits()[16..24]);
    assert_eq!(one.outputs["topk_ids"].elements::<i32>()[..], [5, 0, 1, 2]);
    // Among masked experts the order is a matter of ids alone.
    one.add_output("topk_ids", ints(&[1, 4], vec![5, 1, 0, 2]));
    assert_eq!(check_case(&one).expect("a report").verdict, Verdict::Fail);
}

#[test]
fn a_row_of_masked_experts() {
    let mut all = logits()[..24].to_vec();
    all[8..16].fill(NEVER);
    // A softmax of nothing orders no experts: any distinct ones, of any weight.
    for (ids, verdict) in [([7, 2], Verdict::Pass), ([2, 2], Verdict::Fail)] {
        let mut softmax = case(ScoringFunc::Softmax, 2, true, &all);
        let mut all = softmax.outputs["topk_ids"].elements::<i32>().into_owned();
        all[2..4].copy_from_slice(&ids);
        softmax.add_output("topk_ids", ints(&[3, 2], all));
        let mut weights = softmax.outputs["topk_weights"].elements::<f32>().into_owned();
        weights[2..4].copy_from_slice(&[f32::NAN, 0.125]);
        softmax.add_output("topk_weights", floats(&[3, 2], weights));
        assert_eq!(check_case(&softmax).expect("a report").verdict, verdict, "{ids:?}");
    }
    // Sigmoids of nothing are zeros: the first ids, without weight.
    for renormalize in [false, true] {
        let sigmoid = case(ScoringFunc::Sigmoid, 2, renormalize, &all);
        assert_eq!(sigmoid.outputs["topk_ids"].elements::<i32>()[2..4], [0, 1]);
        assert_eq!(check_case(&sigmoid).expect("a report").verdict, Verdict::Pass);
    }
    for refused in [f32::NAN, f32::INFINITY] {
        let mut all = logits();
        all[3] = refused;
        let error =
            Router::new(ScoringFunc::Sigmoid, 2, true).route(rows_of("x", &all, 8).expect("rows"));
        let error = error.expect_err("no logit");
        assert!(matches!(&error, Error::Value { index, .. } if index[..] == [0, 3]), "{error}");
    }
}

#[test]
fn groups_of_masked_experts_are_chosen_last() {
    let config = RouterConfig {
        scoring_func: ScoringFunc::Sigmoid,
        top_k: 2,
        renormalize: true,
        grouped: Some(GroupedTopk {
            num_expert_group: 4,
            topk_group: 2,
            routed_scaling_factor: 1.0,
        }),
        rule: None,
        block: None,
        topk_order: Default::default(),
    };
    // Groups 0 and 2 are masked.
    let logits = [NEVER, NEVER, -4.0, -5.0, NEVER, NEVER, -3.0, NEVER];
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let (best, second) = (sigmoid(-3.0), sigmoid(-4.0));
    let mut case = Case::new("groups", CaseConfig::Router(config), "anyone");
    case.add_input("router_logits", floats(&[1, 8], logits.to_vec()));
    case.add_output("topk_ids", ints(&[1, 2], vec![6, 2]));
    let weights = [best, second].map(|w| (w / (best + second)) as f32);
    case.add_output("topk_weights", floats(&[1, 2], weights.to_vec()));
    assert_eq!(check_case(&case).expect("a report").verdict, Verdict::Pass);
    case.add_output("topk_ids", ints(&[1, 2], vec![6, 0]));
    assert_eq!(check_case(&case).expect("a report").verdict, Verdict::Fail);
}

/// The routing of a whole layer: the same logits in a `moe` case.
#[test]
fn layers_take_masked_experts() {
    let manifest = Manifest::load().expect("the golden manifest");
    let bytes = std::fs::read(manifest.path("data/cases/moe-top8_f16_u4.safetensors"));
    let bytes = bytes.expect("a golden file");
    let mut layer = Case::parse(&bytes).expect("a case");
    let CaseConfig::Moe(c) = layer.config.clone() else { panic!("a layer") };
    let mut logits = layer.inputs["router_logits"].elements::<f32>().into_owned();
    let experts = c.num_experts;
    logits.iter_mut().step_by(3).for_each(|x| *x = NEVER);
    let routed = logits.chunks(experts).map(|r| naive(r, c.scoring_func, c.top_k, c.renormalize));
    let (ids, weights): (Vec<_>, Vec<_>) = routed.unzip();
    layer.outputs.clear();
    layer.add_input("router_logits", floats(&[c.size_m, experts], logits));
    layer.add_output("topk_ids", ints(&[c.size_m, c.top_k], ids.concat()));
    let weights = weights.concat().into_iter().map(|w| w as f32).collect();
    layer.add_output("topk_weights", floats(&[c.size_m, c.top_k], weights));
    let report = check_case(&layer).expect("legal logits");
    assert_eq!(report.verdict, Verdict::Pass, "{report:#?}");
}

/// Sigmoids of 6 and 6.03125 are one number in bf16 and two in f32. A kernel of grouped top-k may keep either;
/// one rule judges both outputs. (In bf16 three roundings are allowed, so that a weight of f32 is also inside.)
#[test]
fn grouped_scores_of_16_bit_logits_are_rounded_or_kept_in_f32() {
    let logits = [6.0f32, 6.03125, 0.5, -1.0, -2.0, 0.25, 1.5, -3.0];
    let grouped = GroupedTopk { num_expert_group: 1, topk_group: 1, routed_scaling_factor: 1.0 };
    let config = RouterConfig {
        scoring_func: ScoringFunc::Sigmoid,
        top_k: 1,
        renormalize: false,
        grouped: Some(grouped),
        rule: None,
        block: None,
        topk_order: Default::default(),
    };
    let verdict = |id: i32, weight: f32| {
        let mut case = Case::new("16 bits", CaseConfig::Router(config.clone()), "anyone");
        let bits = logits.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
        let tensor = Tensor::from_vec("", DType::BF16, vec![1, 8], bits);
        case.add_input("router_logits", tensor.expect("logits"));
        case.add_output("topk_ids", ints(&[1, 1], vec![id]));
        case.add_output("topk_weights", floats(&[1, 1], vec![weight]));
        check_case(&case).expect("a report").verdict
    };
    let [low, high] = [0, 1].map(|i| (1.0 / (1.0 + f64::from(-logits[i]).exp())) as f32);
    // bf16 has multiples of 2^-8 between 1/2 and 1: of 255 and 256, the former is nearer to both 255.37 and 255.39.
    let rounded = 255.0 / 256.0;
    assert_eq!(verdict(1, high), Verdict::Pass);
    assert_eq!(verdict(0, rounded), Verdict::Pass);
    for (what, id, weight) in [
        ("id of f32, weight of bf16", 1, rounded),
        ("the other one's weight", 1, low),
        ("half of the weight", 1, high / 2.0),
        ("another expert", 6, high),
    ] {
        assert_eq!(verdict(id, weight), Verdict::Fail, "{what}");
    }
}
