//! Routing by family: transformers' outputs, loops written here from the families' descriptions,
//! and a list of every `model_type` with its expected routing.
use std::path::PathBuf;

use marlinspike::case::{Case, CaseConfig};
use marlinspike::check::{Verdict, check_case as check};
use marlinspike::container::Container;
use marlinspike::moe::families::{
    Renormalize, RouterTensors, RoutingRule, Score, Support, families, family, resolve,
};
use marlinspike::moe::router::Routing;
use marlinspike::num::array::rows_of;
use marlinspike::vectors::Rng;
use serde_json::{Value, json};

fn goldens() -> Vec<(String, Vec<u8>)> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../golden/data/routers");
    let mut files: Vec<_> = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
    // Those blocks have stages and rules of their own, and tests in block_stages.rs.
    files.retain(|path| !path.to_str().unwrap().contains("-small"));
    files.sort();
    let read = |p: PathBuf| {
        let name = p.file_stem().unwrap().to_str().unwrap().to_owned();
        (name, std::fs::read(p).unwrap())
    };
    files.into_iter().map(read).collect()
}

fn floats(file: &Container<'_>, name: &str) -> Option<Vec<f32>> {
    file.get(name)?;
    Some(file.tensor(name).unwrap().elements::<f32>().into_owned())
}

#[test]
fn transformers_routing_is_repeated() {
    let goldens = goldens();
    assert!(goldens.len() >= 11, "{}", goldens.len());
    for (name, bytes) in &goldens {
        let file = Container::parse(bytes).unwrap();
        let meta = file.metadata();
        let config: Value = serde_json::from_str(&meta["config.json"]).unwrap();
        let resolved = resolve(&config, &format!("{}.experts", meta["module"])).unwrap();
        assert!(resolved.notes.is_empty(), "{name}: {:?}", resolved.notes);
        let rule = resolved.rule;
        let logits = file.tensor("out.router_logits").unwrap();
        let [tokens, experts] = logits.dims2().unwrap();
        let bias =
            rule.correction_bias.as_ref().map(|_| floats(&file, "in.correction_bias").unwrap());
        let tensors = RouterTensors { correction_bias: bias.as_deref(), expert_scale: None };
        let values = logits.elements::<f32>();
        let made = rule.route(rows_of("x", &values, experts).unwrap(), tensors).unwrap();
        let ids = file.tensor("out.topk_ids").unwrap().elements::<i32>().into_owned();
        let weights = floats(&file, "out.topk_weights").unwrap();
        assert_eq!(made.topk_ids.len(), tokens * rule.top_k, "{name}");
        // The file's entries are sorted by weight.
        let sorted = |ids: &[i32], weights: &[f32]| {
            let mut all: Vec<(i32, f32)> =
                ids.iter().copied().zip(weights.iter().copied()).collect();
            all.sort_by_key(|(id, _)| *id);
            all
        };
        for t in 0..tokens {
            let of = t * rule.top_k..(t + 1) * rule.top_k;
            let ours = sorted(&ids_of(&made)[of.clone()], &weights_of(&made)[of.clone()]);
            let theirs = sorted(&ids[of.clone()], &weights[of]);
            for ((a, w), (b, v)) in ours.into_iter().zip(theirs) {
                assert_eq!(a, b, "{name}, token {t}");
                assert!((w - v).abs() <= 2e-6 * v.abs(), "{name}, token {t}: {w} and {v}");
            }
        }
    }
}

/// The same files through `check`: they pass unchanged and fail with one weight or id changed.
#[test]
fn check_judges_the_files() {
    for (name, bytes) in &goldens() {
        let case = Case::parse(bytes).unwrap();
        let report = check(&case).unwrap();
        let outputs = &report.outputs;
        let names: Vec<&str> = outputs.iter().map(|o| o.name.as_str()).collect();
        let sum = case.output("y_experts").map(|_| "y_experts");
        let expected = ["router_logits", "topk_ids", "topk_weights", "y"].into_iter().chain(sum);
        assert_eq!(names, expected.collect::<Vec<_>>(), "{name}");
        assert!(outputs.iter().all(|o| o.verdict == Verdict::Pass), "{name}: {outputs:?}");

        let damaged = |output: &str, change: &dyn Fn(&mut Vec<u32>)| {
            let mut case = case.clone();
            let tensor = case.output(output).unwrap().clone();
            let mut words = tensor.elements::<u32>().into_owned();
            change(&mut words);
            let shape = tensor.shape().to_vec();
            let tensor =
                marlinspike::num::tensor::Tensor::from_vec(output, tensor.dtype(), shape, words)
                    .unwrap();
            case.add_output(output, tensor);
            let report = check(&case).unwrap();
            report.outputs.iter().any(|o| o.verdict == Verdict::Fail)
        };
        let scaled = |w: &mut Vec<u32>| w[3] = (f32::from_bits(w[3]) * 1.0001).to_bits();
        assert!(damaged("topk_weights", &scaled), "{name}");
        let CaseConfig::Router(config) = &case.config else { panic!("a router") };
        let experts = case.input("router_logits").unwrap().shape()[1] as u32;
        let k = config.top_k;
        // An expert that was not chosen instead of one that was.
        let other = |w: &mut Vec<u32>| {
            let free = (0..experts).find(|e| !w[..k].contains(e)).unwrap();
            w[0] = free;
        };
        assert!(damaged("topk_ids", &other), "{name}");
    }
}

