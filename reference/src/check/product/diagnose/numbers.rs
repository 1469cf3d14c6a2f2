//! Suspects that need no other product: zeros, infinities, and factors.

use super::Finding;
use super::scene::Scene;
use crate::gemm::Bounded;

/// Zeros in the place of numbers, and numbers in the place of zeros.
pub(super) fn plain(scene: &Scene<'_>) -> Option<Finding> {
    if !scene.found.is_empty() && scene.found.iter().all(|x| *x == 0.0) {
        return Some(Finding::new("all-zeros", "every element of the output is zero"));
    }
    if scene.wrong.iter().all(|&i| scene.home[i / scene.size_n].is_none()) {
        return Some(Finding::new(
            "absent-expert-not-zero",
            "rows of experts that are not on this rank are not zero",
        ));
    }
    if scene.wrong.iter().all(|&i| scene.found[i] == 0.0) {
        let text = "every wrong element is zero: not written, or multiplied by zero";
        return Some(Finding::new("zeros", text));
    }
    None
}

/// Infinities and NaN.
pub(super) fn special(scene: &Scene<'_>) -> Option<Finding> {
    let special = scene.wrong.iter().filter(|&&i| !scene.found[i].is_finite()).count();
    if special == 0 {
        return None;
    }
    let nan = scene.wrong.iter().filter(|&&i| scene.found[i].is_nan()).count();
    let infinite = special - nan;
    let text = format!(
        "{special} elements are no numbers where one belongs ({nan} NaN, {infinite} infinite)"
    );
    let mut finding = Finding::new("not-finite", text);
    finding.diagnosis.unexplained = scene.wrong.len() - special;
    Some(finding)
}

/// One factor for all wrong elements of a part.
pub(super) fn factor(scene: &Scene<'_>) -> Option<Finding> {
    if scene.stage.parts.iter().any(|p| p.weight.bias.is_some()) || scene.wrong.len() < 4 {
        return None;
    }
    let mut factors = Vec::new();
    for bad in &scene.bad {
        let (mut lo, mut hi) = (f64::NEG_INFINITY, f64::INFINITY);
        for &i in scene.wrong {
            if scene.home[i / scene.size_n] == Some(bad.part) {
                let (a, b) = ratios(&scene.bounded[i], scene.found[i])?;
                (lo, hi) = (lo.max(a), hi.min(b));
            }
        }
        if lo > hi || (lo..=hi).contains(&1.0) {
            return None;
        }
        factors.push((bad.part, (lo + hi) / 2.0));
    }
    let &(_, first) = factors.first()?;
    let named: Vec<String> = factors
        .iter()
        .take(4)
        .map(|&(part, f)| {
            if scene.stage.parts.len() > 1 {
                format!("{f:.6} (expert {})", scene.stage.parts[part].global)
            } else {
                format!("{f:.6}")
            }
        })
        .collect();
    let mut text = format!("every wrong element is what it should be times {}", named.join(", "));
    let power = first.abs().log2().round();
    if power != 0.0 && (first.abs() / power.exp2() - 1.0).abs() < 1e-4 {
        text += &format!(", or 2^{power}");
    }
    let one_half = {
        let half = scene.size_n / 2;
        let upper = |i: &usize| i % scene.size_n >= half;
        scene.wrong.iter().all(upper) || !scene.wrong.iter().any(upper)
    };
    let global = scene.stage.parts.iter().any(|p| p.weight.global_scale.is_some());
    if scene.stage.name == "gate_up" && one_half && global {
        text += ": gate and up have a global scale each, and one of them was applied to both";
        return Some(Finding::new("gate-scale-on-up", text));
    }
    Some(Finding::new("constant-factor", text))
}

/// The factors by which the exact number may have been multiplied before its roundings.
fn ratios(b: &Bounded, found: f64) -> Option<(f64, f64)> {
    if b.exact == 0.0 || b.is_unbounded() {
        return None;
    }
    let factor = found / b.exact;
    // The errors grow with the number; an ulp at most doubles them.
    let radius = b.below.max(b.above) / b.exact.abs() * factor.abs().max(1.0) * 2.0;
    Some((factor - radius, factor + radius))
}
