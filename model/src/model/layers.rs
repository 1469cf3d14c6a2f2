//! Groups tensors into modules and modules into layers: a dense matrix, or the w13 and w2 stacks of
//! a MoE layer's experts.

use std::collections::{BTreeMap, BTreeSet};

use marlinspike::config::Scheme;
use marlinspike::moe::families;
use marlinspike::num::tensor::DType;

use super::fused;
use super::matrix::expert_of;
pub use super::matrix::{Matrix, Role};
use super::refused::scheme_of;
use super::stack::MAX_EXPERTS;
pub use super::stack::{Layers, Stack, Unquantized};
use super::stacking::{other_scheme, stack_experts, without_zero_experts};
use super::unread;
use super::{Model, ModelError};

/// The last name components of the tensors of a quantized matrix.
const PARTS: &[&str] = &[
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "bias",
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "scale",
];

/// Stored stacks of gpt-oss.
const FUSED: [(&str, Role); 2] = [("gate_up_proj_", Role::W13), ("down_proj_", Role::W2)];

/// The parts of each module.
type Modules<'m> = BTreeMap<&'m str, BTreeSet<&'m str>>;

/// The schemes of experts' projections, by layer, expert and projection.
type Experts<'m> = BTreeMap<&'m str, BTreeMap<usize, BTreeMap<&'m str, Scheme>>>;

/// Whether the tensors are those of a quantized matrix.
fn is_quantized(model: &Model<'_>, module: &str, parts: &BTreeSet<&str>) -> bool {
    if parts.contains("qweight") || parts.contains("weight_packed") {
        return true;
    }
    let weight = model.entry(&format!("{module}.weight"));
    weight.is_some_and(|w| {
        let coded = matches!(w.dtype(), DType::F8E4M3 | DType::I8 | DType::U8);
        coded && w.shape().len() == 2
    })
}

impl Layers {
    /// Groups the tensors of `model`.
    ///
    /// # Errors
    /// [`ModelError::Module`] for inconsistent tensors, [`ModelError::Format`] for a config that
    /// does not describe a module.
    pub fn group(model: &Model<'_>) -> Result<Self, ModelError> {
        let mut modules = Modules::new();
        for entry in model.entries() {
            let (module, part) = entry.name().rsplit_once('.').unwrap_or(("", entry.name()));
            modules.entry(module).or_default().insert(part);
        }
        let mut layers = Self::default();
        let mut experts = Experts::new();
        for (&module, parts) in &modules {
            if parts.contains("gate_up_proj_blocks") || parts.contains("down_proj_blocks") {
                layers.stored_stack(model, module, parts)?;
                continue;
            }
            if fused::is_fp8(model, module) {
                layers.fp8_stacks(model, module)?;
                continue;
            }
            let quantized = is_quantized(model, module, parts);
            let scheme = match scheme_of(model, module, parts, quantized)? {
                Ok(scheme) => scheme,
                Err(reason) => {
                    layers.refuse(module, reason);
                    continue;
                }
            };
            match scheme {
                Scheme::Unquantized { reason } if quantized => {
                    let found = "its tensors are quantized, but the config says that it is not";
                    layers.refuse(module, format!("{found}: {reason}"));
                }
                Scheme::Unquantized { reason } => {
                    layers.unquantized.push(Unquantized { module: module.to_owned(), reason });
                }
                scheme => {
                    layers.own(module, parts);
                    match expert_of(module) {
                        Some((layer, e, projection)) => {
                            let layer = experts.entry(layer).or_default();
                            layer.entry(e).or_default().insert(projection, scheme);
                        }
                        None => layers.stacks.push(Stack {
                            module: module.to_owned(),
                            role: Role::Dense,
                            scheme,
                            experts: vec![vec![Matrix {
                                prefix: format!("{module}."),
                                index: None,
                                columns: None,
                            }]],
                        }),
                    }
                }
            }
        }
        layers.stack_all(model, experts)?;
        layers.stacks.sort_by(|a, b| (&a.module, a.role).cmp(&(&b.module, b.role)));
        for stack in &layers.stacks {
            let reasons = unread::reasons(model, stack)?;
            if !reasons.is_empty() {
                layers.refused.entry(stack.module.clone()).or_default().extend(reasons);
            }
        }
        layers.fused = fused::find(model, &layers.owned);
        layers.plain = fused::plain(model, &layers.owned);
        layers.plain.retain(|module| layers.stacks.iter().all(|s| s.module != *module));
        Ok(layers)
    }

