//! Layers of upstream's operators without some stages: the check recomputes absent stages and
//! propagates their error.

use std::path::Path;

use marlinspike::case::{Case, CaseConfig, MoeConfig};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_golden::Manifest;

const STAGES: [&str; 4] = ["gate_up", "activated", "down", "y"];

fn layers(mut visit: impl FnMut(&str, &MoeConfig, &Case<'_>)) {
    let golden = Manifest::load().expect("the golden manifest");
    for file in golden.cases() {
        let path = golden.path(&file.path);
        let bytes = std::fs::read(&path).expect("a golden file");
        let case = Case::parse(&bytes).expect("a case");
        if let CaseConfig::Moe(c) = &case.config
            && case.provenance.starts_with("vllm")
        {
            let name = Path::new(&file.path).file_stem().expect("a name").to_string_lossy();
            visit(&name, c, &case);
        }
    }
}

/// The case with these outputs in addition to routing and permutations.
fn only<'a>(case: &Case<'a>, stages: &[&str]) -> Case<'a> {
    let mut case = case.clone();
    let needed = |n: &str| n.starts_with("topk_") || n.ends_with("g_idx_sort_indices");
    case.outputs.retain(|n, _| stages.contains(&n.as_str()) || needed(n));
    case
}

fn report(case: &Case<'_>, stage: &str) -> OutputReport {
    let report = check_case(case).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    report.outputs.into_iter().find(|o| o.name == stage).expect("a report")
}

/// Each stage of every golden layer without the others: within the bounds from x on.
#[test]
fn each_stage_alone_is_within_the_bounds_carried_from_x() {
    let mut judged = 0;
    layers(|name, _, case| {
        for stage in STAGES {
            let o = report(&only(case, &[stage]), stage);
            assert_eq!(o.verdict, Verdict::Pass, "{name} {stage}: {o:#?}");
            let note = o.note.unwrap_or_default();
            if stage != "gate_up" {
                assert!(note.contains("carried from `x`"), "{name} {stage}: {note}");
            }
            println!("{name} {stage}: {note}; worst {:?}", o.max_error_over_bound);
            judged += 1;
        }
    });
    assert!(judged >= 28, "{judged}");
}

/// One stage left out: the next one is judged from the last stage that is present.
#[test]
fn a_gap_is_bridged_from_the_last_stage_that_is_there() {
    layers(|name, _, case| {
        let o = report(&only(case, &["gate_up", "down"]), "down");
        assert_eq!(o.verdict, Verdict::Pass, "{name}: {o:#?}");
        assert!(o.note.is_some_and(|n| n.contains("carried from `gate_up`")), "{name}");
        let o = report(&only(case, &["activated", "y"]), "y");
        assert_eq!(o.verdict, Verdict::Pass, "{name}: {o:#?}");
        assert!(o.note.is_some_and(|n| n.contains("carried from `activated`")), "{name}");
    });
}

/// A token with a wrong expert is reported in y only, and only for that token.
#[test]
fn a_swapped_expert_is_caught_from_y_alone() {
    layers(|name, c, case| {
        let mut wrong = only(case, &["y"]);
        let ids = wrong.outputs["topk_ids"].clone();
        let map = wrong.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
        let here = |id: i32| map.as_ref().is_none_or(|m| m[id as usize] >= 0);
        let mut values = ids.elements::<i32>().into_owned();
        let token = |at: usize| at / c.top_k * c.top_k..(at / c.top_k + 1) * c.top_k;
        let free = |at: usize| {
            let taken = &values[token(at)];
            (0..c.num_experts as i32).find(|e| here(*e) && !taken.contains(e))
        };
        let place = |&at: &usize| here(values[at]) && (free(at).is_some() || c.top_k > 1);
        let at = (0..values.len()).find(place).expect("a token with an expert on this rank");
        match free(at) {
            Some(other) => values[at] = other,
            // The token has every expert; two of them are exchanged, with their weights.
            None => values.swap(at, at + 1),
        }
        let shape = ids.shape().to_vec();
        let swapped = Tensor::from_vec("out.topk_ids", DType::I32, shape, values);
        wrong.add_output("topk_ids", swapped.expect("a tensor"));
        let o = report(&wrong, "y");
        assert_eq!(o.verdict, Verdict::Fail, "{name}: {o:#?}");
        let first = o.first_mismatch.expect("a place");
        assert_eq!(first.index[0], at / c.top_k, "{name}");
        assert!(o.mismatches <= c.hidden_size, "{name}: {}", o.mismatches);
        println!("{name}: {} of {} values of the token", o.mismatches, c.hidden_size);
    });
}
