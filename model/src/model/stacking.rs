//! Experts that are stored one by one, as the stacks w13 and w2 of their layer.

use std::collections::BTreeMap;

use marlinspike::config::Scheme;
use marlinspike::moe::families;

use super::matrix::{Matrix, Role, slot_of};
use super::stack::{MAX_EXPERTS, Stack};
use super::{Model, ModelError};

/// Drops the last experts that have no down projection, where the family has zero experts: checkpoints
/// may hold gate and up of those.
pub(super) fn without_zero_experts(
    model: &Model<'_>,
    layer: &str,
    experts: &mut BTreeMap<usize, BTreeMap<&str, Scheme>>,
) {
    let zero = families::resolve(&model.config, layer).map_or(0, |r| r.rule.zero_experts);
    let is_zero =
        |e: &BTreeMap<&str, Scheme>| e.keys().all(|p| !matches!(slot_of(p), Some((Role::W2, _))));
    for _ in 0..zero {
        match experts.last_entry() {
            Some(last) if is_zero(last.get()) => last.remove(),
            _ => break,
        };
    }
}

/// Why the experts of a layer are no stacks: two of w13 or of w2 are stored in different ways.
pub(super) fn other_scheme(
    layer: &str,
    experts: &BTreeMap<usize, BTreeMap<&str, Scheme>>,
) -> Option<String> {
    let mut first: BTreeMap<Role, (&Scheme, String)> = BTreeMap::new();
    for (e, projections) in experts {
        for (projection, scheme) in projections {
            let name = format!("{layer}.{e}.{projection}");
            let Some((role, _)) = slot_of(projection) else { continue };
            let (other, of) = first.entry(role).or_insert_with(|| (scheme, name.clone()));
            if *other != scheme {
                let described =
                    |s: &Scheme| format!("{} in groups of {}", s.label(), s.group_size());
                let (a, b) = (described(scheme), described(other));
                return Some(format!("`{name}` is {a}, but `{of}` is {b}: one kernel reads both"));
            }
        }
    }
    None
}

/// Builds w13 and w2 of a layer whose experts are stored one by one; without a gate, w13 is up alone.
pub(super) fn stack_experts(
    layer: &str,
    experts: &BTreeMap<usize, BTreeMap<&str, Scheme>>,
    gated: bool,
) -> Result<Vec<Stack>, ModelError> {
    let fail = |reason: String| Err(ModelError::module(layer, reason));
    let count = experts.len();
    if let Some((i, (e, _))) = experts.iter().enumerate().find(|(i, (e, _))| i != *e) {
        return fail(format!("expert {i} is missing, the next one is {e}"));
    }
    if count > MAX_EXPERTS {
        return fail(format!("{count} experts, expected at most {MAX_EXPERTS}"));
    }
    let mut stacks = Vec::new();
    for (role, slots) in [(Role::W13, 2), (Role::W2, 1)] {
        let mut rows = Vec::with_capacity(count);
        let mut first: Option<&Scheme> = None;
        for (e, projections) in experts {
            let mut row: Vec<Option<Matrix>> = vec![None; slots];
            for (&projection, scheme) in projections {
                let name = format!("{layer}.{e}.{projection}");
                let Some((r, slot)) = slot_of(projection) else {
                    return fail(format!(
                        "`{name}`: expected gate_proj, up_proj, down_proj or w1, w3, w2"
                    ));
                };
                if r != role {
                    continue;
                }
                first.get_or_insert(scheme);
                if row[slot].is_some() {
                    return fail(format!(
                        "expert {e} has two tensors for one projection: `{name}`"
                    ));
                }
                row[slot] = Some(Matrix { prefix: format!("{name}."), index: None, columns: None });
            }
            if role == Role::W13
                && !gated
                && let Some(gate) = row.remove(0)
            {
                let found = gate.prefix.trim_end_matches('.');
                return fail(format!("found `{found}`: experts of this family have no gate"));
            }
            let Some(row) = row.into_iter().collect::<Option<Vec<_>>>() else {
                let what = match (role, gated) {
                    (Role::W13, true) => "gate and up projections",
                    (Role::W13, false) => "an up projection",
                    _ => "a down projection",
                };
                return fail(format!("expert {e} lacks quantized {what}"));
            };
            rows.push(row);
        }
        let Some(scheme) = first else { continue };
        stacks.push(Stack {
            module: layer.to_owned(),
            role,
            scheme: scheme.clone(),
            experts: rows,
        });
    }
    Ok(stacks)
}
