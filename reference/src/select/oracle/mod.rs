//! The kernel that runs the experts of a layer, for every method that has an oracle upstream.
//!
//! [`experts`] and [`blocks`] have the table of kernel classes ([`class`] defines its columns),
//! [`methods`] and [`blocks`] the backends of each quantization method and their order;
//! [`select_moe_backend`] reads them. The steps, their order and their results are those of vLLM 0.21.0 `fused_moe/oracle/*.py` on CUDA
//! devices, XPUs and CPUs.

pub mod blocks;
pub mod class;
pub mod experts;
mod keys;
pub mod methods;
mod objections;
mod question;

use super::{ActivationFormat, Capability, Platform, Reason, WeightKey};
pub use class::MoeBackend;
use class::{LibrarySwitch, Table};
pub use keys::{
    ActivationKey, FlashInferBackend, MoeDeployment, Packages, RoutingMethod, Runner, Switches,
};
pub use methods::MoeMethod;
pub use question::MoeQuestion;

/// A class that was chosen, with its backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeChoice {
    /// Backend.
    pub backend: MoeBackend,
    /// Upstream's name of the class.
    pub experts: &'static str,
}

/// The reasons of one class against a deployment.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeRefusal {
    /// The class.
    pub class: MoeChoice,
    /// Every reason, in upstream's order.
    pub reasons: Vec<Reason>,
}

/// The result of a selection.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeSelection {
    /// The class that runs the layer; `None` if the oracle leaves the layer to platform code (FP8
    /// on platforms other than CUDA and ROCm).
    pub chosen: Result<Option<MoeChoice>, OracleError>,
    /// The reasons of every class of the method, in the order of its table; classes without reasons
    /// are absent.
    pub refusals: Vec<MoeRefusal>,
}

/// The reason why an oracle selects nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OracleError {
    /// The tables do not cover the platform.
    #[error("MoE kernels on {platform} are not tabled, expected CUDA, XPU or CPU")]
    Platform {
        /// Platform found.
        platform: Platform,
    },
    /// The method has no such backend.
    #[error("moe_backend {runner:?} is not supported for {method} MoE, expected {expected}")]
    Runner {
        /// The method.
        method: &'static str,
        /// The requested backend.
        runner: &'static str,
        /// What exists.
        expected: String,
    },
    /// vLLM's CUTLASS kernels were requested for a method that does not support them.
    #[error("vLLM CUTLASS FP8 MoE is disabled for this quantization method")]
    CutlassDisabled,
    /// A library's backend without kernels for the method.
    #[error("{library} backend {backend:?} does not support {method} MoE")]
    LibraryBackend {
        /// The library.
        library: &'static str,
        /// The method.
        method: &'static str,
        /// Value of the switch.
        backend: &'static str,
    },
    /// The requested backend refuses the deployment.
    #[error("{} does not support the deployment: {reason}", .backend.name())]
    Refused {
        /// Backend.
        backend: MoeBackend,
        /// First reason of its last class.
        reason: Reason,
    },
    /// A library was requested, but none of its kernels runs the layer.
    #[error(
        "{library} was asked for, but none of its {method} MoE backends supports the deployment"
    )]
    NoLibraryBackend {
        /// The library.
        library: &'static str,
        /// The method.
        method: &'static str,
    },
    /// No backend runs the layer.
    #[error("no {method} MoE backend supports the deployment")]
    NoBackend {
        /// The method.
        method: &'static str,
    },
}

/// The inputs of one selection.
struct Ask<'a> {
    method: MoeMethod,
    table: &'static Table,
    keys: (WeightKey, ActivationKey),
    deployment: &'a MoeDeployment,
    device: &'a Capability,
    /// The reasons of each class that refuses.
    refusals: &'a [MoeRefusal],
}

/// A chosen class, or why there is none.
type Chosen = Result<MoeChoice, OracleError>;

/// Selects the kernel for `weights` with `activations` as upstream's oracle of `method` does, and
/// lists the reasons of every class against it.
///
/// [`MoeQuestion::of`] derives the arguments from a scheme. As in upstream, `IntWna16` accepts
/// 8-bit weights although the class that it returns cannot be constructed for them (see
/// [`super::select_wna16_moe_backend`]).
pub fn select_moe_backend(
    method: MoeMethod,
    weights: WeightKey,
    activations: ActivationKey,
    deployment: &MoeDeployment,
    device: &Capability,
) -> MoeSelection {
    if device.platform == Platform::Rocm {
        let chosen = Err(OracleError::Platform { platform: device.platform });
        return MoeSelection { chosen, refusals: Vec::new() };
    }
    let table = method.table();
    let mut refusals = Vec::new();
    for row in table.rows {
        for experts in row.experts {
            let reasons = experts.objections(weights, activations, deployment, device);
            if !reasons.is_empty() {
                let class = MoeChoice { backend: row.backend, experts: experts.name };
                refusals.push(MoeRefusal { class, reasons });
            }
        }
    }
    let keys = (weights, activations);
    let chosen = Ask { method, table, keys, deployment, device, refusals: &refusals }.choose();
    MoeSelection { chosen, refusals }
}

