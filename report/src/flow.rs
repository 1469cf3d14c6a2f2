//! The order in which a layer computes its outputs: causes come before their effects.

use marlinspike::check::{CaseReport, OutputReport, Verdict};

/// Where in a layer an output is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Packed weights, scales, zero points, biases, and the order of their rows.
    Weights,
    Routing,
    /// Quantized activations.
    Activations,
    GateUp,
    Activated,
    Down,
    Y,
}

fn stage(output: &str) -> Stage {
    match output {
        "gate_up" => Stage::GateUp,
        "activated" => Stage::Activated,
        "down" => Stage::Down,
        "y" => Stage::Y,
        "topk_ids"
        | "topk_weights"
        | "token_expert_indices"
        | "sorted_token_ids"
        | "expert_ids"
        | "num_tokens_post_padded" => Stage::Routing,
        "a_q" | "a_scales" | "lhs_packed" | "x_fp4" | "x_scale" => Stage::Activations,
        _ => Stage::Weights,
    }
}

/// The outputs of a case by stage, causes first, and by name within a stage.
pub fn ordered(report: &CaseReport) -> Vec<&OutputReport> {
    let mut outputs: Vec<_> = report.outputs.iter().collect();
    outputs.sort_by_key(|o| stage(&o.name));
    outputs
}

/// The failed outputs of the same case that a failed `output` is computed from.
///
/// Products are judged from the checkpoint's weights, so wrong packed weights also make products
/// wrong. Every other stage is judged from the recorded outputs of the previous stage.
pub fn causes<'r>(report: &'r CaseReport, output: &OutputReport) -> Vec<&'r str> {
    if output.verdict != Verdict::Fail {
        return Vec::new();
    }
    let has_down = report.outputs.iter().any(|o| o.name == "down");
    let own = stage(&output.name);
    let is_read = |name: &str| match (own, stage(name)) {
        (Stage::GateUp, Stage::Weights) => name.starts_with("w13_"),
        (Stage::Down, Stage::Weights) => name.starts_with("w2_"),
        (Stage::GateUp, Stage::Activations)
        | (Stage::Activated, Stage::GateUp)
        | (Stage::Down, Stage::Activated)
        | (Stage::Y, Stage::Down) => true,
        (Stage::Y, Stage::Weights | Stage::Activations) => !has_down,
        _ => false,
    };
    let failed = report.outputs.iter().filter(|o| o.verdict == Verdict::Fail);
    failed.map(|o| o.name.as_str()).filter(|name| is_read(name)).collect()
}

#[cfg(test)]
mod tests {
    use marlinspike::case::{AlignConfig, Case, CaseConfig};

    use super::*;

    fn report(failed: &[&str], passed: &[&str]) -> CaseReport {
        let config =
            AlignConfig { block_size: 8, num_experts: 4, top_k: 2, ep_size: 1, ep_rank: 0 };
        let case = Case::new("a case", CaseConfig::Align(config), "");
        let output = |name: &&str, verdict| {
            let mut output = OutputReport::unchecked(name, 1, "");
            output.verdict = verdict;
            output
        };
        let failed = failed.iter().map(|n| output(n, Verdict::Fail));
        let passed = passed.iter().map(|n| output(n, Verdict::Pass));
        CaseReport::new(&case, failed.chain(passed).collect())
    }

    #[test]
    fn causes_come_first() {
        let layer = report(&["y", "down", "w2_marlin_qweight", "activated"], &["topk_ids"]);
        let names: Vec<_> = ordered(&layer).iter().map(|o| o.name.as_str()).collect();
        assert_eq!(names, ["w2_marlin_qweight", "topk_ids", "activated", "down", "y"]);
    }

    #[test]
    fn stages_follow_from_what_they_read() {
        let of = |report: &CaseReport, name: &str| -> Vec<String> {
            let output = report.outputs.iter().find(|o| o.name == name).unwrap();
            causes(report, output).into_iter().map(str::to_owned).collect()
        };
        let layer = report(&["gate_up", "down", "y", "w2_marlin_scales"], &["w13_marlin_scales"]);
        assert_eq!(of(&layer, "down"), ["w2_marlin_scales"]);
        assert_eq!(of(&layer, "y"), ["down"]);
        assert!(of(&layer, "gate_up").is_empty());
        let stages = report(&["activated", "down"], &["gate_up", "y"]);
        assert_eq!(of(&stages, "down"), ["activated"]);
        assert!(of(&stages, "activated").is_empty() && of(&stages, "y").is_empty());
        let linear = report(&["y", "marlin_scales", "a_scales"], &["marlin_qweight"]);
        assert_eq!(of(&linear, "y"), ["a_scales", "marlin_scales"]);
        assert!(of(&linear, "marlin_scales").is_empty());
        assert!(of(&report(&["marlin_scales"], &["y"]), "y").is_empty());
    }
}
