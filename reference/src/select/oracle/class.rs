//! The columns of the tables: classes by devices, quantization and deployments; backends of a
//! method; defaults of the newer release.

use super::super::{ActivationFormat, All2All, Capability, MoeActivation as Act, WeightKey as W};
use super::keys::{ActivationKey as A, MoeDeployment, RoutingMethod as R, Runner, Switches};
use crate::config::Scheme;

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
    /// The package, for refusals; empty where nothing is needed.
    pub package: &'static str,
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

/// A MoE backend, by upstream's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum MoeBackend {
    FlashInferTrtllm,
    FlashInferCutlass,
    FlashInferCuteDsl,
    FlashInferCuteDslBatched,
    DeepGemm,
    BatchedDeepGemm,
    Marlin,
    BatchedMarlin,
    Triton,
    BatchedTriton,
    Aiter,
    VllmCutlass,
    BatchedVllmCutlass,
    Xpu,
    Cpu,
    Emulation,
}

impl MoeBackend {
    /// Upstream's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FlashInferTrtllm => "FLASHINFER_TRTLLM",
            Self::FlashInferCutlass => "FLASHINFER_CUTLASS",
            Self::FlashInferCuteDsl => "FLASHINFER_CUTEDSL",
            Self::FlashInferCuteDslBatched => "FLASHINFER_CUTEDSL_BATCHED",
            Self::DeepGemm => "DEEPGEMM",
            Self::BatchedDeepGemm => "BATCHED_DEEPGEMM",
            Self::Marlin => "MARLIN",
            Self::BatchedMarlin => "BATCHED_MARLIN",
            Self::Triton => "TRITON",
            Self::BatchedTriton => "BATCHED_TRITON",
            Self::Aiter => "AITER",
            Self::VllmCutlass => "VLLM_CUTLASS",
            Self::BatchedVllmCutlass => "BATCHED_VLLM_CUTLASS",
            Self::Xpu => "XPU",
            Self::Cpu => "CPU",
            Self::Emulation => "EMULATION",
        }
    }
}

/// A backend and its classes, the preferred first.
#[derive(Debug)]
pub struct Row {
    /// Backend.
    pub backend: MoeBackend,
    /// Classes.
    pub experts: &'static [&'static Experts],
}

/// An environment switch of a library's backends.
#[derive(Debug)]
pub struct LibrarySwitch {
    /// The library.
    pub library: &'static str,
    /// Its value: `true` requests the backends, `false` rules them out.
    pub value: fn(&Switches) -> Option<bool>,
    /// The backend that another switch requests, and that switch's value.
    pub requested: fn(&Switches, &Capability) -> Option<(MoeBackend, &'static str)>,
    /// The backends, in the order in which they are tried on request.
    pub backends: &'static [MoeBackend],
}

/// A method's table.
#[derive(Debug)]
pub struct Table {
    /// Backends, the preferred first.
    pub rows: &'static [Row],
    /// Names by which a user requests a backend.
    pub runners: &'static [(Runner, MoeBackend)],
    /// Backends with a counterpart for tokens sorted by expert, which replaces a requested backend.
    pub batched: &'static [(MoeBackend, MoeBackend)],
    /// The switch that requests a library's backends or rules them out.
    pub switch: Option<LibrarySwitch>,
    /// Whether `VLLM_TEST_FORCE_FP8_MARLIN` asks for Marlin.
    pub forces_marlin: bool,
}

impl Table {
    /// The classes of a backend.
    pub fn experts(&self, backend: MoeBackend) -> &'static [&'static Experts] {
        self.rows.iter().find(|row| row.backend == backend).map_or(&[], |row| row.experts)
    }
}

/// A default of vLLM 0.33.0: the kernel of experts with these keys on these devices. The first row
/// that fits is the answer.
#[derive(Debug, Clone, Copy)]
pub struct Newer {
    /// Weights and activations.
    pub keys: &'static [(W, A)],
    /// Compute capabilities.
    pub cuda: Compute,
    /// Only with expert parallelism.
    pub ep: bool,
    /// FP8: only where the method takes vLLM's CUTLASS kernels.
    pub cutlass: bool,
    /// Only for some of the schemes with these keys.
    pub only: Option<fn(&Scheme) -> bool>,
    /// Upstream's name of the backend.
    pub backend: &'static str,
    /// Upstream's name of the class; `Humming` is the grouped class with expert parallelism and the
    /// indexed one without.
    pub class: &'static str,
}

/// A backend with its classes.
pub(super) const fn row(backend: MoeBackend, experts: &'static [&'static Experts]) -> Row {
    Row { backend, experts }
}

/// A default without further conditions.
pub(super) const fn newer(
    keys: &'static [(W, A)],
    cuda: Compute,
    backend: &'static str,
    class: &'static str,
) -> Newer {
    Newer { keys, cuda, ep: false, cutlass: false, only: None, backend, class }
}

/// Humming, which precedes Marlin on 9.0.
pub(super) const fn humming(keys: &'static [(W, A)], cuda: Compute) -> Newer {
    newer(keys, cuda, "HUMMING", "Humming")
}

/// A default that is a row of a method's table.
pub(super) const fn of(
    keys: &'static [(W, A)],
    cuda: Compute,
    backend: MoeBackend,
    class: &Experts,
) -> Newer {
    newer(keys, cuda, backend.name(), class.name)
}
