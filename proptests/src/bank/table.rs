//! The table of the documentation.

use std::fmt::Write;
use std::time::Duration;

use super::{Bug, Measured, SEEDS, measure};
use crate::campaign::{CampaignError, Limit, axes};

/// Kernel runs for shrinking one bug.
const SHRINKING: u32 = 200;

/// A row of the table.
#[derive(Debug, Clone)]
pub struct Row {
    /// The bug.
    pub bug: Bug,
    /// One for each seed.
    pub seeds: Vec<Measured>,
    /// Sizes of the case that shrinking ends at.
    pub minimal: String,
}

/// Measures a bug at every seed and shrinks its first failing case.
///
/// # Errors
/// As [`measure`].
pub fn row(bug: &Bug) -> Result<Row, CampaignError> {
    row_of(bug, 0..SEEDS)
}

/// As [`row`], at these seeds.
///
/// # Errors
/// As [`measure`].
pub fn row_of(bug: &Bug, seeds: impl IntoIterator<Item = u64>) -> Result<Row, CampaignError> {
    let campaign = bug.campaign(0)?;
    let seeds = seeds.into_iter().map(|seed| measure(bug, &campaign.clone().with_seed(seed)));
    let seeds = seeds.collect::<Result<Vec<_>, _>>()?;
    let mut shrinking = campaign;
    // A limit of time would make the table depend on the machine.
    shrinking.shrink = (SHRINKING, Duration::MAX);
    let limit = Limit { findings: 1, ..Limit::cases(super::CASES) };
    let summary = shrinking.run(&mut *bug.kernel(), &limit, &mut |_| ())?;
    let minimal = summary.findings.first().map_or_else(String::new, |finding| {
        let case = &finding.failure.case;
        let keys = axes(&case.config);
        let shown = [
            ("size_m", "M"),
            ("size_n", "N"),
            ("size_k", "K"),
            ("num_experts", "E"),
            ("top_k", "top-k"),
            ("hidden_size", "H"),
            ("intermediate_size", "I"),
            ("group_size", "group"),
        ];
        let sizes =
            shown.iter().filter_map(|(key, name)| Some(format!("{name} {}", keys.get(*key)?)));
        let sizes: Vec<String> = sizes.collect();
        if !sizes.is_empty() {
            return sizes.join(", ");
        }
        let first = case.inputs.iter().next();
        first.map_or_else(String::new, |(name, tensor)| format!("`{name}` {:?}", tensor.shape()))
    });
    Ok(Row { bug: *bug, seeds, minimal })
}

impl Row {
    /// Median and worst number of cases until the first failing one; `None` if a seed has none.
    pub fn cases(&self) -> Option<(u64, u64)> {
        let mut cases = self.seeds.iter().map(|m| m.cases).collect::<Option<Vec<_>>>()?;
        cases.sort_unstable();
        Some((cases[cases.len() / 2], *cases.last()?))
    }

    /// Whether every seed rejects the bug and names its cause, if that is known.
    pub fn is_right(&self) -> bool {
        let known = !self.bug.causes.is_empty();
        let right = |m: &Measured| m.named.is_some() == known;
        self.cases().is_some() && self.seeds.iter().all(right)
    }

    fn cause(&self) -> String {
        if self.bug.causes.is_empty() {
            return "rejected, not named".to_owned();
        }
        let cause = self.seeds.iter().find_map(|m| m.cause.as_deref());
        let others = self.seeds.iter().filter(|m| !m.misnamed.is_empty()).count();
        let note = match others {
            0 => String::new(),
            _ => format!(", after another cause at {others} of {SEEDS} seeds"),
        };
        format!("`{}`{note}", cause.unwrap_or("-"))
    }
}

/// The columns that do not depend on measurements.
pub fn fixed(bug: &Bug) -> String {
    let filter = if bug.filter.is_empty() { "all".to_owned() } else { format!("`{}`", bug.filter) };
    let keys: Vec<String> = bug.keys.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let with = if keys.is_empty() { String::new() } else { format!(", with `{}`", keys.join(",")) };
    let filter = filter.replace('|', "\\|").replace(',', ", ") + &with;
    let Bug { number, name, seen, op, .. } = bug;
    format!("| {number} | {name} | {seen} | `{op}` | {filter} |")
}

/// The line of a row, without its end.
pub fn line(row: &Row) -> String {
    let (median, worst) = row.cases().unwrap_or_default();
    let by = row.seeds.first().map_or("", |m| m.by.as_str());
    format!("{} {by} | {median} | {worst} | {} | {} |", fixed(&row.bug), row.minimal, row.cause())
}

/// The page.
pub fn markdown(rows: &[Row]) -> String {
    let mut page = PREFACE.to_owned();
    for row in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(page, "{}", line(row));
    }
    page
}

const PREFACE: &str = "\
# Bug bank

<!-- Written by `cargo run -p marlinspike-proptests --example bug_bank`; a test fails when it is stale. -->

The fuzzing kit must reject every bug in this table within 200 cases, at each of 20 seeds, and must name the cause where it is
known. Each bug is a wrong kernel in `proptests/src/bank`: mostly the reference on changed inputs. The reference itself passes the
same campaigns.

- Bugs 1 to 31 shipped or were proposed. V is vllm-project/vllm, S is sgl-project/sglang. Bugs 32 to 51 are differences between
  engines and mistakes that recur in ports. Bug 52 was [found by this project's campaigns](findings.md#29-weights-lose-the-bits-of-their-bias).
- *Configurations* is the campaign's filter, as `marlinspike fuzz --where` takes it.
- *Cases* is the number of cases up to the first failing one: median and worst over seeds 0 to 19.
- *Named* is the cause that `check` gives. It may take more than the first failing case; where a case has too few values to tell two
  causes apart, another cause may come first.
- *Smallest case* is where shrinking ends at seed 0.
- Sums in another order (18, 29) and races (17) are within every bound; only laws reject them. A kernel that claims determinism or
  batch invariance is tested for it with `Campaign::laws`.

| # | bug | seen in | operation | configurations | rejected by | cases, median | worst | smallest case | named |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
";
