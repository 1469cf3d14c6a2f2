//! Ids and weights of a family's router, judged by the rule's second implementation in f64.

use super::rows::{self, Arranged, TopkOrder};
use super::tokens::TokenInputs;
use super::{mismatch, passing};
use crate::Result;
use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::moe::block::Block;
use crate::moe::families::{RouterTensors, RoutingRule};
use crate::moe::layer::Routed;
use crate::num::array::rows_of;
use crate::ops::case::Case;

/// Judges `topk_ids` and `topk_weights`. If the case has only weights, they are judged with the
/// routed ids; if it has only ids, with the routed weights.
pub(crate) fn judge(
    case: &Case<'_>,
    rule: &RoutingRule,
    logits: &[f32],
    (block, order): (Option<&Block>, TopkOrder),
) -> Result<Vec<OutputReport>> {
    let [_, experts] = case.input("router_logits")?.dims2()?;
    let padding = rows::padding(logits, experts, false);
    if block.is_some() {
        rows::refuse_padding(logits, experts, &padding)?;
    }
    let is_plain = padding.is_empty() && order == TopkOrder::Sorted;
    let logits = rows::without_padding(logits, experts, &padding);
    let bias = case.inputs.get("e_score_correction_bias").map(|t| t.elements::<f32>());
    let scale = case.inputs.get("expert_scale").map(|t| t.elements::<f32>());
    let tensors =
        RouterTensors { correction_bias: bias.as_deref(), expert_scale: scale.as_deref() };
    let (ids, weights) = (case.output("topk_ids"), case.output("topk_weights"));
    if ids.is_none() && weights.is_none() {
        return Ok(Vec::new());
    }
    let logits = rows_of("router_logits", &logits, experts)?;
    let own = TokenInputs::read(&case.inputs, rule, block)?;
    let routing = rule.route_tokens(logits, tensors, own.tokens())?;
    let made = routing.routed()?;
    let expected = (made.ids(), made.weights());
    let arranged = match is_plain {
        true => None,
        false => Some(Arranged::new(case, padding, order, expected, rule.top_k)?),
    };
    let (file, case) = (case, arranged.as_ref().map_or(case, |a| &a.case));
    let (ids, weights) = (case.output("topk_ids"), case.output("topk_weights"));
    let found_ids = ids.map(|t| t.elements::<i32>());
    let found_weights = weights.map(|t| t.elements::<f32>());
    let id = found_ids.as_deref().unwrap_or(made.ids());
    let weight = found_weights.as_deref().unwrap_or(made.weights());
    let k = rule.top_k;
    let found = Routed::from_rows(k, id, weight)?;
    let wrong = rule.compare_tokens(logits, tensors, own.tokens(), found)?;
    let report = |name: &str, bits: &[u32], expected: &[u32], wrong: &[(usize, String)]| {
        let mut report = passing(name, bits.len());
        let same = bits.iter().zip(expected).filter(|(a, b)| a == b).count();
        report.equal_bits = Some(same as f64 / bits.len().max(1) as f64);
        let Some((first, text)) = wrong.first() else { return report };
        report.verdict = Verdict::Fail;
        report.mismatches = wrong.len();
        let at = vec![first / k, first % k];
        report.first_mismatch = Some(mismatch(at, None, expected[*first], bits[*first]));
        let text = format!("{text}; {} wrong entries", wrong.len());
        report.diagnosis = Some(Diagnosis::place(format!("{name}-differ"), text, wrong.len()));
        report
    };
    let mut reports = Vec::new();
    if ids.is_some() {
        let bits: Vec<u32> = id.iter().map(|x| x.cast_unsigned()).collect();
        let expected: Vec<u32> = made.ids().iter().map(|x| x.cast_unsigned()).collect();
        reports.push(report("topk_ids", &bits, &expected, &wrong.ids));
    }
    if weights.is_some() {
        let bits: Vec<u32> = weight.iter().map(|x| x.to_bits()).collect();
        let expected: Vec<u32> = made.weights().iter().map(|x| x.to_bits()).collect();
        reports.push(report("topk_weights", &bits, &expected, &wrong.weights));
    }
    if let Some(arranged) = &arranged {
        arranged.restore(file, experts + rule.shared_experts, &mut reports);
    }
    Ok(reports)
}
