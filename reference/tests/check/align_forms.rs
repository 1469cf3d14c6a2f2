//! `moe_align_block_size`: entries without an expert, and both forms under expert parallelism.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{CaseReport, Verdict, check_case};
use marlinspike::num::tensor::{DType, Tensor};
use serde_json::json;

const EXPERTS: i32 = 6;
const BLOCK: usize = 4;

/// Runs of experts in the order of `order`, each with its label, by plain loops.
fn aligned(ids: &[i32], order: &[(i32, i32)]) -> [Vec<i32>; 3] {
    let (mut sorted, mut labels) = (Vec::new(), Vec::new());
    for &(expert, label) in order {
        let mut run: Vec<i32> =
            (0..ids.len() as i32).filter(|&i| ids[i as usize] == expert).collect();
        while !run.len().is_multiple_of(BLOCK) {
            run.push(ids.len() as i32);
        }
        labels.extend(vec![label; run.len() / BLOCK]);
        sorted.extend(run);
    }
    let total = sorted.len() as i32;
    [sorted, labels, vec![total]]
}

fn report(ids: &[i32], map: Option<&[i32]>, outputs: &[Vec<i32>; 3]) -> CaseReport {
    let config = json!({
        "block_size": BLOCK, "num_experts": EXPERTS, "top_k": 2,
        "ep_size": if map.is_some() { 2 } else { 1 }, "ep_rank": usize::from(map.is_some()),
    });
    let config = config.as_object().expect("an object");
    let config = CaseConfig::from_json(Op::Align, config).expect("a config");
    let mut case = Case::new("forms", config, "anyone");
    let ints = |shape: Vec<usize>, values: &[i32]| {
        Tensor::from_vec("", DType::I32, shape, values.to_vec()).expect("a tensor")
    };
    case.add_input("topk_ids", ints(vec![ids.len() / 2, 2], ids));
    if let Some(map) = map {
        case.add_input("expert_map", ints(vec![map.len()], map));
    }
    let names = ["sorted_token_ids", "expert_ids", "num_tokens_post_padded"];
    for (name, values) in names.into_iter().zip(outputs) {
        case.add_output(name, ints(vec![values.len()], values));
    }
    check_case(&case).expect("a report")
}

fn ids() -> Vec<i32> {
    (0..40).map(|i| (i * 7 + i / 5) % EXPERTS).collect()
}

#[test]
fn entries_without_an_expert_are_skipped() {
    let all: Vec<(i32, i32)> = (0..EXPERTS).map(|e| (e, e)).collect();
    for none in [-1, EXPERTS, i32::MIN, i32::MAX] {
        let mut given = ids();
        given.iter_mut().step_by(5).for_each(|id| *id = none);
        let right = aligned(&given, &all);
        assert_eq!(report(&given, None, &right).verdict, Verdict::Pass, "{none}");
        // As if they were tokens of expert 0.
        let zero: Vec<i32> = given.iter().map(|&id| if id == none { 0 } else { id }).collect();
        let wrong = aligned(&zero, &all);
        assert_eq!(report(&given, None, &wrong).verdict, Verdict::Fail, "{none}");
    }
    // No tokens at all.
    let empty = [Vec::new(), Vec::new(), vec![0]];
    assert_eq!(report(&[], None, &empty).verdict, Verdict::Pass);
    assert_eq!(report(&[], None, &[vec![0; 4], vec![0], vec![4]]).verdict, Verdict::Fail);
}

#[test]
fn the_form_is_the_one_that_fits() {
    let map = [-1, -1, -1, 0, 1, 2];
    let given = ids();
    let ignored = aligned(&given, &[(3, 0), (4, 1), (5, 2)]);
    let marked = aligned(&given, &[(0, -1), (1, -1), (2, -1), (3, 0), (4, 1), (5, 2)]);
    for right in [&ignored, &marked] {
        assert_eq!(report(&given, Some(&map), right).verdict, Verdict::Pass);
    }
    // Every block is there, and none has its local id.
    let all: Vec<(i32, i32)> = (0..EXPERTS).map(|e| (e, e)).collect();
    let global = report(&given, Some(&map), &aligned(&given, &all));
    for output in &global.outputs {
        let wrong = output.name == "expert_ids";
        assert_eq!(output.verdict == Verdict::Fail, wrong, "{output:?}");
        let id = output.diagnosis.as_ref().map(|d| d.id.as_str());
        assert_eq!(id, wrong.then_some("expert-map-missing"));
    }
    let mut near = marked.clone();
    near[1][0] = 0;
    let near = report(&given, Some(&map), &near);
    let cause = near.outputs.iter().find_map(|o| o.diagnosis.as_ref()).expect("a place");
    assert_eq!(cause.id, "expert_ids-values");
}
