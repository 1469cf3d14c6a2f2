//! The reasons of a class against a deployment, in upstream's order (`is_supported_config` of vLLM
//! 0.21.0 `fused_moe/modular_kernel.py`): device, gate, activation, quantization, parallel
//! configuration, routing, order of tokens, batch invariance, adapters.

use super::super::{Capability, Platform, Reason, WeightKey};
use super::class::{Compute, Devices, Experts};
use super::keys::{ActivationKey, MoeDeployment};

impl Experts {
    /// Every reason against, in upstream's order; upstream stops at the first.
    pub fn objections(
        &self,
        weights: WeightKey,
        activations: ActivationKey,
        deployment: &MoeDeployment,
        device: &Capability,
    ) -> Vec<Reason> {
        let MoeDeployment { desc, routing, .. } = deployment;
        // A class with a fallback supports only what both support.
        let all = |test: &dyn Fn(&Self) -> bool| test(self) && self.fallback.is_none_or(test);
        let mut reasons = Vec::new();
        if !all(&|e| e.devices.run(deployment, device)) {
            let expected = self.devices.expected();
            reasons.push(Reason::Device { device: device.to_string(), expected });
        }
        if !desc.activation.is_gated() && !all(&|e| e.ungated) {
            reasons.push(Reason::Ungated);
        }
        if !all(&|e| e.activations.contains(&desc.activation)) {
            reasons.push(Reason::Activation { activation: desc.activation.name() });
        }
        if !all(&|e| e.reads(weights, activations, device)) {
            let weights = weights.name();
            reasons.push(Reason::QuantScheme { weights, activations: activations.name() });
        }
        if !all(&|e| e.serves(deployment)) {
            reasons.push(Reason::ParallelConfig {
                all2all: desc.parallel.all2all.name(),
                ep_size: deployment.ep_size,
                eplb: deployment.enable_eplb,
            });
        }
        let routes = self.routing.is_none_or(|rows| {
            rows.iter().all(|(keys, methods)| !keys.contains(&weights) || methods.contains(routing))
        });
        if !routes {
            reasons.push(Reason::Routing { routing: routing.name() });
        }
        let format = desc.parallel.activation_format();
        if format != self.format {
            reasons.push(Reason::ActivationFormat { format: format.name() });
        }
        if desc.options.batch_invariant && !self.batch_invariant {
            reasons.push(Reason::BatchInvariance);
        }
        if desc.lora && !self.lora {
            reasons.push(Reason::Lora);
        }
        reasons
    }

    fn reads(&self, weights: WeightKey, activations: ActivationKey, device: &Capability) -> bool {
        self.schemes.iter().any(|pairs| {
            let here = match (device.platform, pairs.cuda, device.compute) {
                (Platform::Cuda, Some(set), Some(compute)) => set.contains(compute),
                (Platform::Cuda, Some(_), None) => false,
                _ => true,
            };
            let reads = |&(w, a): &(WeightKey, Option<ActivationKey>)| {
                w == weights && a.is_none_or(|a| a == activations)
            };
            here && pairs.keys.iter().any(reads)
        })
    }

    fn serves(&self, deployment: &MoeDeployment) -> bool {
        let parallel = &deployment.desc.parallel;
        let travel = parallel.use_all2all() && self.excludes.all2all.contains(&parallel.all2all);
        let ep = self.excludes.ep && deployment.ep_size > 1;
        !(travel || ep || self.excludes.eplb && deployment.enable_eplb)
    }
}

impl Devices {
    fn run(&self, deployment: &MoeDeployment, device: &Capability) -> bool {
        let here = match device.platform {
            Platform::Cuda => {
                let compute = device.compute.unwrap_or_default();
                self.cuda.iter().any(|set| set.contains(compute))
            }
            Platform::Xpu => self.xpu,
            Platform::CpuX86 | Platform::CpuArm => self.cpu,
            Platform::Rocm | Platform::Other => false,
        };
        here && (self.needs.met)(deployment)
    }

    /// The supported devices, for a message.
    fn expected(&self) -> String {
        let mut parts: Vec<String> = self.cuda.iter().map(Compute::to_string).collect();
        parts.extend(self.xpu.then(|| "XPU".to_owned()));
        parts.extend(self.cpu.then(|| "CPU".to_owned()));
        if parts.is_empty() {
            parts.push("ROCm".to_owned());
        }
        match self.needs.package {
            "" => parts.join(" or "),
            package => format!("{} with {package}", parts.join(" or ")),
        }
    }
}

impl std::fmt::Display for Compute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::From(0, 0) => f.write_str("CUDA"),
            Self::From(major, minor) => write!(f, "CUDA {major}.{minor} or newer"),
            Self::Exactly(major, minor) => write!(f, "CUDA {major}.{minor}"),
            Self::Family(major) => write!(f, "CUDA {major}.x"),
            Self::Between((a, b), (c, d)) => write!(f, "CUDA {a}.{b} to below {c}.{d}"),
        }
    }
}
