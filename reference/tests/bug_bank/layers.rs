//! Bugs that show in a layer: routing, products with experts, the activation, the sum.

use marlinspike::case::{Case, CaseConfig};
use marlinspike::check::OutputReport;
use marlinspike::num::scalar::{ScalarType, f64_to_f16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use serde_json::json;

use crate::product_model::{Model, judged, planted, put};
use crate::tools::{case, changed, generated, grouped, misread, report, single};
use crate::{Run, run};

const SCALED: &str = "moe-nvfp4_f16";
const BIASED: &str = "moe-bf16_u8b128_g32_act1";
const PARALLEL: &str = "moe-ep0_bf16_u4";

pub(crate) fn runs() -> Vec<Run> {
    vec![
        run(
            "1",
            "w13 scale order chosen with the intermediate size",
            &["scales-other-permutation"],
            w13_order(),
        ),
        run(
            "8",
            "gate and up swapped",
            &["gate-up-swapped"],
            planted(SCALED, "gate_up", |m| {
                let y = m.compute();
                let half = m.n / 2;
                (0..y.len()).map(|i| y[i / m.n * m.n + (i % m.n + half) % m.n]).collect()
            }),
        ),
        run(
            "8",
            "gate and up of weights and scales swapped, but not of the bias",
            &["gate-up-swapped"],
            planted(BIASED, "gate_up", |m| {
                let n = m.n;
                for matrix in &mut m.matrices {
                    let (q, s, z) = (matrix.q.clone(), matrix.s.clone(), matrix.z.clone());
                    let from = |i: usize| i / n * n + (i % n + n / 2) % n;
                    matrix.q = (0..q.len()).map(|i| q[from(i)]).collect();
                    matrix.s = (0..s.len()).map(|i| s[from(i)]).collect();
                    matrix.z = (0..z.len()).map(|i| z[from(i)]).collect();
                }
                m.compute()
            }),
        ),
        run(
            "8",
            "gate and up swapped, interleaved",
            &["gate-up-swapped"],
            changed(case("moe-mxfp4_bf16_big"), "gate_up", |v, _| {
                v.chunks(2).flat_map(|p| [p[1], p[0]]).collect()
            }),
        ),
        run(
            "9",
            "gate's global scale applied to up",
            &["gate-scale-on-up"],
            planted(SCALED, "gate_up", |m| {
                let (y, half) = (m.compute(), m.n / 2);
                let up = |i: usize| i % m.n >= half;
                (0..y.len()).map(|i| if up(i) { m.round(y[i] * 0.75) } else { y[i] }).collect()
            }),
        ),
        run(
            "11",
            "two shards of w13 for an activation without a gate",
            &["two-shards-not-gated"],
            two_shards(),
        ),
        run(
            "14",
            "expert -1 used as an index",
            &["absent-expert-indexed"],
            planted(PARALLEL, "gate_up", |m| {
                let last = m.matrices.len() - 1;
                m.expert.iter_mut().for_each(|e| *e = Some(e.unwrap_or(last)));
                m.compute()
            }),
        ),
        run(
            "15",
            "padding of sorted_token_ids holds a token",
            &["padding-holds-token"],
            sentinel(),
        ),
        run(
            "15",
            "the sentinel of sorted_token_ids read as the last row",
            &["wrong-expert"],
            planted(PARALLEL, "gate_up", |m| {
                let row = (0..m.rows()).rfind(|&row| m.expert[row].is_some()).expect("a row");
                m.expert[row] = Some((m.expert[row].expect("an expert") + 1) % m.matrices.len());
                m.compute()
            }),
        ),
        run(
            "19",
            "f16 overflow before the global scale",
            &["overflow-before-global-scale"],
            early(),
        ),
        run(
            "24",
            "router weight applied twice",
            &["router-weight-twice"],
            planted(BIASED, "down", |m| {
                m.routers = 2;
                m.compute()
            }),
        ),
        run("24", "router weight on output and input", &["router-weight-on-both"], on_both(false)),
        run("24", "router weight on output, and on x", &["router-weight-on-both"], on_both(true)),
        run("24", "router weight applied again in the sum", &["router-weight-twice"], again()),
        run("25", "ties broken by the higher id", &["ties-to-higher-id"], ties()),
        run("26", "renormalize forgotten", &["renormalize-forgotten"], weights(false)),
        run(
            "26",
            "routed scaling factor before renormalize",
            &["factor-before-renormalize"],
            weights(true),
        ),
        run("31", "global scale multiplies the bias", &["upstream-nvfp4-bias-scaled"], folded()),
    ]
}

fn w13_order() -> OutputReport {
    planted("moe-top1_f16_u4", "gate_up", |m| {
        let n = m.n;
        for matrix in &mut m.matrices {
            matrix.s = misread(&matrix.s, n, single, grouped);
        }
        m.compute()
    })
}

/// Without a schedule: products are judged by their bound.
fn undeclared(mut case: Case<'static>) -> Case<'static> {
    let CaseConfig::Moe(c) = &mut case.config else { panic!("a layer") };
    (c.schedule_w13, c.schedule_w2) = (None, None);
    case
}

/// Both halves of N hold the first half.
fn two_shards() -> OutputReport {
    let mut case =
        undeclared(generated("moe-top1_f16_u4", json!({"activation": "relu2_no_mul"}), 11));
    let model = Model::new(&case, "gate_up");
    let y = model.compute();
    let n = model.n;
    let y: Vec<f64> = (0..y.len()).map(|i| y[i / n * n + i % n % (n / 2)]).collect();
    put(&mut case, "gate_up", &y);
    judged(&mut case, "gate_up")
}

fn sentinel() -> OutputReport {
    changed(case("moe_align_block_size-1_-1"), "sorted_token_ids", |mut v, _| {
        // Expert 0 has four entries in the first block of 16; 76 is the sentinel.
        v[15] = 2;
        v
    })
}

fn early() -> OutputReport {
    let mut case = case(SCALED);
    let x = case.input("x").expect("x");
    let (shape, ty) = (x.shape().to_vec(), ScalarType::FLOAT16);
    let values = x.elements::<u16>();
    let large: Vec<u16> =
        values.iter().map(|&b| f64_to_f16_rne(ty.to_f64(b.into()) * 512.0)).collect();
    case.add_input("x", Tensor::from_vec("x", DType::F16, shape, large).expect("x"));
    let mut model = Model::new(&case, "gate_up");
    model.early = true;
    let y = model.compute();
    put(&mut case, "gate_up", &y);
    judged(&mut case, "gate_up")
}

/// Router weights multiply gate_up (or x) although the config applies them to down.
fn on_both(x: bool) -> OutputReport {
    let mut case = case(SCALED);
    let mut model = Model::new(&case, "gate_up");
    let weights = case.output("topk_weights").expect("weights").elements::<f32>().into_owned();
    let y = if x {
        let k = model.k;
        let weight = |i: usize| f64::from(weights[i / k]);
        model.x = (0..model.x.len()).map(|i| model.round(model.x[i] * weight(i))).collect();
        model.compute()
    } else {
        let (y, n) = (model.compute(), model.n);
        let weight = |i: usize| model.round(f64::from(weights[i / n]));
        (0..y.len()).map(|i| model.round(y[i] * weight(i))).collect()
    };
    put(&mut case, "gate_up", &y);
    judged(&mut case, "gate_up")
}

/// y is the sum of down times the router weights, which down has already.
fn again() -> OutputReport {
    let mut case = case(SCALED);
    let CaseConfig::Moe(c) = &case.config else { panic!("a layer") };
    let (top_k, h, ty) = (c.top_k, c.hidden_size, c.quant.dtype);
    let weights = case.output("topk_weights").expect("weights").elements::<f32>().into_owned();
    let down = case.output("down").expect("down").elements::<u16>().into_owned();
    let term = |row: usize, n: usize| ty.to_f64(down[row * h + n].into()) * f64::from(weights[row]);
    let y: Vec<f64> = (0..c.size_m * h)
        .map(|i| (0..top_k).map(|j| term(i / h * top_k + j, i % h)).sum())
        .collect();
    put(&mut case, "y", &y);
    case.outputs
        .retain(|name, _| ["y", "down", "topk_ids", "topk_weights"].contains(&name.as_str()));
    report(&case, "y")
}

/// All logits of token 0 are equal, and the highest ids were chosen.
fn ties() -> OutputReport {
    let mut case = case("router-softmax_2_0");
    let shape = case.input("router_logits").expect("logits").shape().to_vec();
    let mut x = case.input("router_logits").expect("logits").elements::<f32>().into_owned();
    x[..shape[1]].fill(0.5);
    let logits = Tensor::from_vec("router_logits", DType::F32, shape, x).expect("a tensor");
    case.add_input("router_logits", logits);
    case.outputs.retain(|name, _| name == "topk_ids");
    changed(case, "topk_ids", |mut v, _| {
        (0..8).for_each(|j| v[j as usize] = 127 - j);
        v
    })
}

/// Sigmoid scores of the chosen experts, without the config's further steps.
fn weights(renormalize: bool) -> OutputReport {
    let mut case = case("router-grouped_2");
    let logits = case.input("router_logits").expect("logits");
    let experts = logits.shape()[1];
    let logits: Vec<f64> = logits.elements::<f32>().iter().map(|&v| v.into()).collect();
    let ids = case.output("topk_ids").expect("ids");
    let (k, ids) = (ids.shape()[1], ids.elements::<i32>().into_owned());
    let score = |i: usize| 1.0 / (1.0 + (-logits[i / k * experts + ids[i] as usize]).exp());
    let scores: Vec<f64> = (0..ids.len()).map(score).collect();
    let values: Vec<f32> = scores
        .chunks(k)
        .flat_map(|row| {
            let sum: f64 = row.iter().sum();
            row.iter().map(move |s| if renormalize { s / sum } else { s * 2.5 } as f32)
        })
        .collect();
    let tensor = Tensor::from_vec("topk_weights", DType::F32, vec![ids.len() / k, k], values);
    case.add_output("topk_weights", tensor.expect("weights"));
    report(&case, "topk_weights")
}

/// A bias multiplied by NVFP4's global scale, which the router weight contains.
fn folded() -> OutputReport {
    let mut case = case(SCALED);
    let CaseConfig::Moe(c) = &mut case.config else { panic!("a layer") };
    c.quant.has_bias = true;
    let (experts, h, i) = (c.num_experts, c.hidden_size, c.intermediate_size);
    let bias: Vec<f64> = (0..experts * h).map(|i| (i % 37) as f64 / 16.0 - 1.0).collect();
    let half: Vec<u16> = bias.iter().map(|&b| f64_to_f16_rne(b)).collect();
    let tensor = Tensor::from_vec("w2_bias", DType::F16, vec![experts, h], half);
    case.add_input("w2_bias", tensor.expect("a tensor"));
    let wide =
        Tensor::from_vec("w13_bias", DType::F16, vec![experts, 2 * i], vec![0u16; experts * 2 * i]);
    case.add_input("w13_bias", wide.expect("a tensor"));
    case.outputs.remove("gate_up");
    case.provenance = "anyone".to_owned();
    let mut model = Model::new(&case, "down");
    model.fold_global = true;
    put(&mut case, "down", &model.compute());
    judged(&mut case, "down")
}