/// Numbers of a normal-like spread.
fn numbers(seed: u64, len: usize, spread: f64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    let mut one = || f64::from(rng.next_u32()) / 2f64.powi(31) - 1.0;
    (0..len).map(|_| ((one() + one() + one()) * spread) as f32).collect()
}

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

fn softmax(row: &[f32]) -> Vec<f64> {
    let e: Vec<f64> = row.iter().map(|&x| f64::from(x).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.into_iter().map(|x| x / sum).collect()
}

/// The `k` largest of `values`, by a search for each.
fn best(values: &[f64], k: usize) -> Vec<usize> {
    let mut left = values.to_vec();
    let mut ids = Vec::new();
    for _ in 0..k {
        let mut at = 0;
        for (i, v) in left.iter().enumerate() {
            if *v > left[at] {
                at = i;
            }
        }
        ids.push(at);
        left[at] = f64::NEG_INFINITY;
    }
    ids
}

/// Experts outside the best `keep` of `n` groups, by the sum of their `of` best, at `masked`.
fn grouped(values: &[f64], n: usize, keep: usize, of: usize, masked: f64) -> Vec<f64> {
    let per = values.len() / n;
    let score = |g: usize| {
        let mut own = values[g * per..(g + 1) * per].to_vec();
        own.sort_by(|a, b| b.total_cmp(a));
        own[..of].iter().sum::<f64>()
    };
    let kept = best(&(0..n).map(score).collect::<Vec<_>>(), keep);
    let inside = |e: usize| kept.contains(&(e / per));
    (0..values.len()).map(|e| if inside(e) { values[e] } else { masked }).collect()
}

fn add(a: &[f64], b: &[f32]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + f64::from(*b)).collect()
}

fn take(values: &[f64], ids: &[usize]) -> Vec<f64> {
    ids.iter().map(|&i| values[i]).collect()
}

fn over(weights: Vec<f64>, divisor: f64) -> Vec<f64> {
    weights.into_iter().map(|w| w / divisor).collect()
}

type Row = (Vec<usize>, Vec<f64>);
type Expected = fn(&[f32], &[f32]) -> Row;

fn shared(scores: Vec<f64>, choice: Vec<f64>, k: usize, scale: f64) -> Row {
    let ids = best(&choice, k);
    let chosen = take(&scores, &ids);
    let sum: f64 = chosen.iter().sum();
    (ids, over(chosen, sum / scale))
}

fn deepseek_v3_of(l: &[f32], b: &[f32], groups: (usize, usize), scale: f64) -> Row {
    let s: Vec<f64> = l.iter().map(|&x| sigmoid(x)).collect();
    let mut choice = add(&s, b);
    if groups.0 > 1 {
        choice = grouped(&choice, groups.0, groups.1, 2, f64::NEG_INFINITY);
    }
    shared(s, choice, 4, scale)
}

fn mixer_of(l: &[f32], jitter: f32) -> Row {
    let max = l.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let first = l.iter().position(|x| *x == max).unwrap();
    let pass = |max: f32, gone: Option<usize>| -> f64 {
        let mut sum = 0.0;
        for (i, &x) in l.iter().enumerate() {
            let scale = x.abs().max(max);
            if Some(i) != gone
                && ((max - x) / scale).partial_cmp(&(2.0 * jitter))
                    != Some(std::cmp::Ordering::Greater)
            {
                sum += (f64::from(x) - f64::from(max)).exp();
            }
        }
        1.0 / sum
    };
    let mut rest = l.to_vec();
    rest[first] = f32::NEG_INFINITY;
    let second_max = rest.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let second = rest.iter().position(|x| *x == second_max).unwrap();
    (vec![first, second], vec![pass(max, None), pass(second_max, Some(first))])
}

