//! Selects the backend for a layer and a device capability, with the reason for each refusal.
//!
//! Capability is plain data, so a selection for any device runs anywhere. [`select_linear`] and
//! [`select_moe`] determine whether Marlin runs a layer, and through which entry point (vLLM 0.21.0
//! `utils/marlin_utils*.py`, `experts/marlin_moe.py`, `kernels/linear/*/marlin.py`).
//! [`select_moe_backend`] determines the kernel that upstream selects for experts
//! (`fused_moe/oracle/*.py`); its tables are in [`oracle`]. [`release`] states what a newer release
//! decides instead.

mod capability;
mod compat;
mod cuda;
mod desc;
mod linear;
mod marlin;
mod moe;
pub mod oracle;
pub mod release;

pub use capability::{Capability, Platform};
pub use compat::{
    Decision, Override, UserQuant, is_gptq_marlin_compatible, is_marlin_compatible,
    override_quantization_method,
};
pub use cuda::{CUDA_CAPABILITY, CUDA_WEIGHTS, CudaGroups, CudaScales, CudaWeight};
pub use desc::{
    ActivationFormat, All2All, InputType, LinearDesc, MoeActivation, MoeDesc, MoeParallel, Options,
    WeightKey,
};
pub use linear::select_linear;
pub use marlin::{
    MARLIN_GROUP_SIZES, MarlinRefusal, check_marlin_supported, check_marlin_supports_shape,
    check_moe_marlin_supports_layer, check_rank_groups, marlin_weight_types,
};
pub use moe::{is_supported_config, select_moe, select_wna16_moe_backend};
pub use oracle::{
    ActivationKey, FlashInferBackend, MoeBackend, MoeChoice, MoeDeployment, MoeMethod, MoeQuestion,
    MoeRefusal, MoeSelection, OracleError, Packages, RoutingMethod, Runner, Switches,
    select_moe_backend,
};
pub use release::{Change, Release};

/// An entry point of the Marlin kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Backend {
    /// A linear layer.
    MarlinLinear,
    /// The quantization method's own call of the fused MoE operator.
    FusedMarlinMoe,
    /// The modular kernel on tokens in their original order (`MARLIN`).
    Marlin,
    /// The modular kernel on tokens sorted by expert (`BATCHED_MARLIN`).
    BatchedMarlin,
}

impl Backend {
    /// Name for reports; for modular kernels, upstream's.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MarlinLinear => "marlin",
            Self::FusedMarlinMoe => "fused_marlin_moe",
            Self::Marlin => "MARLIN",
            Self::BatchedMarlin => "BATCHED_MARLIN",
        }
    }
}

/// Why a backend does not run a layer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// Type, group, shape or platform.
    #[error(transparent)]
    Marlin(#[from] MarlinRefusal),
    /// The module is not quantized.
    #[error("the module is not quantized")]
    Unquantized,
    /// No Marlin kernel reads this scheme.
    #[error("no Marlin kernel reads {scheme}")]
    Scheme {
        /// The scheme's label.
        scheme: String,
    },
    /// The device is not supported.
    #[error("kernel does not support current device {device}, expected {expected}")]
    Device {
        /// The device.
        device: String,
        /// The supported devices and packages.
        expected: String,
    },
    /// The kernel has no form without a gate.
    #[error("kernel does not support layers without a gate")]
    Ungated,
    /// The activation function is not supported.
    #[error("kernel does not support {activation} activation")]
    Activation {
        /// Name of the activation.
        activation: &'static str,
    },
    /// The pair of weight and activation quantization is not supported.
    #[error("kernel does not support quantization scheme {weights}, activations {activations}")]
    QuantScheme {
        /// Weight quantization.
        weights: &'static str,
        /// Activation quantization.
        activations: &'static str,
    },
    /// The distribution of the layer over ranks is not supported.
    #[error(
        "kernel does not support parallel config with {all2all}, ep_size {ep_size}, eplb {eplb}"
    )]
    ParallelConfig {
        /// Name of the all-to-all backend.
        all2all: &'static str,
        /// Expert-parallel ranks.
        ep_size: usize,
        /// Whether experts are moved between ranks.
        eplb: bool,
    },
    /// The kernel includes the router but does not support this routing method.
    #[error("kernel does not support routing method {routing}")]
    Routing {
        /// Name of the routing method.
        routing: &'static str,
    },
    /// The kernel expects tokens in the other format.
    #[error("kernel does not support {format} activation format")]
    ActivationFormat {
        /// The deployment's format.
        format: &'static str,
    },
    /// The kernel's results depend on the batch.
    #[error("kernel does not support batch invariance")]
    BatchInvariance,
    /// The kernel does not support LoRA.
    #[error("kernel does not support LoRA")]
    Lora,
    /// The modular kernel supports only 4-bit integers.
    #[error("the modular Marlin kernel does not support 8-bit weights")]
    EightBitModular,
    /// The device has native FP8.
    #[error("compute capability {compute} has native FP8, which is preferred")]
    NativeFp8 {
        /// The device's compute capability, as major · 10 + minor.
        compute: i64,
    },
    /// Quantized activations that are not supported with the weights.
    #[error("{weights} with {inputs} activations is not supported")]
    Inputs {
        /// Weights.
        weights: String,
        /// Activations.
        inputs: &'static str,
    },
    /// The device does not support e4m3fn activations.
    #[error("FP8 activations are supported on 8.9 and 12.0 only, not on {device}")]
    Fp8Inputs {
        /// The device.
        device: String,
    },
}

/// One backend's refusal.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// The backend.
    pub backend: Backend,
    /// Why.
    pub reason: Reason,
}

/// The outcome of a selection.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// The first backend in order of priority without a refusal.
    pub chosen: Option<Backend>,
    /// Every reason of every backend that refused.
    pub refusals: Vec<Refusal>,
}

impl Selection {
    /// Evaluates every backend in order, so that the result is complete, and selects the first
    /// without a refusal.
    fn among(backends: &[Backend], mut reasons: impl FnMut(Backend) -> Vec<Reason>) -> Self {
        let mut this = Self { chosen: None, refusals: Vec::new() };
        for &backend in backends {
            let found = reasons(backend);
            if found.is_empty() {
                this.chosen = this.chosen.or(Some(backend));
            }
            this.refusals.extend(found.into_iter().map(|reason| Refusal { backend, reason }));
        }
        this
    }
}
