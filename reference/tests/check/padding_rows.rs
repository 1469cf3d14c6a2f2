//! Routers whose tokens include padding, and entries in any order.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::num::tensor::{DType, Tensor};
use serde_json::{Value, json};

const EXPERTS: usize = 12;
const TOP_K: usize = 3;
const ROWS: usize = 4;

fn logit(row: usize, e: usize) -> f32 {
    ((row * 37 + e * 23) % 41) as f32 / 8.0 - 2.0
}

/// Ids and weights by a loop in f64.
fn routed(row: usize) -> (Vec<i32>, Vec<f32>) {
    let score = |e: usize| f64::from(logit(row, e)).exp();
    let sum: f64 = (0..EXPERTS).map(score).sum();
    let mut ids: Vec<usize> = (0..EXPERTS).collect();
    ids.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
    ids.truncate(TOP_K);
    let weights = ids.iter().map(|&e| (score(e) / sum) as f32).collect();
    (ids.into_iter().map(|e| e as i32).collect(), weights)
}

struct Rows {
    logits: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

fn rows() -> Rows {
    let logits = (0..ROWS).flat_map(|r| (0..EXPERTS).map(move |e| logit(r, e))).collect();
    let (ids, weights): (Vec<_>, Vec<_>) = (0..ROWS).map(routed).unzip();
    Rows { logits, ids: ids.concat(), weights: weights.concat() }
}

fn reports(config: &Value, rows: &Rows, outputs: [bool; 2]) -> Vec<OutputReport> {
    let config = config.as_object().expect("an object");
    let config = CaseConfig::from_json(Op::Router, config).expect("a config");
    let mut case = Case::new("rows", config, "anyone");
    let logits = Tensor::from_vec("", DType::F32, vec![ROWS, EXPERTS], rows.logits.clone());
    case.add_input("router_logits", logits.expect("logits"));
    if outputs[0] {
        let ids = Tensor::from_vec("", DType::I32, vec![ROWS, TOP_K], rows.ids.clone());
        case.add_output("topk_ids", ids.expect("ids"));
    }
    if outputs[1] {
        let weights = Tensor::from_vec("", DType::F32, vec![ROWS, TOP_K], rows.weights.clone());
        case.add_output("topk_weights", weights.expect("weights"));
    }
    check_case(&case).expect("a report").outputs
}

fn passes(config: &Value, rows: &Rows, outputs: [bool; 2]) -> bool {
    reports(config, rows, outputs).iter().all(|o| o.verdict == Verdict::Pass)
}

fn plain() -> Value {
    json!({"scoring_func": "softmax", "top_k": TOP_K, "renormalize": false})
}

/// A family's rule of the same routing.
fn family() -> Value {
    json!({
        "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K,
        "router_jitter_noise": 0.0, "norm_topk_prob": false,
    })
}

const BOTH: [bool; 2] = [true; 2];

#[test]
fn padding_needs_distinct_experts_only() {
    for (kind, config) in [plain(), family()].into_iter().enumerate() {
        for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut rows = rows();
            rows.logits[EXPERTS..2 * EXPERTS].fill(broken);
            if kind == 1 {
                // Mixtral's weights are divided by their sum.
                for row in rows.weights.chunks_exact_mut(TOP_K) {
                    let sum: f32 = row.iter().sum();
                    row.iter_mut().for_each(|w| *w /= sum);
                }
            }
            let row = TOP_K..2 * TOP_K;
            rows.weights[row.clone()].copy_from_slice(&[f32::NAN, -1.0, 0.0]);
            for ids in [[0, 1, 2], [11, 3, 7]] {
                rows.ids[row.clone()].copy_from_slice(&ids);
                assert!(passes(&config, &rows, BOTH), "{kind} {broken} {ids:?}");
            }
            for ids in [[0, 0, 0], [5, 5, 6], [0, 1, 12], [-1, 0, 1]] {
                rows.ids[row.clone()].copy_from_slice(&ids);
                let reports = reports(&config, &rows, BOTH);
                assert_eq!(reports[0].verdict, Verdict::Fail, "{kind} {broken} {ids:?}");
                let first = reports[0].first_mismatch.as_ref().expect("a place");
                assert_eq!(first.index[0], 1);
                let id = reports[0].diagnosis.as_ref().map(|d| d.id.as_str());
                assert_eq!(id, Some("padding-row-ids"));
            }
            // The other rows are compared as ever.
            rows.ids[row.clone()].copy_from_slice(&[0, 1, 2]);
            rows.ids.swap(2 * TOP_K, 2 * TOP_K + 1);
            assert!(!passes(&config, &rows, BOTH));
        }
        // One NaN in a row is as good as many.
        let mut rows = rows();
        rows.logits[3] = f32::NAN;
        rows.ids[..TOP_K].copy_from_slice(&[4, 2, 9]);
        assert!(passes(&config, &rows, [true, false]));
    }
}

#[test]
fn entries_in_any_order_are_stated() {
    let mut any = plain();
    any["topk_order"] = json!("any");
    let sorted = rows();
    let mut turned = rows();
    for t in 0..ROWS {
        turned.ids[t * TOP_K..][..TOP_K].rotate_left(t % TOP_K);
        turned.weights[t * TOP_K..][..TOP_K].rotate_left(t % TOP_K);
    }
    for outputs in [BOTH, [true, false], [false, true]] {
        assert!(passes(&plain(), &sorted, outputs) && passes(&any, &sorted, outputs));
        assert!(!passes(&plain(), &turned, outputs), "{outputs:?}");
        assert!(passes(&any, &turned, outputs), "{outputs:?}");
    }
    // Weights of other entries, an expert twice, an expert that is not among the best, a wrong weight.
    let mut wrong = rows();
    wrong.weights[TOP_K..2 * TOP_K].rotate_left(1);
    assert!(!passes(&any, &wrong, BOTH));
    turned.ids[TOP_K] = turned.ids[TOP_K + 1];
    assert!(!passes(&any, &turned, [true, false]));
    let mut wrong = rows();
    let other = (0..EXPERTS as i32).find(|e| !wrong.ids[..TOP_K].contains(e));
    wrong.ids[1] = other.expect("an expert");
    let reports = reports(&any, &wrong, [true, false]);
    assert_eq!(reports[0].verdict, Verdict::Fail);
    assert_eq!(reports[0].first_mismatch.as_ref().map(|m| m.index[0]), Some(0));
    let mut wrong = rows();
    wrong.weights[2] *= 1.001;
    assert!(!passes(&any, &wrong, BOTH) && !passes(&any, &wrong, [false, true]));
}
