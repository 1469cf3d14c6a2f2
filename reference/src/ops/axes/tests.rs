//! Covering arrays against a search of all rows.

use super::{Axes, Space};
use crate::ops::CaseConfig;
use crate::ops::configs::AlignConfig;

/// Sizes 2 to 5 on five axes; several rules, one of three axes, one that leaves a value of an axis only
/// with others.
fn space() -> Axes {
    let base = AlignConfig { block_size: 0, num_experts: 0, top_k: 0, ep_size: 0, ep_rank: 0 };
    let numbers = |len: usize| (0..len).map(|i| (i.to_string(), i)).collect::<Vec<_>>();
    Space::new(base, |_| {})
        .axis("a", numbers(4), |c: &mut AlignConfig, &v| c.block_size = v)
        .axis("b", numbers(3), |c, &v| c.num_experts = v)
        .axis("c", numbers(5), |c, &v| c.top_k = v)
        .axis("d", numbers(2), |c, &v| c.ep_size = v)
        .axis("e", numbers(3), |c, &v| c.ep_rank = v)
        .illegal("a 3 needs d 1", &["a", "d"], |c| c.block_size == 3 && c.ep_size == 0)
        .illegal("d 1 needs e 0", &["d", "e"], |c| c.ep_size == 1 && c.ep_rank > 0)
        .illegal("b + c + e are few", &["b", "c", "e"], |c| c.num_experts + c.top_k + c.ep_rank > 6)
        .axes()
}

/// Every row, legal or not.
fn all_rows(axes: &Axes) -> Vec<Vec<usize>> {
    axes.sizes().iter().fold(vec![Vec::new()], |rows, &size| {
        let longer = |row: Vec<usize>| (0..size).map(move |v| [row.as_slice(), &[v]].concat());
        rows.into_iter().flat_map(longer).collect()
    })
}

/// The values of the axes that the bits of `mask` name.
fn part(row: &[usize], mask: usize) -> Vec<Option<usize>> {
    (0..row.len()).map(|i| (mask >> i & 1 == 1).then_some(row[i])).collect()
}

#[test]
fn every_legal_combination_is_in_a_row_and_no_illegal_row() {
    let axes = space();
    // Derived anew from the rules' meaning, not from their tables.
    let is_legal = |r: &[usize]| {
        let is_illegal = r[0] == 3 && r[3] == 0 || r[3] == 1 && r[4] > 0;
        !is_illegal && r[1] + r[2] + r[4] <= 6
    };
    let legal: Vec<_> = all_rows(&axes).into_iter().filter(|row| is_legal(row)).collect();
    let mut lengths = Vec::new();
    for strength in 1..=5 {
        let rows = axes.cover(strength);
        assert!(rows.iter().all(|row| is_legal(row) && axes.objection(row).is_none()));
        for mask in (0..1usize << 5).filter(|m| m.count_ones() as usize == strength) {
            for row in &legal {
                let wanted = part(row, mask);
                assert!(rows.iter().any(|r| part(r, mask) == wanted), "{strength}: {wanted:?}");
            }
        }
        assert_eq!(rows, axes.cover(strength), "another array");
        lengths.push(rows.len());
    }
    // At least the product of the largest axes; far fewer than all.
    assert!(lengths[1] >= 20 && lengths[1] <= 26, "{lengths:?}");
    assert_eq!(lengths[4], legal.len());
}

/// d 1 needs e 0, and a 3 needs d 1: so a 3 needs e 0, which no rule says.
#[test]
fn combinations_that_rules_exclude_together_are_illegal() {
    let axes = space();
    assert!(axes.complete(&[Some(3), None, None, None, Some(1)]).is_none());
    assert!(axes.complete(&[Some(3), None, None, None, Some(0)]).is_some());
    assert!(axes.cover(2).iter().all(|row| row[0] != 3 || row[4] == 0));
    assert_eq!(axes.objection(&[3, 0, 0, 0, 0]), Some("a 3 needs d 1"));
}

#[test]
fn combinations_that_belong_together_are_in_every_array() {
    let mut axes = space();
    axes.together = vec![vec![0, 1, 2]];
    let rows = axes.cover(1);
    let legal = all_rows(&axes).into_iter().filter(|row| axes.objection(row).is_none());
    for row in legal {
        assert!(rows.iter().any(|r| r[..3] == row[..3]), "{row:?}");
    }
    // Another axis changes no config.
    let more = axes.and("law", vec!["x".into(), "y".into()]);
    let rows = more.cover(2);
    assert!((0..2).all(|law| rows.iter().any(|row| row[5] == law && row[0] == 3)));
    assert_eq!(more.config(&[1, 2, 3, 0, 0, 1]), space().config(&[1, 2, 3, 0, 0]));
}

/// A rule that a subject adds restricts the rows as a declared one does.
#[test]
fn a_subject_restricts_the_axes() {
    use crate::ops::CaseConfig;
    let is_odd = |config: &CaseConfig| match config {
        CaseConfig::Align(c) => (c.block_size + c.ep_rank) % 2 == 1,
        _ => unreachable!("alignment"),
    };
    let axes = space().and_illegal("a + e is even", &["e", "a"], is_odd);
    let rows = axes.cover(2);
    assert!(rows.iter().all(|row| (row[0] + row[4]) % 2 == 0 && space().objection(row).is_none()));
    for row in all_rows(&axes).iter().filter(|row| axes.objection(row).is_none()) {
        assert!(rows.iter().any(|r| r[..2] == row[..2]) && (row[0] + row[4]) % 2 == 0);
    }
    assert_eq!(axes.objection(&[0, 0, 0, 0, 1]), Some("a + e is even"));
}

/// One requirement on one axis, one on the sum of two: every pair of values that legal rows with both have
/// is in the array, and no other row.
#[test]
fn requirements_restrict_the_array() {
    let meets = |config: &CaseConfig| {
        let CaseConfig::Align(c) = config else { panic!("another operation") };
        vec![c.top_k == 1 || c.top_k == 4, c.block_size + c.num_experts == 4]
    };
    let axes = space();
    let wanted: Vec<_> = all_rows(&axes)
        .into_iter()
        .filter(|r| axes.objection(r).is_none() && [1, 4].contains(&r[2]) && r[0] + r[1] == 4)
        .collect();
    let rows = axes.meeting(&meets).cover(2);
    assert!(rows.iter().all(|row| wanted.contains(row)), "{rows:?}");
    for mask in (0..1usize << 5).filter(|m| m.count_ones() == 2) {
        for row in &wanted {
            assert!(rows.iter().any(|r| part(r, mask) == part(row, mask)), "{row:?}");
        }
    }
    let none = |config: &CaseConfig| vec![meets(config)[0], false];
    assert!(space().meeting(&none).cover(2).len() < space().cover(2).len());
}
