//! Routing outputs with known mistakes: the check must fail and name the place and the cause.

use marlinspike::case::{Case, CaseConfig, ScoringFunc};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_golden::Manifest;

fn golden(name: &str) -> Vec<u8> {
    let golden = Manifest::load().expect("the golden manifest");
    let file = format!("{name}.safetensors");
    let entry = golden.cases().iter().find(|c| c.path.ends_with(&file)).expect("the case");
    std::fs::read(golden.path(&entry.path)).expect("a golden file")
}

/// Checks that output `name` of the golden case fails after `change` of the case, with diagnosis
/// `id`.
fn expect(case: &str, name: &str, id: &str, change: impl FnOnce(&mut Case<'_>)) -> OutputReport {
    let bytes = golden(case);
    let mut case = Case::parse(&bytes).expect("a case");
    change(&mut case);
    let report = check_case(&case).expect("a report");
    let output = report.outputs.iter().find(|o| o.name == name).expect("the output").clone();
    assert_eq!(output.verdict, Verdict::Fail, "{name}: {id}");
    let diagnosis = output.diagnosis.clone().expect("a diagnosis");
    assert_eq!(diagnosis.id, id, "{diagnosis:?}");
    assert!(output.mismatches > 0 && output.first_mismatch.is_some());
    // `down` is judged under the weights that the case states, and was not computed with these.
    let later = |other: &str| name == "topk_weights" && other == "down";
    for other in report.outputs.iter().filter(|o| o.name != name && !later(&o.name)) {
        assert_ne!(other.verdict, Verdict::Fail, "{} with a wrong {name}: {other:#?}", other.name);
    }
    output
}

fn ints(case: &mut Case<'_>, name: &str, change: impl FnOnce(&mut [i32])) {
    let tensor = case.output(name).expect("an output");
    let (shape, mut values) = (tensor.shape().to_vec(), tensor.elements::<i32>().into_owned());
    change(&mut values);
    case.add_output(name, Tensor::from_vec(name, DType::I32, shape, values).expect("a tensor"));
}

fn weights(case: &mut Case<'_>, change: impl FnOnce(&mut [f32])) {
    let name = "topk_weights";
    let tensor = case.output(name).expect("an output");
    let (shape, mut values) = (tensor.shape().to_vec(), tensor.elements::<f32>().into_owned());
    change(&mut values);
    case.add_output(name, Tensor::from_vec(name, DType::F32, shape, values).expect("a tensor"));
}

/// f64 scores of one token's chosen experts.
fn scores(case: &Case<'_>, func: ScoringFunc) -> Vec<f64> {
    let logits = case.input("router_logits").expect("logits");
    let experts = logits.shape()[1];
    let ty = marlinspike::formats::float_type(logits.dtype()).expect("a float");
    let values: Vec<f64> = match logits.dtype().bytes() {
        2 => logits.elements::<u16>().iter().map(|&b| ty.to_f64(b.into())).collect(),
        _ => logits.elements::<f32>().iter().map(|&v| v.into()).collect(),
    };
    let ids = case.output("topk_ids").expect("ids");
    let k = ids.shape()[1];
    let of = |(i, &id): (usize, &i32)| {
        let row = &values[i / k * experts..][..experts];
        let x = row[id as usize];
        match func {
            ScoringFunc::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            _ => x.exp() / row.iter().map(|v| v.exp()).sum::<f64>(),
        }
    };
    ids.elements::<i32>().iter().enumerate().map(of).collect()
}

fn renormalized(scores: &[f64], k: usize, factor: f64) -> Vec<f32> {
    scores
        .chunks(k)
        .flat_map(|c| c.iter().map(move |s| (s / c.iter().sum::<f64>() * factor) as f32))
        .collect()
}

#[test]
fn wrong_ids() {
    let swapped = |case: &mut Case<'_>| ints(case, "topk_ids", |v| v.swap(8, 9));
    let o = expect("router-softmax_2_0", "topk_ids", "ids-in-another-order", swapped);
    assert_eq!(o.first_mismatch.expect("a place").index, [1, 0]);
    expect("router-grouped_1", "topk_ids", "ids-in-another-order", swapped);
    let twice = |case: &mut Case<'_>| ints(case, "topk_ids", |v| v[1] = v[0]);
    expect("router-softmax_2_0", "topk_ids", "wrong-experts", twice);
    let outside = |case: &mut Case<'_>| ints(case, "topk_ids", |v| v[3] = 4000);
    expect("router-sigmoid_2_1", "topk_ids", "wrong-experts", outside);
}

/// All logits of one token equal: only the lowest ids are correct.
#[test]
fn exact_ties_go_to_the_lower_id() {
    let tied = |case: &mut Case<'_>| {
        let shape = case.input("router_logits").expect("logits").shape().to_vec();
        let mut x = case.input("router_logits").expect("logits").elements::<f32>().into_owned();
        x[..shape[1]].fill(0.5);
        let logits = Tensor::from_vec("router_logits", DType::F32, shape, x).expect("a tensor");
        case.add_input("router_logits", logits);
        weights(case, |w| w[..8].fill(0.125));
    };
    let lower = |case: &mut Case<'_>| {
        tied(case);
        ints(case, "topk_ids", |v| (0..8).for_each(|j| v[j as usize] = j));
    };
    let bytes = golden("router-softmax_2_0");
    let mut case = Case::parse(&bytes).expect("a case");
    lower(&mut case);
    let report = check_case(&case).expect("a report");
    assert_eq!(report.verdict, Verdict::Pass, "{report:#?}");
    expect("router-softmax_2_0", "topk_ids", "ties-to-higher-id", |case| {
        tied(case);
        ints(case, "topk_ids", |v| (0..8).for_each(|j| v[j as usize] = 127 - j));
    });
}

