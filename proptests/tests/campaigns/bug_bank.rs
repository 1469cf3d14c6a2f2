//! Campaigns reject every bug of the bank and accept the reference, and the documented table is
//! current.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use marlinspike_golden::Tier;
use marlinspike_proptests::bank::{
    Bug, Measured, Row, SEEDS, bugs, fixed, line, markdown, measure, on_all_cores, right, row_of,
};
use marlinspike_proptests::campaign::{CampaignError, Limit};

/// Every case of the right kernel.
fn full() -> bool {
    Tier::current() != Tier::Plain
}

/// Every seed.
fn nightly() -> bool {
    Tier::current() == Tier::Nightly
}

#[test]
fn the_numbers_are_complete() {
    let numbers: BTreeSet<u32> = bugs().iter().map(|bug| bug.number).collect();
    assert_eq!(numbers, (1..=52).collect());
}

/// The rows of the table, at some seeds or at all, measured once for all tests of this program.
fn measured_rows() -> &'static [Row] {
    static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
    ROWS.get_or_init(|| {
        let rows: Result<Vec<Row>, CampaignError> = on_all_cores(&bugs(), |bug| match nightly() {
            true => row_of(bug, 0..SEEDS),
            false => row_of(bug, [0, SEEDS / 2, SEEDS - 1]),
        })
        .into_iter()
        .collect();
        rows.unwrap()
    })
}

/// A plain `cargo test` tries every third bug with one seed, `full` every bug with three seeds, and `nightly` with all
/// seeds of the table.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation")]
fn every_bug_is_rejected_and_named() {
    let faults = |bug: &Bug, seeds: &[Measured]| {
        let known = !bug.causes.is_empty();
        let wrong = seeds.iter().filter(|m| m.cases.is_none() || (known && m.named.is_none()));
        wrong.map(|m| format!("{} {}: {m:?}", bug.number, bug.name)).collect::<Vec<_>>()
    };
    let tried: Vec<Bug> = bugs().into_iter().step_by(if full() { 1 } else { 3 }).collect();
    let faults: Vec<Vec<String>> = if full() {
        measured_rows().iter().map(|row| faults(&row.bug, &row.seeds)).collect()
    } else {
        on_all_cores(&tried, |bug| {
            let campaign = bug.campaign(0).unwrap_or_else(|e| panic!("{}: {e}", bug.number));
            faults(bug, &[measure(bug, &campaign.with_seed(0)).unwrap()])
        })
    };
    assert_eq!(faults.len(), tried.len());
    let faults = faults.concat();
    assert!(faults.is_empty(), "{faults:#?}");
}

/// No false alarm: the reference passes the campaigns that reject the bugs.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation")]
fn the_reference_is_accepted() {
    // Bugs with the same campaign share a run.
    let mut campaigns: BTreeMap<String, Bug> = BTreeMap::new();
    for bug in bugs() {
        let key = format!("{} {} {:?} {:?}", bug.op, bug.filter, bug.keys, bug.outputs);
        let laws = campaigns.entry(key).or_insert(bug).laws;
        campaigns.values_mut().filter(|b| b.number == bug.number).for_each(|b| {
            b.laws.deterministic |= laws.deterministic;
            b.laws.batch_invariant |= laws.batch_invariant;
        });
    }
    let nth = if full() { 1 } else { 3 };
    let campaigns: Vec<Bug> = campaigns.into_values().step_by(nth).collect();
    let cases = if full() { 25 } else { 4 };
    let faults = on_all_cores(&campaigns, |bug| {
        let campaign = bug.campaign(1)?;
        let mut kernel = right();
        let summary = campaign.run(&mut *kernel, &Limit::cases(cases), &mut |_| ())?;
        // Cases with a weak bound, or none since sums may overflow, are unchecked.
        let accepted = summary.failed == 0 && summary.passed * 4 > cases;
        Ok::<_, CampaignError>((!accepted).then(|| format!("{}: {summary:#?}", bug.number)))
    });
    let faults: Vec<String> = faults.into_iter().filter_map(|fault| fault.unwrap()).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Compares a line of the page with measurements at some seeds: seed 0 gives what rejects the bug and
/// the smallest case; another seed may name a cause first, and none needs more cases than the worst.
fn expect_same_row(found: &str, row: &Row) -> Result<(), String> {
    let columns = |line: &str| {
        let mut columns: Vec<String> = line.rsplitn(6, " | ").map(str::to_owned).collect();
        columns.reverse();
        let [by, median, worst, minimal, cause] = columns.split_off(1).try_into().ok()?;
        let cause = cause.split('`').nth(1).unwrap_or(&cause).to_owned();
        Some(([columns.concat(), by, minimal, cause], median, worst))
    };
    let made = line(row);
    let (expected, _, _) = columns(&made).ok_or("no row")?;
    let (found, _, worst) = columns(found).ok_or("no row")?;
    if found != expected {
        return Err(format!("expected {expected:?}"));
    }
    let worst: u64 = worst.parse().map_err(|e| format!("worst: {e}"))?;
    match row.cases() {
        Some((_, needed)) if needed <= worst => Ok(()),
        needed => Err(format!("{needed:?} cases are needed, {worst} at most")),
    }
}

#[test]
fn a_wrong_row_of_the_table_is_found() {
    let bug = &bugs()[6];
    let row = row_of(bug, [0]).unwrap();
    let right = line(&row);
    expect_same_row(&right, &row).unwrap();
    let worst = row.cases().unwrap().1;
    let by = &row.seeds[0].by;
    let cause = row.seeds[0].cause.as_deref().unwrap();
    for (from, to) in [
        (format!(" {by} |"), " verdict on `z` |".to_owned()),
        (format!("| {worst} | {} |", row.minimal), format!("| 0 | {} |", row.minimal)),
        (row.minimal.clone(), "M 0".to_owned()),
        (cause.to_owned(), "another".to_owned()),
    ] {
        let wrong = right.replacen(&from, &to, 1);
        assert_ne!(wrong, right, "{from}");
        assert!(expect_same_row(&wrong, &row).is_err(), "{wrong}");
    }
}

/// The columns without measurements; with `MARLINSPIKE_TESTS=full` also what rejects a bug, its cause
/// and its smallest case, and with `nightly` the whole page.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation")]
fn the_table_is_current() {
    let again = "cargo run -p marlinspike-proptests --example bug_bank";
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/results/bug-bank.md");
    let page = std::fs::read_to_string(page).unwrap();
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
    let bugs = bugs();
    assert_eq!(rows.len(), bugs.len(), "run `{again}`");
    for (line, bug) in rows.iter().zip(&bugs) {
        assert!(line.starts_with(&fixed(bug)), "found {line}, run `{again}`");
    }
    if nightly() {
        assert!(markdown(measured_rows()) == page, "run `{again}`");
    } else if full() {
        for (found, row) in rows.iter().zip(measured_rows()) {
            expect_same_row(found, row).unwrap_or_else(|wrong| panic!("{found}: {wrong}"));
        }
    }
}
