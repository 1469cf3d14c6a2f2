//! The columns of the table of kernel classes: devices, quantization, deployments.

use super::super::{ActivationFormat, All2All, MoeActivation as Act, WeightKey as W};
use super::keys::{ActivationKey as A, MoeDeployment, RoutingMethod as R};

/// A set of compute capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    /// This one and newer.
    From(u32, u32),
    /// Only this one.
    Exactly(u32, u32),
    /// Every minor version of a major one.
    Family(u32),
    /// The first and newer, the second and newer excluded.
    Between((u32, u32), (u32, u32)),
}

impl Compute {
    /// Whether `compute` is in the set.
    pub fn contains(self, compute: (u32, u32)) -> bool {
        match self {
            Self::From(major, minor) => compute >= (major, minor),
            Self::Exactly(major, minor) => compute == (major, minor),
            Self::Family(major) => compute.0 == major,
            Self::Between(low, high) => (low..high).contains(&compute),
        }
    }
}

/// What a kernel needs besides the device.
#[derive(Debug, Clone, Copy)]
pub struct Needs {
    /// What a refusal adds to the devices: ` with` and the package; empty where nothing is needed.
    pub text: &'static str,
    /// Whether a deployment has it.
    pub met: fn(&MoeDeployment) -> bool,
}

/// Devices of a class. Other platforms are refused.
#[derive(Debug, Clone, Copy)]
pub struct Devices {
    /// Sets of CUDA capabilities; one must hold.
    pub cuda: &'static [Compute],
    /// Whether XPUs run it.
    pub xpu: bool,
    /// Whether CPUs run it.
    pub cpu: bool,
    /// Required packages.
    pub needs: Needs,
}

/// Pairs of weight and activation quantization that a class reads.
#[derive(Debug, Clone, Copy)]
pub struct Pairs {
    /// Weights, and the activations that go with them; `None` is any.
    pub keys: &'static [(W, Option<A>)],
    /// CUDA capabilities with these pairs; `None` is every one, and other platforms are not
    /// limited.
    pub cuda: Option<Compute>,
}

/// Deployments that a class does not serve.
#[derive(Debug, Clone, Copy, Default)]
pub struct Excludes {
    /// All-to-all backends, if tokens are exchanged between ranks.
    pub all2all: &'static [All2All],
    /// Expert parallelism.
    pub ep: bool,
    /// Load balancing of experts.
    pub eplb: bool,
}

/// A class of kernels.
#[derive(Debug)]
pub struct Experts {
    /// Upstream's name.
    pub name: &'static str,
    /// Supported devices.
    pub devices: Devices,
    /// Whether it has a form without a gate.
    pub ungated: bool,
    /// Activation functions.
    pub activations: &'static [Act],
    /// Quantization.
    pub schemes: &'static [Pairs],
    /// Deployments that it does not serve.
    pub excludes: Excludes,
    /// Supported routing methods by weights, if the kernel includes the router.
    pub routing: Option<&'static [(&'static [W], &'static [R])]>,
    /// Order of the tokens.
    pub format: ActivationFormat,
    /// Whether results are independent of the batch.
    pub batch_invariant: bool,
    /// Whether it takes adapters.
    pub lora: bool,
    /// The class used for small shapes. It must support everything except routing.
    pub fallback: Option<&'static Experts>,
}