#[test]
fn wrong_weights() {
    let name = "topk_weights";
    let off = |case: &mut Case<'_>| weights(case, |w| w[9] += 1e-3);
    for case in ["router-softmax_2_0", "router-grouped_1", "router-sigmoid_4_0", "moe-top8_f16_u4"]
    {
        let o = expect(case, name, "outside-bound", off);
        assert_eq!(o.mismatches, 1);
        assert!(o.max_error_over_bound.is_some_and(|r| r > 100.0), "{o:?}");
    }
    expect("router-softmax_2_0", name, "outside-bound", |case| weights(case, |w| w[0] = f32::NAN));
    let swapped = |case: &mut Case<'_>| weights(case, |w| w.swap(8, 9));
    expect("router-softmax_2_0", name, "weights-in-another-order", swapped);
}

#[test]
fn weights_of_wrong_routers() {
    let name = "topk_weights";
    let softmax = |case: &mut Case<'_>| {
        let s = scores(case, ScoringFunc::Softmax);
        weights(case, |w| w.iter_mut().zip(&s).for_each(|(w, s)| *w = *s as f32));
    };
    expect("router-softmax_2_0", name, "renormalize-forgotten", softmax);
    expect("router-sigmoid_4_1", name, "softmax-weights", softmax);
    expect("router-grouped_2", name, "factor-before-renormalize", |case| {
        let r = renormalized(&scores(case, ScoringFunc::Sigmoid), 6, 1.0);
        weights(case, |w| w.copy_from_slice(&r));
    });
    expect("router-grouped_2", name, "renormalize-forgotten", |case| {
        let s = scores(case, ScoringFunc::Sigmoid);
        weights(case, |w| w.iter_mut().zip(&s).for_each(|(w, s)| *w = (s * 2.5) as f32));
    });
    expect("router-softmax_1_1", name, "renormalized", |case| {
        let r = renormalized(&scores(case, ScoringFunc::Softmax), 6, 1.0);
        weights(case, |w| w.copy_from_slice(&r));
    });
    expect("router-sigmoid_4_0", name, "biased-weights", |case| {
        let s = scores(case, ScoringFunc::Sigmoid);
        let bias = case.input("e_score_correction_bias").expect("a bias").elements::<f32>();
        let bias = bias.into_owned();
        let ids = case.output("topk_ids").expect("ids").elements::<i32>().into_owned();
        let biased = |i: usize| (s[i] + f64::from(bias[ids[i] as usize])) as f32;
        weights(case, |w| (0..w.len()).for_each(|i| w[i] = biased(i)));
    });
}

