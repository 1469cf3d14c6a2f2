//! The MoE kernel that upstream selects for the experts of a model.

use marlinspike::config::Scheme;
use marlinspike::select::{
    Capability, MoeDeployment, MoeDesc, MoeQuestion, MoeSelection, select_moe_backend,
};

/// Upstream's selection for the experts of one scheme.
#[derive(Debug, Clone)]
pub struct Kernels {
    /// The scheme.
    pub format: String,
    /// Upstream's method.
    pub method: &'static str,
    /// The selected kernel and every refusal.
    pub selection: MoeSelection,
}

/// Selects a kernel once for each scheme among `experts`, on one rank, with default settings and
/// every package installed. Schemes whose method offers no choice are left out.
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