/// Config, and the same routing as a loop.
fn described() -> Vec<(&'static str, Value, Expected)> {
    vec![
        ("mixtral", json!({"num_experts_per_tok": 4}), |l, _| {
            shared(softmax(l), softmax(l), 4, 1.0)
        }),
        ("qwen3_moe", json!({"num_experts_per_tok": 4}), |l, _| {
            let s = softmax(l);
            let ids = best(&s, 4);
            let w = take(&s, &ids);
            (ids, w)
        }),
        ("qwen3_moe", json!({"num_experts_per_tok": 4, "norm_topk_prob": true}), |l, _| {
            shared(softmax(l), softmax(l), 4, 1.0)
        }),
        ("olmoe", json!({"num_experts_per_tok": 3}), |l, _| {
            let s = softmax(l);
            let ids = best(&s, 3);
            let w = take(&s, &ids);
            (ids, w)
        }),
        ("jamba", json!({}), |l, _| {
            let s = softmax(l);
            let ids = best(&s, 2);
            let w = take(&s, &ids);
            (ids, w)
        }),
        ("hunyuan_v1_moe", json!({"moe_topk": [1, 5, 3]}), |l, _| {
            shared(softmax(l), softmax(l), 3, 1.0)
        }),
        ("gpt_oss", json!({"experts_per_token": 4}), |l, _| {
            let logits: Vec<f64> = l.iter().map(|&x| x.into()).collect();
            let ids = best(&logits, 4);
            let of: Vec<f32> = ids.iter().map(|&i| l[i]).collect();
            (ids, softmax(&of))
        }),
        ("aria_text", json!({"moe_topk": 3}), |l, _| shared(softmax(l), softmax(l), 3, 1.0)),
        ("granitemoe", json!({"num_experts_per_tok": 4}), |l, _| {
            shared(softmax(l), softmax(l), 4, 1.0)
        }),
        (
            "dbrx",
            json!({"ffn_config": {"moe_top_k": 3, "moe_normalize_expert_weights": 2.0}}),
            |l, _| {
                let s = softmax(l);
                let ids = best(&s, 3);
                let w = take(&s, &ids);
                let norm = w.iter().map(|w| w * w).sum::<f64>().sqrt();
                (ids, over(w, norm))
            },
        ),
        (
            "dbrx",
            json!({"ffn_config": {"moe_top_k": 3, "moe_normalize_expert_weights": null}}),
            |l, _| {
                let s = softmax(l);
                let ids = best(&s, 3);
                let w = take(&s, &ids);
                (ids, w)
            },
        ),
        ("phimoe", json!({}), |l, _| mixer_of(l, 0.01)),
        ("phimoe", json!({"router_jitter_noise": 0.2}), |l, _| mixer_of(l, 0.2)),
        (
            "deepseek_v2",
            json!({"num_experts_per_tok": 3, "routed_scaling_factor": 16.0}),
            |l, _| {
                let s = softmax(l);
                let ids = best(&s, 3);
                let w = take(&s, &ids);
                (ids, over(w, 1.0 / 16.0))
            },
        ),
        (
            "deepseek_v2",
            json!({"num_experts_per_tok": 3, "topk_method": "group_limited_greedy", "n_group": 4,
                "topk_group": 2}),
            |l, _| {
                let s = softmax(l);
                let ids = best(&grouped(&s, 4, 2, 1, 0.0), 3);
                let w = take(&s, &ids);
                (ids, w)
            },
        ),
        ("ernie4_5_moe", json!({"moe_k": 3}), |l, b| {
            let s = softmax(l);
            shared(s.clone(), add(&s, b), 3, 1.0)
        }),
        ("longcat_flash", json!({"moe_topk": 3, "zero_expert_num": 4}), |l, b| {
            let s = softmax(l);
            let ids = best(&add(&s, b), 3);
            let w = take(&s, &ids);
            (ids, over(w, 1.0 / 6.0))
        }),
        (
            "mistral4",
            json!({"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}),
            |l, _| {
                let s = softmax(l);
                shared(s.clone(), grouped(&s, 4, 2, 2, 0.0), 4, 1.5)
            },
        ),
        ("mistral_large4", json!({"routed_scaling_factor": 1.0}), |l, _| {
            shared(softmax(l), softmax(l), 4, 1.0)
        }),
        (
            "deepseek_v3",
            json!({"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}),
            |l, b| deepseek_v3_of(l, b, (4, 2), 2.5),
        ),
        ("deepseek_v3", json!({"num_experts_per_tok": 4}), |l, b| {
            deepseek_v3_of(l, b, (8, 4), 2.5)
        }),
        ("glm4_moe", json!({"num_experts_per_tok": 4}), |l, b| deepseek_v3_of(l, b, (1, 1), 1.0)),
        ("glm4_moe_lite", json!({"n_group": 1}), |l, b| deepseek_v3_of(l, b, (1, 1), 1.8)),
        ("solar_open", json!({"num_experts_per_tok": 4, "n_group": 1}), |l, b| {
            deepseek_v3_of(l, b, (1, 1), 1.0)
        }),
        ("exaone_moe", json!({"num_experts_per_tok": 4, "n_group": 1}), |l, b| {
            deepseek_v3_of(l, b, (1, 1), 2.5)
        }),
        (
            "beam",
            json!({"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
                "routed_scaling_factor": 3.0}),
            |l, b| deepseek_v3_of(l, b, (4, 2), 3.0),
        ),
        (
            "bailing_hybrid",
            json!({"num_experts_per_token": 4, "num_expert_group": 4, "topk_group": 2,
                "moe_renormalize": true, "routed_scaling_factor": 2.5}),
            |l, b| deepseek_v3_of(l, b, (4, 2), 2.5),
        ),
        (
            "kimi_linear",
            json!({"num_experts_per_token": 4, "num_expert_group": 1, "moe_renormalize": true}),
            |l, b| deepseek_v3_of(l, b, (1, 1), 2.446),
        ),
        ("hy_v3", json!({"num_experts_per_tok": 4}), |l, b| deepseek_v3_of(l, b, (1, 1), 2.826)),
        ("afmoe", json!({"num_experts_per_tok": 4, "route_scale": 2.0}), |l, b| {
            deepseek_v3_of(l, b, (1, 1), 2.0)
        }),
        ("minimax_m2", json!({"num_experts_per_tok": 4, "routed_scaling_factor": 3.0}), |l, b| {
            deepseek_v3_of(l, b, (1, 1), 1.0)
        }),
        ("minimax_m3_vl_text", json!({}), |l, b| deepseek_v3_of(l, b, (1, 1), 2.0)),
        ("step3p5", json!({"moe_top_k": 4, "moe_router_scaling_factor": 3.0}), |l, b| {
            deepseek_v3_of(l, b, (1, 1), 3.0)
        }),
        ("laguna", json!({"num_experts_per_tok": 4, "moe_routed_scaling_factor": 2.5}), |l, b| {
            deepseek_v3_of(l, b, (1, 1), 2.5)
        }),
        (
            "dots1",
            json!({"num_experts_per_tok": 4, "n_group": 1, "routed_scaling_factor": 1.0}),
            |l, b| {
                let s: Vec<f64> = l.iter().map(|&x| sigmoid(x)).collect();
                let ids = best(&add(&s, b), 4);
                let w = take(&s, &ids);
                (ids, w)
            },
        ),
        (
            "axk2",
            json!({"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
                "routed_scaling_factor": 1.0}),
            |l, b| {
                let s: Vec<f64> = l.iter().map(|&x| sigmoid(x)).collect();
                let choice = grouped(&add(&s, b), 4, 2, 2, 0.0);
                shared(s, choice, 4, 1.0)
            },
        ),
        ("lfm2_moe", json!({}), |l, b| {
            let s: Vec<f64> = l.iter().map(|&x| sigmoid(x)).collect();
            let ids = best(&add(&s, b), 4);
            let w = take(&s, &ids);
            let sum: f64 = w.iter().sum();
            (ids, over(w, sum + 1e-6))
        }),
        ("deepseek_v4", json!({"num_experts_per_tok": 4}), |l, b| {
            let s: Vec<f64> = l.iter().map(|&x| f64::from(x).exp().ln_1p().sqrt()).collect();
            let choice = add(&s, b);
            shared(s, choice, 4, 1.5)
        }),
        ("llama4_text", json!({"num_experts_per_tok": 2}), |l, _| {
            let logits: Vec<f64> = l.iter().map(|&x| x.into()).collect();
            let ids = best(&logits, 2);
            let w = ids.iter().map(|&i| sigmoid(l[i])).collect();
            (ids, w)
        }),
        ("cohere2_moe", json!({}), |l, _| shared(softmax(l), softmax(l), 2, 1.0)),
        (
            "cohere2_moe",
            json!({"expert_selection_fn": "sigmoid", "norm_topk_prob": false}),
            |l, _| {
                let s: Vec<f64> = l.iter().map(|&x| sigmoid(x)).collect();
                let ids = best(&s, 2);
                let w = take(&s, &ids);
                (ids, w)
            },
        ),
        ("flint", json!({}), |l, _| {
            let s: Vec<f64> = l.iter().map(|&x| sigmoid(x)).collect();
            shared(s.clone(), s, 6, 1.0)
        }),
        ("kolibri1", json!({"num_experts_per_tok": 3}), |l, b| {
            let logits: Vec<f64> = l.iter().map(|&x| x.into()).collect();
            let ids = best(&add(&logits, b), 3);
            let w = ids.iter().map(|&i| sigmoid(l[i])).collect();
            (ids, w)
        }),
        ("inkling2", json!({"num_experts_per_tok": 4}), |l, b| deepseek_v3_of(l, b, (1, 1), 8.0)),
    ]
}

/// The rule of a config, whose layer is the third.
fn ids_of(made: &Routing) -> &[i32] {
    made.topk_ids.as_slice().unwrap()
}

fn weights_of(made: &Routing) -> &[f32] {
    made.topk_weights.as_slice().unwrap()
}

fn rule_of(model_type: &str, config: &Value) -> RoutingRule {
    let mut config = config.clone();
    config["model_type"] = json!(model_type);
    resolve(&config, "model.layers.2.mlp.experts").unwrap().rule
}

#[test]
fn families_route_as_described() {
    const EXPERTS: usize = 16;
    for (i, (model_type, config, expected)) in described().into_iter().enumerate() {
        let rule = rule_of(model_type, &config);
        let bias = numbers(900 + i as u64, EXPERTS, 0.2);
        let bias = rule.correction_bias.as_ref().map(|_| &bias[..]);
        let tensors = RouterTensors { correction_bias: bias, expert_scale: None };
        let logits = numbers(i as u64 + 1, 200 * EXPERTS, 1.5);
        let made = rule.route(rows_of("x", &logits, EXPERTS).unwrap(), tensors).unwrap();
        let zeros = [0.0; EXPERTS];
        for (t, row) in logits.chunks_exact(EXPERTS).enumerate() {
            let (ids, weights) = expected(row, bias.unwrap_or(&zeros));
            let here = t * rule.top_k..(t + 1) * rule.top_k;
            let found: Vec<usize> =
                ids_of(&made)[here.clone()].iter().map(|&i| i as usize).collect();
            assert_eq!(found, ids, "{model_type} {config}, token {t}");
            for (w, v) in weights_of(&made)[here].iter().zip(weights) {
                let w = f64::from(*w);
                assert!((w - v).abs() <= 3e-6 * v.abs(), "{model_type} {config}: {w} and {v}");
            }
        }
        // Both implementations in the library agree, and reject a changed weight.
        let logits = rows_of("x", &logits, EXPERTS).unwrap();
        let same = rule.compare(logits, tensors, made.routed().unwrap()).unwrap();
        assert!(same.is_empty(), "{model_type}: {same:?}");
        let mut changed = made.clone();
        let at = [5 / rule.top_k, 5 % rule.top_k];
        changed.topk_weights[at] *= 1.00002;
        let wrong = rule.compare(logits, tensors, changed.routed().unwrap()).unwrap();
        assert_eq!((wrong.ids.len(), wrong.weights.len()), (0, 1), "{model_type}");
        // The rule as JSON is the rule.
        assert_eq!(RoutingRule::from_json(&rule.to_json()).unwrap(), rule, "{model_type}");
    }
}

/// Correct routers pass: ties, saturated scores, logits whose exponentials underflow.
#[test]
fn the_two_implementations_agree_on_hard_logits() {
    let scores = ["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"];
    let mut rng = Rng::new(5);
    let mut below = |n: u32| rng.next_u32() % n;
    for round in 0..4000u64 {
        let score = scores[below(4) as usize];
        let mixer = score == "sparsemixer";
        let mut rule = json!({"scoring_func": score, "top_k": if mixer { 2 } else { 1 + below(6) },
            "renormalize": below(2) == 0});
        if below(2) == 0 && !mixer {
            rule["n_group"] = json!(4);
            rule["topk_group"] = json!(2 + below(3));
            rule["group_score"] = json!(["top_two", "max"][below(2) as usize]);
            rule["masked_groups"] = json!(["excluded", "zero"][below(2) as usize]);
        }
        let key = ["renormalize_epsilon", "renormalize_floor", "renormalize_p"][below(3) as usize];
        if rule["renormalize"] == true && below(2) == 0 {
            rule[key] =
                json!(if key == "renormalize_p" { 2.0 } else { [1e-6, 1e-12][below(2) as usize] });
        }
        if below(3) == 0 {
            rule["choose_by"] = json!("logit");
        }
        rule["routed_scaling_factor"] = json!([1.0, 2.5, 16.0][below(3) as usize]);
        let has_bias = below(2) == 0 && !mixer;
        if has_bias {
            rule["correction_bias"] = json!("gate.bias");
        }
        let spread = [0.001, 1.0, 20.0, 300.0][below(4) as usize];
        let whole = below(3) == 0;
        let round_off =
            |v: Vec<f32>| v.into_iter().map(|x| if whole { x.round() } else { x }).collect();
        let logits: Vec<f32> = round_off(numbers(round, 8 * 16, spread));
        let bias: Vec<f32> = round_off(numbers(round + 9000, 16, 0.5));
        let rule = RoutingRule::from_json(&rule).unwrap();
        let correction_bias = has_bias.then_some(&bias[..]);
        let tensors = RouterTensors { correction_bias, expert_scale: None };
        let logits = rows_of("x", &logits, 16).unwrap();
        let made = rule.route(logits, tensors).unwrap();
        let same = rule.compare(logits, tensors, made.routed().unwrap()).unwrap();
        assert!(same.is_empty(), "{} spread {spread}: {same:?}", rule.to_json());
    }
}

/// Exactly the known `model_type`s are in the table.
#[test]
fn every_model_type_is_right_or_refused() {
    let right = "mixtral minimax qwen2_moe qwen3_moe qwen3_next qwen3_5_moe qwen3_5_moe_text qwen4_exp \
        qwen4_exp_text qwen3_vl_moe qwen3_vl_moe_text qwen3_omni_moe olmoe flex_olmo mellum jamba \
        hunyuan_v1_moe granitemoe granitemoeshared granitemoehybrid granitemoe_swa aria_text gpt_oss \
        openai_privacy_filter dbrx phimoe deepseek_v2 ernie4_5_moe mistral4 mistral_large4 \
        mistral_large4_text gemma4 gemma4_text deepseek_v3 kimi_k2 kimi_k25 deepseek_v32 glm_moe_dsa \
        deepseek_v4 glm4_moe glm4v_moe glm4v_moe_text glm4_moe_lite glm5_next glm5_next_text dots1 \
        dots3_note dots3_note_text solar_open axk1 axk2 beam exaone_moe bailing_hybrid bailing_moe \
        bailing_moe_v2 bailing_moe_linear bailing_moe_v3 kimi_linear mimo_v2_flash hy_v3 hy_v4 afmoe \
        lfm2_moe minimax_m2 minimax_m3_vl step3p7 step3p5 laguna llama4 llama4_text cohere2_moe flint \
        kolibri1";
    let routing_only = "jetmoe longcat_flash nemotron_h ernie4_5_vl_moe zaya inkling inkling_text inkling2 \
        inkling2_text muse_spark muse_spark_text";
    let support = |name: &str| family(name).unwrap_or_else(|| panic!("{name}")).support;
    for name in right.split_whitespace() {
        assert_eq!(support(name), Support::Right, "{name}");
    }
    for name in routing_only.split_whitespace() {
        assert!(matches!(support(name), Support::RoutingOnly(_)), "{name}");
    }
    let listed: Vec<&str> =
        [right, routing_only].iter().flat_map(|s| s.split_whitespace()).collect();
    for name in families().flat_map(|f| f.model_types) {
        let known = listed.contains(name) || name.starts_with("qwen3_omni_moe") || *name == "aria";
        assert!(known, "{name} is in the table, but not in this test");
    }
    let names: Vec<_> = families().flat_map(|f| f.model_types).collect();
    let unique: std::collections::BTreeSet<_> = names.iter().collect();
    assert_eq!(names.len(), unique.len());
    for unknown in ["llama5_text", "text", "", "_text", "mixtral2", "step3_text"] {
        let error =
            resolve(&json!({"model_type": unknown}), "model.layers.0.mlp.experts").unwrap_err();
        assert!(error.to_string().contains(&format!("`{unknown}`")), "{error}");
    }
    let error = resolve(&json!({}), "model.layers.0.mlp.experts").unwrap_err();
    assert!(error.to_string().contains("no model_type"), "{error}");
}

#[test]
fn configs_that_say_something_else_are_refused() {
    let module = "model.layers.1.mlp.experts";
    let refused = |config: Value, part: &str| {
        let error = resolve(&config, module).unwrap_err().to_string();
        assert!(error.contains(part), "{config}: {error}");
    };
    refused(json!({"model_type": "glm4_moe", "scoring_func": "softmax"}), "scoring_func");
    refused(json!({"model_type": "mixtral", "scoring_func": "sigmoid"}), "scoring_func");
    refused(json!({"model_type": "mixtral", "norm_topk_prob": 1}), "norm_topk_prob");
    refused(json!({"model_type": "mixtral", "num_experts_per_tok": 0}), "num_experts_per_tok");
    refused(json!({"model_type": "mixtral", "hidden_act": "mish"}), "hidden_act");
    refused(
        json!({"model_type": "exaone_moe", "n_group": 1, "swiglu_limits": [0, 7.0]}),
        "swiglu_limits",
    );
    refused(json!({"model_type": "dots1"}), "num_experts_per_tok");
    refused(
        json!({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "topk_method": "x"}),
        "topk_method",
    );
    refused(json!({"model_type": "deepseek_v3", "n_group": null}), "n_group");
    refused(json!({"model_type": "axk1", "routed_scaling_factor": 1.0}), "topk_group");
    refused(
        json!({"model_type": "laguna", "moe_routed_scaling_factor": 1.0,
        "moe_apply_router_weight_on_input": true}),
        "router_weight_on_input",
    );
    refused(json!({"model_type": "glm4_moe", "mlp_layer_types": ["moe", "hash_moe"]}), "hash_moe");
    let hash = json!({"model_type": "deepseek_v4", "mlp_layer_types": ["moe", "hash_moe"]});
    let found = resolve(&hash, module).unwrap();
    assert_eq!(found.rule.token_table.as_deref(), Some("gate.tid2eid"));
    assert!(matches!(found.support, Support::RoutingOnly(reason) if reason.contains("table")));
    assert_eq!(resolve(&hash, "model.layers.0.mlp.experts").unwrap().rule.token_table, None);
    refused(
        json!({"model_type": "bailing_moe_v2", "num_experts_per_tok": 2, "norm_topk_prob": true,
        "score_function": "sigmoid"}),
        "sigmoid",
    );
    refused(json!({"model_type": "minimax_m3_vl", "swiglu_beta": 0.5}), "swiglu_beta");
    // Where engines differ, the rule is transformers', and a note says what vLLM does.
    let notes = |config: Value| resolve(&config, module).unwrap().notes.join("; ");
    let note = notes(json!({"model_type": "olmoe", "norm_topk_prob": true}));
    assert!(note.contains("vLLM") && note.contains("never renormalizes"), "{note}");
    let note = notes(
        json!({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "norm_topk_prob": true}),
    );
    assert!(note.contains("renormalizes"), "{note}");
    let note = notes(json!({"model_type": "mixtral", "norm_topk_prob": false}));
    assert!(note.contains("not read"), "{note}");
    assert_eq!(notes(json!({"model_type": "mixtral", "norm_topk_prob": true})), "");
    let note = notes(json!({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "n_group": 8}));
    assert!(note.contains("groups first"), "{note}");
    let note = notes(json!({"model_type": "cohere2_moe", "norm_topk_prob": false}));
    assert!(note.contains("does not"), "{note}");
    let note = notes(json!({"model_type": "laguna", "moe_routed_scaling_factor": 1.0,
        "moe_router_logit_softcapping": 30.0}));
    assert!(note.contains("soft cap"), "{note}");
    // The text model's config applies.
    let nested = json!({"model_type": "llama4", "text_config": {"model_type": "llama4_text",
        "num_experts_per_tok": 2}, "num_experts_per_tok": 7});
    let found = resolve(&nested, "language_model.model.layers.1.feed_forward.experts").unwrap();
    assert_eq!((found.rule.top_k, found.rule.scoring_func), (2, Score::Sigmoid));
    let thinker = json!({"model_type": "qwen3_omni_moe", "thinker_config": {"text_config":
        {"num_experts_per_tok": 3}}, "talker_config": {"text_config": {"num_experts_per_tok": 4}}});
    for (prefix, top_k) in [("thinker", 3), ("talker", 4)] {
        let module = format!("{prefix}.model.layers.0.mlp.experts");
        assert_eq!(resolve(&thinker, &module).unwrap().rule.top_k, top_k);
    }
    // The talker has another default than the thinker.
    let omni = json!({"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {}},
        "talker_config": {"text_config": {}}});
    for (prefix, divisor) in [("thinker", Renormalize::SUM), ("talker", Renormalize::Never)] {
        let module = format!("{prefix}.model.layers.0.mlp.experts");
        assert_eq!(resolve(&omni, &module).unwrap().rule.renormalize, divisor, "{prefix}");
    }
    let talker = resolve(&json!({"model_type": "qwen3_omni_moe_talker_text"}), module).unwrap();
    assert_eq!(talker.rule.renormalize, Renormalize::Never);
    // Limits by layer.
    let step = json!({"model_type": "step3p5", "moe_router_scaling_factor": 1.0, "swiglu_limits": [0, 7.0]});
    let limit = |module: &str| resolve(&step, module).unwrap().rule.swiglu_limit;
    assert_eq!(
        (limit("model.layers.0.moe.experts"), limit("model.layers.1.moe.experts")),
        (None, Some(7.0))
    );
}

#[test]
fn a_stated_rule_names_what_is_wrong() {
    let refused = |value: Value, parts: [&str; 2]| {
        let error = RoutingRule::from_json(&value).unwrap_err().to_string();
        assert!(parts.iter().all(|p| error.contains(p)), "{value}: {error}");
    };
    let good = json!({"scoring_func": "softmax", "top_k": 2, "renormalize": true});
    let with = |key: &str, value: Value| {
        let mut all = good.clone();
        all[key] = value;
        all
    };
    assert_eq!(RoutingRule::from_json(&good).unwrap(), rule_of("mixtral", &json!({})));
    refused(with("norm_topk", json!(true)), ["`norm_topk`", "expected"]);
    refused(with("topk", json!(2)), ["`topk`", "`top_k`"]);
    refused(with("scoring_function", json!(2)), ["`scoring_function`", "`scoring_func`"]);
    refused(with("scoring_func", json!("tanh")), ["scoring_func", "tanh"]);
    refused(with("top_k", json!(-1)), ["top_k", "-1"]);
    refused(json!({"top_k": 2, "renormalize": true}), ["scoring_func", "missing"]);
    refused(with("n_group", json!(2)), ["n_group", "both"]);
    refused(with("routed_scaling_factor", json!(-1.0)), ["routed_scaling_factor", "-1"]);
    refused(with("activation", json!("mish")), ["activation", "mish"]);
    refused(json!([1]), ["routing", "object"]);
    // Parts that depend on tokens, with others that would choose the experts too.
    refused(with("token_groups", json!(0)), ["token_groups", "1 or more"]);
    let table = |key: &str, value: Value| {
        let mut all = with("token_table", json!("gate.tid2eid"));
        all[key] = value;
        all
    };
    assert!(RoutingRule::from_json(&table("renormalize", json!(true))).is_ok());
    refused(table("correction_bias", json!("gate.bias")), ["token_table", "chooses the experts"]);
    refused(table("scoring_func", json!("sparsemixer")), ["token_table", "chooses the experts"]);
    let example: Value = serde_json::from_str(marlinspike::moe::families::EXAMPLE).unwrap();
    assert_eq!(RoutingRule::from_json(&example).unwrap().scoring_func, Score::Sigmoid);
}

/// The op `router` with a family's own keys.
#[test]
fn a_router_case_states_its_family() {
    use marlinspike::num::tensor::{DType, Tensor};
    let logits = numbers(77, 4 * 16, 1.5);
    let bias = numbers(78, 16, 0.2);
    let rule =
        rule_of("glm4_moe", &json!({"num_experts_per_tok": 4, "routed_scaling_factor": 2.5}));
    let tensors = RouterTensors { correction_bias: Some(&bias), expert_scale: None };
    let made = rule.route(rows_of("x", &logits, 16).unwrap(), tensors).unwrap();
    let config =
        json!({"model_type": "glm4_moe", "num_experts_per_tok": 4, "routed_scaling_factor": 2.5});
    let parsed = CaseConfig::from_json(marlinspike::case::Op::Router, config.as_object().unwrap());
    let mut case = Case::new("glm", parsed.unwrap(), "here");
    let tensor = |name: &str, dtype, shape: [usize; 2], v: Vec<f32>| {
        Tensor::from_vec(name, dtype, shape.to_vec(), v).unwrap()
    };
    case.add_input("router_logits", tensor("l", DType::F32, [4, 16], logits));
    case.add_input(
        "e_score_correction_bias",
        Tensor::from_vec("b", DType::F32, vec![16], bias).unwrap(),
    );
    case.add_output("topk_weights", Tensor::from_array("w", made.topk_weights.clone()).unwrap());
    case.add_output("topk_ids", Tensor::from_array("i", made.topk_ids).unwrap());
    // Through bytes and back.
    let bytes = case.to_bytes().unwrap();
    let case = Case::parse(&bytes).unwrap();
    let verdicts = |case: &Case<'_>| -> Vec<Verdict> {
        check(case).unwrap().outputs.iter().map(|o| o.verdict).collect()
    };
    assert!(verdicts(&case).iter().all(|v| *v == Verdict::Pass));
    let mut wrong = case.clone();
    let halves = made.topk_weights.iter().map(|w| w / 2.0).collect();
    wrong.add_output("topk_weights", tensor("w", DType::F32, [4, 4], halves));
    assert!(verdicts(&wrong).contains(&Verdict::Fail));
}

/// The page lists exactly the table of the library.
#[test]
fn the_documents_table_is_the_librarys() {
    let page = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/src/reference/models.md");
    let table = marlinspike::moe::families::markdown();
    if std::env::var_os("MARLINSPIKE_WRITE_DOCS").is_some() {
        let text = std::fs::read_to_string(&page).unwrap();
        let (begin, end) = ("<!-- families -->\n", "<!-- end -->");
        let before = text.split(begin).next().unwrap();
        let after = text.split(end).nth(1).unwrap();
        std::fs::write(&page, format!("{before}{begin}{table}{end}{after}")).unwrap();
    }
    let text = std::fs::read_to_string(page).unwrap();
    let help = "run this test with MARLINSPIKE_WRITE_DOCS=1 to write docs/src/reference/models.md";
    assert!(text.contains(&format!("<!-- families -->\n{table}<!-- end -->")), "{help}");
}