/// Scores with a large bias, from which the bias is subtracted again: small scores lose their bits. With a
/// large bias the right weights still pass.
#[test]
fn weights_recovered_from_biased_scores() {
    let name = "topk_weights";
    let shifted = |case: &mut Case<'_>, lost: bool| {
        let bias = case.input("e_score_correction_bias").expect("a bias");
        let (shape, mut bias) = (bias.shape().to_vec(), bias.elements::<f32>().into_owned());
        bias.iter_mut().for_each(|b| *b += 512.0);
        let s = scores(case, ScoringFunc::Sigmoid);
        let ids = case.output("topk_ids").expect("ids").elements::<i32>().into_owned();
        let back = |i: usize| {
            let b = bias[ids[i] as usize];
            if lost { (s[i] as f32 + b) - b } else { s[i] as f32 }
        };
        let made: Vec<f32> = (0..s.len()).map(back).collect();
        // With such a bias the choice may be another one; the weights are those of the ids as given.
        weights(case, |w| w.copy_from_slice(&made));
        let bias = Tensor::from_vec("e_score_correction_bias", DType::F32, shape, bias);
        case.add_input("e_score_correction_bias", bias.expect("a bias"));
    };
    let output = |lost: bool| {
        let bytes = golden("router-sigmoid_4_0");
        let mut case = Case::parse(&bytes).expect("a case");
        shifted(&mut case, lost);
        let report = check_case(&case).expect("a report");
        report.outputs.iter().find(|o| o.name == name).expect("the output").clone()
    };
    assert_eq!(output(false).verdict, Verdict::Pass);
    let wrong = output(true);
    assert_eq!(wrong.verdict, Verdict::Fail);
    let diagnosis = wrong.diagnosis.expect("a cause");
    assert_eq!(
        (diagnosis.id.as_str(), diagnosis.unexplained),
        ("weights-less-bias", 0),
        "{diagnosis:?}"
    );
}

/// Half the largest error that the bound allows passes; one and a half times it fails.
#[test]
fn the_bound_decides() {
    use marlinspike::moe::{bound::Bounds, router::Router};
    let bytes = golden("router-softmax_2_0");
    for (part, verdict) in [(0.5, Verdict::Pass), (1.5, Verdict::Fail)] {
        let mut case = Case::parse(&bytes).expect("a case");
        let CaseConfig::Router(c) = &case.config else { panic!("a router") };
        let logits = case.input("router_logits").expect("logits").elements::<f32>().into_owned();
        let row = &logits[..128];
        let router = Router::new(c.scoring_func, c.top_k, c.renormalize);
        let ids = case.output("topk_ids").expect("ids").elements::<i32>();
        let ids: Vec<usize> = ids[..8].iter().map(|&i| i as usize).collect();
        let (exact, interval) = Bounds::new(&router, row).weight(&router, &ids, 3);
        weights(&mut case, |w| w[3] = (exact + (interval.hi - exact) * part) as f32);
        assert_eq!(check_case(&case).expect("a report").verdict, verdict);
    }
}

#[test]
fn wrong_blocks() {
    let (case, name) = ("moe_align_block_size-1_-1", "sorted_token_ids");
    let sorted = |change: fn(&mut [i32])| move |case: &mut Case<'_>| ints(case, name, change);
    // Expert 0 has entries 2, 67, 38 and 71 in the first block of 16; 76 is the sentinel.
    let o = expect(case, name, "token-twice", sorted(|v| v[1] = v[0]));
    assert!(o.diagnosis.expect("text").text.contains("entry 67 is missing"));
    let o = expect(case, name, "token-missing", sorted(|v| v[2] = 76));
    assert!(o.diagnosis.expect("text").text.contains("block 0, position 2, expert 0"));
    expect(case, name, "token-of-another-expert", sorted(|v| v.swap(0, 16)));
    expect(case, name, "padding-holds-token", sorted(|v| v[15] = 2));
    expect(case, name, "no-token", sorted(|v| v[0] = -7));
    expect(case, "expert_ids", "expert_ids-values", |case| ints(case, "expert_ids", |v| v[3] = 9));
    let total = "num_tokens_post_padded";
    expect(case, total, "num_tokens_post_padded-values", |case| ints(case, total, |v| v[0] -= 16));
    expect("moe-ep0_bf16_u4", name, "padding-holds-token", |case| {
        ints(case, name, |v| *v.last_mut().expect("a token") = 0);
    });
    // Any order inside a run is correct.
    let bytes = golden(case);
    let mut reordered = Case::parse(&bytes).expect("a case");
    ints(&mut reordered, name, |v| v[..4].rotate_left(1));
    assert_eq!(check_case(&reordered).expect("a report").verdict, Verdict::Pass);
    expect("router-softmax_2_0", "token_expert_indices", "token_expert_indices-values", |case| {
        ints(case, "token_expert_indices", |v| v.swap(0, 1));
    });
}
