//! Merges linear layers that upstream's models merge when they load: `q_proj`, `k_proj` and `v_proj`
//! to `qkv_proj`, `gate_proj` and `up_proj` to `gate_up_proj`.

use std::collections::BTreeMap;

use super::ModelError;
use super::layers::{Layers, Role, Stack};

/// The merged layers: name, and the parts in the order of their columns.
pub const MERGED: [(&str, &[&str]); 2] =
    [("qkv_proj", &["q_proj", "k_proj", "v_proj"]), ("gate_up_proj", &["gate_proj", "up_proj"])];

impl Layers {
    /// Replaces the quantized parts of each merged layer by one stack, whose matrices are the parts.
    /// A layer without any quantized part stays as it is.
    ///
    /// # Errors
    /// [`ModelError::Module`] if only some parts are quantized, or if they are stored in different
    /// ways: upstream has one method for the merged layer.
    pub fn merge_projections(&mut self) -> Result<(), ModelError> {
        let mut parents: BTreeMap<(String, usize), Vec<Option<Stack>>> = BTreeMap::new();
        let mut others = Vec::with_capacity(self.stacks.len());
        for stack in std::mem::take(&mut self.stacks) {
            let place = (stack.role == Role::Dense).then(|| place(&stack.module)).flatten();
            let Some((parent, merged, part)) = place else {
                others.push(stack);
                continue;
            };
            let none = || vec![None; MERGED[merged].1.len()];
            let slots = parents.entry((parent, merged)).or_insert_with(none);
            slots[part] = Some(stack);
        }
        self.stacks = others;
        for ((parent, merged), slots) in parents {
            let parts: Vec<String> = slots.iter().flatten().map(|s| s.module.clone()).collect();
            let stack = one(&parent, MERGED[merged], slots)?;
            // A merged layer is refused with any of its parts.
            let reasons: Vec<_> =
                parts.iter().filter_map(|part| self.refused.remove(part)).flatten().collect();
            if !reasons.is_empty() {
                self.refused.insert(stack.module.clone(), reasons);
            }
            self.stacks.push(stack);
        }
        self.stacks.sort_by(|a, b| (&a.module, a.role).cmp(&(&b.module, b.role)));
        Ok(())
    }
}

/// The parent of a part with its final dot, the index of the merged layer, and the part's position.
fn place(module: &str) -> Option<(String, usize, usize)> {
    let start = module.rfind('.').map_or(0, |dot| dot + 1);
    let (parent, name) = module.split_at(start);
    let found = MERGED
        .iter()
        .enumerate()
        .find_map(|(i, (_, parts))| Some((i, parts.iter().position(|part| *part == name)?)));
    found.map(|(merged, part)| (parent.to_owned(), merged, part))
}

/// The merged stack.
fn one(
    parent: &str,
    (name, parts): (&str, &[&str]),
    slots: Vec<Option<Stack>>,
) -> Result<Stack, ModelError> {
    let module = format!("{parent}{name}");
    let mut merged: Option<Stack> = None;
    for (part, slot) in parts.iter().zip(slots) {
        let Some(stack) = slot else {
            let reason = format!("`{parent}{part}` is not quantized, but other parts are");
            return Err(ModelError::module(&module, format!("{reason}: they cannot be merged")));
        };
        match &mut merged {
            None => merged = Some(Stack { module: module.clone(), ..stack }),
            Some(first) if first.scheme == stack.scheme => {
                first.experts[0].extend(stack.experts.into_iter().flatten());
            }
            Some(first) => {
                let (found, expected) = (stack.scheme.label(), first.scheme.label());
                let reason = format!(
                    "`{}`: found {found}, expected {expected} as `{parent}{}`",
                    stack.module, parts[0]
                );
                return Err(ModelError::module(&module, reason));
            }
        }
    }
    merged.ok_or_else(|| ModelError::module(&module, "no parts"))
}
