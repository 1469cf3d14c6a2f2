//! `--backend`: judges a device's outputs instead of the recorded ones.

use std::collections::BTreeMap;

use anyhow::Result;
use marlinspike_accel::backend::{Count, NOT_ON_DEVICE};
use serde_json::{Value, json};

pub(super) use marlinspike_accel::AccelError as DeviceError;
pub(super) use marlinspike_accel::backend::{BackendError, Counts, check};

pub(super) use crate::backend::Device;

use super::Checked;
use crate::error::of_gpu;
use crate::style::printable;

/// Returns an error if a case needed a compiler that is not installed, since the case is not at
/// fault.
///
/// # Errors
/// Names what is missing.
pub(super) fn without_compiler(checked: &[Checked]) -> Result<()> {
    for case in checked {
        let failed = case.result.as_ref().err().and_then(|error| error.of_device());
        if let Some(error @ DeviceError::NvrtcMissing { .. }) = failed {
            return Err(of_gpu(error.clone()));
        }
    }
    Ok(())
}

/// The comparisons made on a device in a run.
pub(super) struct Tally {
    name: String,
    counts: Counts,
    /// Outputs that no kernel computes, by reason, the most frequent first.
    absent: Vec<(String, usize)>,
}

/// Number of reasons that are printed; the others are summed.
const REASONS: usize = 12;

impl Tally {
    pub(super) fn new(device: &Device, counts: Vec<Counts>, checked: &[Checked]) -> Self {
        Self::of(device.name().to_owned(), counts, checked)
    }

    fn of(name: String, all: Vec<Counts>, checked: &[Checked]) -> Self {
        let mut counts = Counts::new();
        for (operation, more) in all.into_iter().flatten() {
            let sum = counts.entry(operation).or_default();
            sum.calls += more.calls;
            sum.outputs += more.outputs;
            sum.differing += more.differing;
        }
        let mut absent = BTreeMap::<String, usize>::new();
        let outputs =
            checked.iter().filter_map(|c| c.result.as_ref().ok()).flat_map(|r| &r.outputs);
        for reason in outputs.filter_map(|o| o.note.as_deref()?.strip_prefix(NOT_ON_DEVICE)) {
            *absent.entry(reason.to_owned()).or_default() += 1;
        }
        let mut absent: Vec<_> = absent.into_iter().collect();
        absent.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        Self { name, counts, absent }
    }

    /// Labels and texts below the summary.
    pub(super) fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = vec![("device", printable(&self.name).into_owned())];
        for (operation, Count { calls, outputs, differing }) in &self.counts {
            let verdict = match differing {
                0 => "equal to the reference in every bit".to_owned(),
                1 => "1 differs from the reference".to_owned(),
                n => format!("{n} differ from the reference"),
            };
            lines.push(("", format!("{operation}: {calls} calls, {outputs} outputs, {verdict}")));
        }
        let all: usize = self.absent.iter().map(|(_, count)| count).sum();
        if all > 0 {
            lines.push(("not on cuda", format!("{all} outputs")));
        }
        for (reason, count) in self.absent.iter().take(REASONS) {
            lines.push(("", format!("{count}: {}", printable(reason))));
        }
        let rest: usize = self.absent.iter().skip(REASONS).map(|(_, count)| count).sum();
        if rest > 0 {
            lines.push(("", format!("{rest}: for other reasons, which -v shows")));
        }
        lines
    }

    /// The tally as JSON.
    pub(super) fn json(&self) -> Value {
        let operation = |(name, count): (&&str, &Count)| {
            let Count { calls, outputs, differing } = count;
            let counts = json!({ "calls": calls, "outputs": outputs, "differing": differing });
            ((*name).to_owned(), counts)
        };
        let operations: serde_json::Map<_, _> = self.counts.iter().map(operation).collect();
        let absent: serde_json::Map<_, _> =
            self.absent.iter().map(|(reason, count)| (reason.clone(), json!(count))).collect();
        json!({ "name": self.name, "operations": operations, "not_on_cuda": absent })
    }
}

#[cfg(test)]
mod tests {
    use marlinspike::case::{AlignConfig, Case, CaseConfig};
    use marlinspike::check::{CaseReport, OutputReport};

    use super::*;

    #[test]
    fn what_is_not_computed_is_counted_by_its_reason() {
        let config =
            AlignConfig { block_size: 8, num_experts: 4, top_k: 2, ep_size: 1, ep_rank: 0 };
        let case = Case::new("a case", CaseConfig::Align(config), "");
        let absent = |name: &str, reason: &str| {
            OutputReport::unchecked(name, 1, &format!("{NOT_ON_DEVICE}{reason}"))
        };
        let outputs =
            vec![absent("a", "no kernel"), absent("b", "act-order"), absent("c", "no kernel")];
        let checked = Checked {
            path: "x.safetensors".into(),
            label: "x".into(),
            result: Ok(CaseReport::new(&case, outputs)),
            left_out: Vec::new(),
            known_fault: None,
        };
        let count = |differing| Count { calls: 2, outputs: 10, differing };
        let counts = vec![
            Counts::from([("moe_sum", count(0)), ("topk_router", count(1))]),
            Counts::from([("moe_sum", count(0))]),
        ];
        let tally = Tally::of("GPU".into(), counts, &[checked]);
        let lines: Vec<String> = tally.lines().into_iter().map(|(_, text)| text).collect();
        let expected = [
            "GPU",
            "moe_sum: 4 calls, 20 outputs, equal to the reference in every bit",
            "topk_router: 2 calls, 10 outputs, 1 differs from the reference",
            "3 outputs",
            "2: no kernel",
            "1: act-order",
        ];
        assert_eq!(lines, expected);
        let json = tally.json();
        assert_eq!(json["operations"]["moe_sum"]["outputs"], 20);
        assert_eq!(json["not_on_cuda"]["no kernel"], 2);
    }
}
