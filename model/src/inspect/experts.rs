//! Which of all MoE kernels upstream chooses for the experts of a model.

use marlinspike::config::Scheme;
use marlinspike::select::{
    Capability, MoeDeployment, MoeDesc, MoeQuestion, MoeSelection, select_moe_backend,
};
use serde_json::{Value, json};

/// The answer about the experts of one scheme.
pub(super) struct Kernels {
    format: String,
    method: &'static str,
    selection: MoeSelection,
}

/// Asks about each scheme among `experts` once: on one rank, without switches, every package
/// installed. Schemes whose method has no such choice are left out.
pub(super) fn kernels<'a>(
    experts: impl Iterator<Item = (&'a Scheme, MoeDesc)>,
    device: &Capability,
) -> Vec<Kernels> {
    let mut found: Vec<Kernels> = Vec::new();
    for (scheme, desc) in experts {
        let Some(question) = MoeQuestion::of(scheme) else { continue };
        let MoeQuestion { method, weights, activations, allow_vllm_cutlass } = question;
        let (format, method_name) = (scheme.label(), method.name());
        let deployment = MoeDeployment { allow_vllm_cutlass, ..MoeDeployment::new(desc) };
        let selection = select_moe_backend(method, weights, activations, &deployment, device);
        let known =
            |k: &Kernels| (&k.format, k.method, &k.selection) == (&format, method_name, &selection);
        if !found.iter().any(known) {
            found.push(Kernels { format, method: method_name, selection });
        }
    }
    found
}

impl Kernels {
    /// One line for people.
    pub(super) fn line(&self, device: &Capability) -> String {
        let answer = match &self.selection.chosen {
            Ok(Some(choice)) => format!("{} ({})", choice.backend.name(), choice.experts),
            Ok(None) => "none of its kernels".to_owned(),
            Err(error) => error.to_string(),
        };
        format!("experts in {}: upstream's kernel on {device}: {answer}", self.format)
    }

    /// The choice and every refusal.
    pub(super) fn as_json(&self) -> Value {
        let chosen = self.selection.chosen.as_ref();
        let choice = chosen.ok().and_then(Option::as_ref);
        let refusals: Vec<_> = self
            .selection
            .refusals
            .iter()
            .map(|r| {
                json!({
                    "backend": r.class.backend.name(),
                    "experts": r.class.experts,
                    "reasons": r.reasons.iter().map(ToString::to_string).collect::<Vec<_>>(),
                })
            })
            .collect();
        json!({
            "format": self.format,
            "method": self.method,
            "backend": choice.map(|c| c.backend.name()),
            "experts": choice.map(|c| c.experts),
            "error": chosen.err().map(ToString::to_string),
            "refusals": refusals,
        })
    }
}
