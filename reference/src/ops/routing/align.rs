//! Judges blocks of tokens: lengths, labels and padding exactly; any order inside a run.

use super::{exact, mismatch, passing, picture};
use crate::Result;
use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::moe::align::{Absent, Align, Aligned, Run};
use crate::num::tensor::Tensor;
use crate::ops::case::Case;

/// Ids as [`Align::run`] takes them. Entries whose id is no expert are skipped: engines mark them by −1 or
/// by `num_experts`. (A wrong id in a case's routing has its own report.)
pub(in crate::ops) fn skipped(ids: &[i32]) -> Vec<i32> {
    ids.iter().map(|&id| if id < 0 { i32::MAX } else { id }).collect()
}

/// The treatments of absent experts, with the remark on a case that follows the second.
const FORMS: [(Absent, Option<&str>); 2] = [
    (Absent::Ignore, None),
    (Absent::Mark, Some("blocks of experts of other ranks are marked -1")),
];

/// Judges `sorted_token_ids`, `expert_ids` and `num_tokens_post_padded`, if present. Blocks of absent
/// experts are either omitted or marked; the form that fewer outputs, then fewer values contradict is reported.
pub(crate) fn judge(
    case: &Case<'_>,
    topk_ids: &[i32],
    num_experts: usize,
    block_size: usize,
    map: Option<&Tensor<'_>>,
) -> Result<Vec<OutputReport>> {
    let names = ["sorted_token_ids", "expert_ids", "num_tokens_post_padded"];
    if names.iter().all(|name| case.output(name).is_none()) {
        return Ok(Vec::new());
    }
    let ids = skipped(topk_ids);
    let map = map.map(|m| m.elements::<i32>());
    let mut best: Option<Vec<OutputReport>> = None;
    for (absent, remark) in FORMS {
        let align = Align { block_size, num_experts, expert_map: map.as_deref(), absent };
        let reports = judge_form(case, &align, &ids, remark)?;
        let wrong = |reports: &[OutputReport]| {
            let failed = reports.iter().filter(|r| r.verdict == Verdict::Fail).count();
            (failed, reports.iter().map(|r| r.mismatches).sum::<usize>())
        };
        if best.as_deref().is_none_or(|best| wrong(&reports) < wrong(best)) {
            best = Some(reports);
        }
        if map.is_none() {
            break;
        }
    }
    Ok(best.unwrap_or_default())
}

/// The reports on a case in one form, with its remark.
fn judge_form(
    case: &Case<'_>,
    align: &Align<'_>,
    ids: &[i32],
    remark: Option<&str>,
) -> Result<Vec<OutputReport>> {
    let aligned = align.run(ids)?;
    let block = align.block_size;
    let mut reports = Vec::new();
    if let Some(found) = case.output("num_tokens_post_padded") {
        let expected = [aligned.num_tokens_post_padded];
        reports.push(exact("num_tokens_post_padded", found, &expected, |place| {
            format!("the experts' tokens, each padded to blocks of {block}: {place}")
        })?);
    }
    if let Some(found) = case.output("expert_ids") {
        let mut report = exact("expert_ids", found, &aligned.expert_ids, |place| {
            format!("a block belongs to another expert: {place}")
        })?;
        report.note = remark.map(str::to_owned);
        if report.verdict == Verdict::Fail
            && let Some(cause) = unmapped(&found.elements::<i32>(), &aligned, block)
        {
            report.diagnosis = Some(cause);
        }
        reports.push(report);
    }
    if let Some(found) = case.output("sorted_token_ids") {
        reports.push(tokens(found, &aligned, block, ids.len())?);
    }
    Ok(reports)
}

/// The cause of labels that are the global ids of their blocks' experts.
fn unmapped(found: &[i32], aligned: &Aligned, block: usize) -> Option<Diagnosis> {
    let blocks = |run: &Run| run.tokens.len().div_ceil(block);
    let global = aligned.runs.iter();
    let global = global.flat_map(|run| std::iter::repeat_n(run.expert as i32, blocks(run)));
    (found.len() > 2 && global.eq(found.iter().copied())).then(|| {
        let text = "expert_ids holds global ids: the expert map was not applied";
        Diagnosis::explains("expert-map-missing", text)
    })
}

/// A wrong position of `sorted_token_ids`.
struct Wrong {
    position: usize,
    expert: usize,
    id: &'static str,
    text: String,
}