    /// Stacks the experts of every layer that are stored one by one.
    fn stack_all(&mut self, model: &Model<'_>, experts: Experts<'_>) -> Result<(), ModelError> {
        for (layer, mut experts) in experts {
            // A layer whose experts are refused in part has no stack.
            if self.refused.contains_key(layer) {
                let below = format!("{layer}.");
                self.owned.retain(|name| !name.starts_with(&below));
                continue;
            }
            without_zero_experts(model, layer, &mut experts);
            // The experts of a family that is not known are taken to have a gate.
            let rule = families::block_rule(&model.config, layer);
            let gated = rule.map_or(true, |(rule, _)| rule.gated);
            if let Some(reason) = other_scheme(layer, &experts) {
                self.refused.insert(layer.to_owned(), vec![reason]);
                let below = format!("{layer}.");
                self.owned.retain(|name| !name.starts_with(&below));
                continue;
            }
            self.stacks.extend(stack_experts(layer, &experts, gated)?);
        }
        Ok(())
    }

    /// The module of 16- or 32-bit experts to run: the wanted one, or the first if no experts are
    /// quantized.
    pub fn plain_block(&self, wanted: Option<&str>) -> Option<&str> {
        let mut plain = self.plain.iter().map(String::as_str);
        match wanted {
            Some(name) => plain.find(|module| *module == name),
            None if self.stacks.iter().any(|s| s.role == Role::W13) => None,
            None => plain.next(),
        }
    }

    fn own(&mut self, module: &str, parts: &BTreeSet<&str>) {
        let known = parts.iter().filter(|p| PARTS.contains(p));
        self.owned.extend(known.map(|p| format!("{module}.{p}")));
    }

    /// gpt-oss: all experts in one tensor.
    fn stored_stack(
        &mut self,
        model: &Model<'_>,
        module: &str,
        parts: &BTreeSet<&str>,
    ) -> Result<(), ModelError> {
        let scheme = match scheme_of(model, module, parts, true)? {
            Ok(scheme) => scheme,
            Err(reason) => return Err(ModelError::module(module, reason)),
        };
        if !matches!(scheme, Scheme::Block { format, .. } if !format.has_global_scale()) {
            let found = format!("`..._blocks` tensors, but the config says {}", scheme.label());
            return Err(ModelError::module(module, found));
        }
        let mut count: Option<usize> = None;
        for (prefix, role) in FUSED {
            let name = format!("{module}.{prefix}blocks");
            let Some(entry) = model.entry(&name) else {
                return Err(ModelError::module(module, format!("tensor `{name}` is missing")));
            };
            let experts = entry.shape().first().copied().unwrap_or(0);
            if experts == 0 || experts > MAX_EXPERTS || count.is_some_and(|c| c != experts) {
                let found = format!("`{name}` holds {experts} experts");
                let expected = count.map_or(format!("1 to {MAX_EXPERTS}"), |c| c.to_string());
                return Err(ModelError::module(module, format!("{found}, expected {expected}")));
            }
            count = Some(experts);
            for part in ["blocks", "scales", "bias"] {
                let name = format!("{module}.{prefix}{part}");
                if model.entry(&name).is_some() {
                    self.owned.insert(name);
                }
            }
            let prefix = format!("{module}.{prefix}");
            let matrix = |e| vec![Matrix { prefix: prefix.clone(), index: Some(e), columns: None }];
            self.stacks.push(Stack {
                module: module.to_owned(),
                role,
                scheme: scheme.clone(),
                experts: (0..experts).map(matrix).collect(),
            });
        }
        Ok(())
    }
}

impl Layers {
    /// FP8 experts in three dimensions, gate above up, as transformers saves them.
    fn fp8_stacks(&mut self, model: &Model<'_>, module: &str) -> Result<(), ModelError> {
        let scheme = fused::fp8_scheme(model, module)?;
        let mut count = None;
        for (name, role) in fused::FP8 {
            let prefix = format!("{module}.{name}");
            let experts = fused::fp8_experts(model, &prefix, (role, &scheme), count)?;
            count = Some(experts);
            for suffix in ["", "_scale_inv", "_activation_scale"] {
                let name = format!("{prefix}{suffix}");
                self.owned.extend(model.entry(&name).is_some().then_some(name));
            }
            let parts: &[[usize; 2]] =
                if role == Role::W13 { &[[0, 2], [1, 2]] } else { &[[0, 1]] };
            let matrix = |e, &columns| Matrix {
                prefix: prefix.clone(),
                index: Some(e),
                columns: Some(columns),
            };
            self.stacks.push(Stack {
                module: module.to_owned(),
                role,
                scheme: scheme.clone(),
                experts: (0..experts)
                    .map(|e| parts.iter().map(|c| matrix(e, c)).collect())
                    .collect(),
            });
        }
        Ok(())
    }
}