impl Ask<'_> {
    fn choose(&self) -> Result<Option<MoeChoice>, OracleError> {
        if let Some(chosen) = self.wished() {
            return chosen.map(Some);
        }
        let mut backends = self.priority();
        if let Some(chosen) = self.library(&mut backends) {
            return chosen.map(Some);
        }
        if self.method == MoeMethod::Fp8
            && let Some(chosen) = self.deep_gemm(&mut backends)
        {
            return chosen.map(Some);
        }
        if self.table.forces_marlin && self.deployment.desc.options.force_fp8_marlin {
            return self.this(MoeBackend::Marlin).map(Some);
        }
        if !self.deployment.allow_vllm_cutlass && self.method == MoeMethod::Fp8 {
            remove(&mut backends, &[MoeBackend::VllmCutlass, MoeBackend::BatchedVllmCutlass]);
        }
        match backends.into_iter().find_map(|b| self.class_of(b).ok()) {
            Some(choice) => Ok(Some(choice)),
            None if self.method == MoeMethod::Fp8 && self.device.platform != Platform::Cuda => {
                Ok(None)
            }
            None => Err(OracleError::NoBackend { method: self.method.name() }),
        }
    }

    /// The first class of a backend without reasons, or the first reason of its last class.
    fn class_of(&self, backend: MoeBackend) -> Result<MoeChoice, Option<Reason>> {
        let mut last = None;
        for experts in self.table.experts(backend) {
            let class = MoeChoice { backend, experts: experts.name };
            match self.refusals.iter().find(|refusal| refusal.class == class) {
                None => return Ok(class),
                Some(refusal) => last = refusal.reasons.first().cloned(),
            }
        }
        Err(last)
    }

    /// A backend that was requested by name, without alternatives.
    fn this(&self, backend: MoeBackend) -> Chosen {
        self.class_of(backend).map_err(|reason| match reason {
            Some(reason) => OracleError::Refused { backend, reason },
            None => OracleError::NoBackend { method: self.method.name() },
        })
    }

    fn format(&self) -> ActivationFormat {
        self.deployment.desc.parallel.activation_format()
    }

    /// The requested backend, if the method reads it.
    fn wished(&self) -> Option<Chosen> {
        let runner = self.deployment.runner;
        if runner == Runner::Auto || self.table.runners.is_empty() {
            return None;
        }
        let Some(&(_, backend)) = self.table.runners.iter().find(|(r, _)| *r == runner) else {
            let names: Vec<_> = self.table.runners.iter().map(|(r, _)| r.name()).collect();
            let (method, expected) = (self.method.name(), names.join(", "));
            return Some(Err(OracleError::Runner { method, runner: runner.name(), expected }));
        };
        let counterpart = self.table.batched.iter().find(|(plain, _)| *plain == backend);
        let backend = match counterpart {
            Some(&(_, batched)) if self.format() == ActivationFormat::BatchedExperts => batched,
            _ => backend,
        };
        let cutlass = [MoeBackend::VllmCutlass, MoeBackend::BatchedVllmCutlass].contains(&backend);
        if self.method == MoeMethod::Fp8 && cutlass && !self.deployment.allow_vllm_cutlass {
            return Some(Err(OracleError::CutlassDisabled));
        }
        Some(self.this(backend))
    }

    /// The method's backends, preferred first, in the order of the table. For FP8, one backend
    /// moves to the front on XPUs, on CPUs, and with 128 × 128 blocks on 9.0.
    fn priority(&self) -> Vec<MoeBackend> {
        let mut backends: Vec<_> = self.table.rows.iter().map(|row| row.backend).collect();
        if self.method != MoeMethod::Fp8 {
            return backends;
        }
        let block = self.keys == (WeightKey::Fp8Block128, ActivationKey::Fp8Dynamic128);
        let hopper = *self.device == Capability::cuda(9, 0);
        let front = match self.device.platform {
            Platform::Cuda if hopper && block && self.deployment.ep_size > 1 => {
                MoeBackend::FlashInferCutlass
            }
            Platform::Cuda if hopper && block => MoeBackend::Triton,
            Platform::Xpu => MoeBackend::Xpu,
            Platform::CpuX86 | Platform::CpuArm => MoeBackend::Cpu,
            _ => return backends,
        };
        remove(&mut backends, &[front]);
        backends.insert(0, front);
        backends
    }

    /// Applies the switches that request or exclude a library.
    fn library(&self, backends: &mut Vec<MoeBackend>) -> Option<Chosen> {
        let switches = &self.deployment.switches;
        let LibrarySwitch { library, value, requested, backends: own } =
            *self.table.switch.as_ref()?;
        if !value(switches)? {
            remove(backends, own);
            return None;
        }
        let method = self.method.name();
        let Some((backend, value)) = requested(switches, self.device) else {
            let found = own.iter().find_map(|&b| self.class_of(b).ok());
            return Some(found.ok_or(OracleError::NoLibraryBackend { library, method }));
        };
        if !own.contains(&backend) {
            return Some(Err(OracleError::LibraryBackend { library, method, backend: value }));
        }
        Some(self.this(backend))
    }

    /// Applies the switches that request or exclude DeepGEMM. A switch that is off excludes it; one
    /// that is on requests it, since the other is on by default.
    fn deep_gemm(&self, backends: &mut Vec<MoeBackend>) -> Option<Chosen> {
        let Switches { use_deep_gemm, moe_use_deep_gemm, .. } = self.deployment.switches;
        let set = use_deep_gemm.or(moe_use_deep_gemm).is_some();
        let off = [use_deep_gemm, moe_use_deep_gemm].contains(&Some(false));
        if off {
            remove(backends, &[MoeBackend::DeepGemm, MoeBackend::BatchedDeepGemm]);
        }
        let backend = match self.format() {
            ActivationFormat::Standard => MoeBackend::DeepGemm,
            ActivationFormat::BatchedExperts => MoeBackend::BatchedDeepGemm,
        };
        (set && !off).then(|| self.this(backend))
    }
}

fn remove(backends: &mut Vec<MoeBackend>, unwanted: &[MoeBackend]) {
    backends.retain(|b| !unwanted.contains(b));
}