fn tokens(
    found: &Tensor<'_>,
    aligned: &Aligned,
    block: usize,
    numel: usize,
) -> Result<OutputReport> {
    let name = "sorted_token_ids";
    let values = found.elements::<i32>();
    let expected = &aligned.sorted_token_ids;
    if values.len() != expected.len() {
        return exact(name, found, expected, |place| place);
    }
    let mut report = passing(name, values.len());
    // The expert whose run each entry belongs to.
    let mut owners = vec![None; numel];
    for run in &aligned.runs {
        run.tokens.iter().for_each(|&token| owners[token as usize] = Some(run.expert));
    }
    let wrong: Vec<Wrong> = aligned
        .runs
        .iter()
        .flat_map(|run| judge_run(run, &values, &owners, block, numel))
        .collect();
    report.equal_bits = Some(1.0 - wrong.len() as f64 / values.len().max(1) as f64);
    let reordered = values.iter().zip(expected).filter(|(f, e)| f != e).count();
    if reordered > 0 && wrong.is_empty() {
        let text = "tokens stand in another order inside their expert's run: any is right";
        report.note = Some(text.to_owned());
    }
    let Some(first) = wrong.first() else { return Ok(report) };
    report.verdict = Verdict::Fail;
    report.mismatches = wrong.len();
    let (p, e) = (first.position, Some(first.expert));
    report.first_mismatch = Some(mismatch(vec![p], e, expected[p] as u32, values[p] as u32));
    let alike = wrong.iter().filter(|w| w.id == first.id).count();
    let more = match wrong.len() {
        1 => String::new(),
        n => format!(" ({n} wrong positions, {alike} of this kind)"),
    };
    let text = format!("{}{more}", first.text);
    report.diagnosis = Some(match wrong.len() - alike {
        0 => Diagnosis::explains(first.id, text),
        others => Diagnosis::consistent(first.id, text, others),
    });
    let places: Vec<usize> = wrong.iter().map(|w| w.position).collect();
    report.picture = Some(picture("block", values.len() / block.max(1), block, &places));
    Ok(report)
}

/// The wrong positions of one run. A position is right if it holds a token of the run for the first
/// time; the others are paired with the missing tokens.
fn judge_run(
    run: &Run,
    values: &[i32],
    owners: &[Option<usize>],
    block: usize,
    numel: usize,
) -> Vec<Wrong> {
    let count = run.tokens.len();
    let end = run.start + count.div_ceil(block) * block;
    let expert = run.expert;
    let mut seen = vec![false; count];
    let mut strange = Vec::new();
    let mut wrong = Vec::new();
    let mut add = |position: usize, id: &'static str, text: String| {
        let text =
            format!("block {}, position {position}, expert {expert}: {text}", position / block);
        wrong.push(Wrong { position, expert, id, text });
    };
    for (position, &value) in values.iter().enumerate().take(end).skip(run.start) {
        if position >= run.start + count {
            if usize::try_from(value) != Ok(numel) {
                let text = format!("padding holds {value}, not the sentinel {numel}");
                add(position, "padding-holds-token", text);
            }
            continue;
        }
        match run.tokens.binary_search(&value) {
            Ok(i) if !std::mem::replace(&mut seen[i], true) => {}
            known => strange.push((position, value, known.is_ok())),
        }
    }
    // There are as many positions as tokens, so each foreign value replaces one missing token.
    let missing = run.tokens.iter().zip(&seen).filter(|(_, seen)| !**seen).map(|(t, _)| t);
    for ((position, value, known), token) in strange.into_iter().zip(missing) {
        let owner = usize::try_from(value).ok().and_then(|v| owners.get(v).copied().flatten());
        let lost = format!("token entry {token} is missing");
        match owner {
            _ if known => {
                add(position, "token-twice", format!("entry {value} stands here twice; {lost}"));
            }
            _ if usize::try_from(value) == Ok(numel) => {
                add(position, "token-missing", format!("the sentinel {numel}; {lost}"));
            }
            Some(owner) => {
                let text = format!("entry {value} belongs to expert {owner}; {lost}");
                add(position, "token-of-another-expert", text);
            }
            None => {
                let text = format!("{value} is no entry of this rank's experts; {lost}");
                add(position, "no-token", text);
            }
        }
    }
    wrong
}
