//! Bugs of routers and of the alignment of tokens to blocks.

use marlinspike::Result;
use marlinspike::case::{Case, Op};
use marlinspike::check::add_outputs;
use marlinspike::num::tensor::{DType, Tensor};
use serde_json::json;

use crate::bug::{Bug, VALUES, Wrong, edit};

const fn bug(
    number: u32,
    name: &'static str,
    seen: &'static str,
    (filter, outputs): (&'static str, &'static [&'static str]),
    causes: &'static [&'static str],
    wrong: fn(&mut Case<'static>) -> Result<()>,
) -> Bug {
    let (op, laws, wrong) = (Op::Router, VALUES, Wrong::Case(wrong));
    Bug { number, name, seen, op, filter, keys: &[], outputs, laws, causes, wrong }
}

pub(super) fn bugs() -> Vec<Bug> {
    let mut all = published();
    all.extend(families());
    all
}

fn published() -> Vec<Bug> {
    vec![
        Bug {
            op: Op::Align,
            ..bug(
                15,
                "padding sentinel of sorted_token_ids read as a token",
                "V#27915, vllm-xpu-kernels#571",
                ("", &[]),
                &["padding-holds-token"],
                |case| {
                    add_outputs(case)?;
                    let numel = case.input("topk_ids")?.len() as i32;
                    edit::output::<i32>(case, "sorted_token_ids", |ids, _| {
                        let sentinels = ids.iter_mut().filter(|id| **id == numel);
                        sentinels.for_each(|id| *id = numel - 1);
                    })
                },
            )
        },
        bug(
            25,
            "top-k ties broken by the higher id",
            "common in ports",
            ("use_grouped_topk=false", &["topk_ids"]),
            &["ties-to-higher-id"],
            |case| {
                let experts = case.input("router_logits")?.shape()[1];
                reverse(case, experts)?;
                add_outputs(case)?;
                edit::output::<i32>(case, "topk_ids", |ids, _| {
                    ids.iter_mut().for_each(|id| *id = experts as i32 - 1 - *id);
                })
            },
        ),
        bug(
            26,
            "renormalize forgotten",
            "common in ports",
            ("renormalize=true,top_k=2|4|8", &["topk_weights"]),
            &["renormalize-forgotten"],
            |case| {
                edit::keys(case, &[("renormalize", json!(false))])?;
                add_outputs(case)
            },
        ),
        bug(
            26,
            "routed scaling factor before renormalize",
            "common in ports",
            ("renormalize=true,routed_scaling_factor=2.5", &["topk_weights"]),
            &["factor-before-renormalize", "factor-forgotten"],
            |case| {
                edit::keys(case, &[("routed_scaling_factor", json!(1.0))])?;
                add_outputs(case)
            },
        ),
    ]
}

/// Exchanges the experts' logits end to end.
fn reverse(case: &mut Case<'static>, experts: usize) -> Result<()> {
    let logits = case.input("router_logits")?;
    let (dtype, shape) = (logits.dtype(), logits.shape().to_vec());
    let size = dtype.bytes();
    let rows = logits.bytes().chunks_exact(experts * size);
    let bytes: Vec<u8> = rows.flat_map(|row| row.rchunks_exact(size).flatten().copied()).collect();
    case.add_input("router_logits", Tensor::new("", dtype, shape, bytes)?);
    Ok(())
}

fn families() -> Vec<Bug> {
    vec![
        bug(
            32,
            "correction bias kept in the weight (it belongs to the choice only)",
            "ports of DeepSeek-V3's router",
            (
                "use_grouped_topk=true,num_expert_group=1,scoring_func=sigmoid,renormalize=false",
                &["topk_ids", "topk_weights"],
            ),
            &["biased-weights"],
            biased,
        ),
        bug(
            33,
            "correction bias left out: its tensor has another name in the checkpoint",
            "loaders of exaone_moe, hy_v3, lfm2_moe (`expert_bias`)",
            ("use_grouped_topk=true,num_expert_group=1", &["topk_ids"]),
            &["bias-left-out"],
            |case| {
                case.inputs.remove("e_score_correction_bias");
                add_outputs(case)
            },
        ),
        bug(
            34,
            "softmax where the config lacks `scoring_func` and the family means sigmoid",
            "V: glm4_moe-like families (default softmax)",
            ("use_grouped_topk=false,scoring_func=sigmoid", &["topk_ids", "topk_weights"]),
            &["softmax-weights"],
            |case| {
                edit::keys(case, &[("scoring_func", json!("softmax"))])?;
                add_outputs(case)
            },
        ),
        bug(
            35,
            "routed_scaling_factor not read",
            "V: mimo_v2_flash",
            ("routed_scaling_factor=2.5", &["topk_weights"]),
            &["factor-forgotten", "factor-before-renormalize"],
            |case| {
                edit::keys(case, &[("routed_scaling_factor", json!(1.0))])?;
                add_outputs(case)
            },
        ),
        bug(
            36,
            "groups of experts ignored",
            "transformers: afmoe (V honours n_group)",
            ("num_expert_group=8,topk_group=4", &["topk_ids"]),
            &["groups-ignored"],
            |case| {
                let one = [("num_expert_group", json!(1)), ("topk_group", json!(1))];
                edit::keys(case, &one)?;
                add_outputs(case)
            },
        ),
        bug(
            37,
            "a group's score is its best score, not the sum of its two best",
            "V and transformers disagree on mistral4",
            ("num_expert_group=4,topk_group=2,scoring_func=sigmoid,top_k=4|8", &["topk_ids"]),
            &["group-score-best"],
            best_of_group,
        ),
        bug(
            52,
            "weights recovered by subtracting the correction bias from the rounded sum",
            "V 0.33.0's `grouped_topk` with one group, confirmed",
            ("use_grouped_topk=true,num_expert_group=1", &["topk_ids", "topk_weights"]),
            &["weights-less-bias"],
            less_bias,
        ),
    ]
}

fn logits(case: &Case<'static>) -> Result<(Vec<f64>, usize)> {
    let tensor = case.input("router_logits")?;
    let wide = |bits: u32, shift: u32| f64::from(f32::from_bits(bits << shift));
    let values = match tensor.dtype() {
        DType::F32 => tensor.elements::<u32>().iter().map(|&b| wide(b, 0)).collect(),
        DType::BF16 => tensor.elements::<u16>().iter().map(|&b| wide(b.into(), 16)).collect(),
        _ => {
            let half = |b: &u16| edit::value(marlinspike::num::scalar::ScalarType::FLOAT16, *b);
            tensor.elements::<u16>().iter().map(half).collect()
        }
    };
    Ok((values, tensor.shape()[1]))
}

fn bias(case: &Case<'static>, experts: usize) -> Vec<f64> {
    let bias = case.inputs.get("e_score_correction_bias");
    bias.map_or(vec![0.0; experts], |b| b.elements::<f32>().iter().map(|&b| b.into()).collect())
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Weights are the scores with the bias.
fn biased(case: &mut Case<'static>) -> Result<()> {
    let (logits, experts) = logits(case)?;
    let bias = bias(case, experts);
    add_outputs(case)?;
    let ids = edit::found(case, "topk_ids")?.elements::<i32>().into_owned();
    if bias.iter().all(|b| *b == 0.0) {
        return Ok(());
    }
    edit::output::<f32>(case, "topk_weights", |weights, shape| {
        for (i, weight) in weights.iter_mut().enumerate() {
            let id = ids[i] as usize;
            let score = sigmoid(logits[i / shape[1] * experts + id]);
            *weight = (score + bias[id]) as f32;
        }
    })
}

/// Weights are the rounded sums of score and bias, less the bias, of float32 logits: the bits that
/// the bias shifted out are lost. 16-bit logits keep the right weights.
fn less_bias(case: &mut Case<'static>) -> Result<()> {
    let (logits, experts) = logits(case)?;
    let is_f32 = case.input("router_logits")?.dtype() == DType::F32;
    let bias = bias(case, experts);
    add_outputs(case)?;
    if !is_f32 || bias.iter().all(|b| *b == 0.0) {
        return Ok(());
    }
    let keys = case.config.to_json();
    let softmax = keys.get("scoring_func") == Some(&json!("softmax"));
    let renormalize = keys.get("renormalize") == Some(&json!(true));
    let factor = keys.get("routed_scaling_factor").and_then(serde_json::Value::as_f64);
    let ids = edit::found(case, "topk_ids")?.elements::<i32>().into_owned();
    edit::output::<f32>(case, "topk_weights", |weights, shape| {
        let chosen = weights.chunks_exact_mut(shape[1]).zip(ids.chunks_exact(shape[1]));
        for ((weights, ids), row) in chosen.zip(logits.chunks_exact(experts)) {
            let largest = row.iter().copied().fold(f64::MIN, f64::max);
            let all: f64 = row.iter().map(|x| (x - largest).exp()).sum();
            for (weight, &id) in weights.iter_mut().zip(ids) {
                let (x, b) = (row[id as usize], bias[id as usize] as f32);
                let score = if softmax { (x - largest).exp() / all } else { sigmoid(x) };
                *weight = (score as f32 + b) - b;
            }
            let sum: f32 = weights.iter().sum();
            let sum = if renormalize && sum != 0.0 { sum } else { 1.0 };
            weights.iter_mut().for_each(|w| *w = *w / sum * factor.unwrap_or(1.0) as f32);
        }
    })
}

/// Chooses groups by their best biased score, then experts within them.
fn best_of_group(case: &mut Case<'static>) -> Result<()> {
    let (logits, experts) = logits(case)?;
    let bias = bias(case, experts);
    add_outputs(case)?;
    let per = experts / 4;
    edit::output::<i32>(case, "topk_ids", |ids, shape| {
        for (row, ids) in logits.chunks(experts).zip(ids.chunks_exact_mut(shape[1])) {
            let score = |e: usize| sigmoid(row[e]) + bias[e];
            let best = |g: usize| (g * per..(g + 1) * per).map(score).fold(f64::MIN, f64::max);
            let mut groups: Vec<usize> = (0..4).collect();
            groups.sort_by(|&a, &b| best(b).total_cmp(&best(a)));
            let mut chosen: Vec<usize> =
                (0..experts).filter(|e| groups[..2].contains(&(e / per))).collect();
            chosen.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
            ids.iter_mut().zip(chosen).for_each(|(id, e)| *id = e as i32);
        }
    })
}
