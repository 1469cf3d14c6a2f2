//! Verdicts on a layer's routing.

use super::MoeConfig;
use crate::Result;
use crate::judge::OutputReport;
use crate::num::array::rows_of;
use crate::ops::case::Case;
use crate::ops::routing::{align, topk, widened};

pub(super) fn judge(case: &Case<'_>, c: &MoeConfig) -> Result<Vec<OutputReport>> {
    let mut reports = Vec::new();
    let mut ids: Option<Vec<i32>> = case.output("topk_ids").map(|t| t.elements().into_owned());
    if let Some(logits) = case.inputs.get("router_logits") {
        let (values, _) = widened(logits)?;
        let router = c.router();
        if ids.is_none() {
            let logits = rows_of("router_logits", &values, c.num_experts)?;
            ids = Some(router.route(logits)?.topk_ids.into_raw_vec_and_offset().0);
        }
        reports = topk(case, router, &values, logits)?;
    }
    if let Some(ids) = ids {
        let map = case.inputs.get("expert_map");
        reports.extend(align::judge(case, &ids, c.num_experts, c.block_size_m, map)?);
    }
    Ok(reports)
}
