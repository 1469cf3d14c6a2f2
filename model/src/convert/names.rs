//! Names of the tensors in the kernel's format: what upstream's layers hold after loading.
//!
//! | format | weight | scales | zero points | order | more |
//! | --- | --- | --- | --- | --- | --- |
//! | GPTQ, AWQ | `qweight` | `scales` | `qzeros` | `g_idx`, `g_idx_sort_indices` | `bias`, `input_global_scale` |
//! | compressed-tensors integers | `weight_packed` | `weight_scale` | `weight_zero_point` | `weight_g_idx`, `g_idx_sort_indices` | `bias`, `input_global_scale` |
//! | FP8 | `weight` | `weight_scale`, of `quant_method: fp8` blocks `weight_scale_inv` | | | `bias` |
//! | MXFP8, MXFP4 | `weight` | `weight_scale` | | | `bias` |
//! | NVFP4 | `weight` | `weight_scale` | | | `bias`, `weight_global_scale`, of experts `weight_scale_2` |
//!
//! A dense layer's tensors are `<module>.<name>`; those of experts
//! `<...experts>.w13_<name>` and `<...experts>.w2_<name>`, with the experts first in the shape.
//! A part that a layer does not have has no tensor (upstream keeps empty placeholders).

use marlinspike::config::{IntContainer, Scheme};

use crate::model::layers::Role;

/// A tensor in the kernel's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `[E, K / 16, N · 16 / pack]` int32.
    Weight,
    /// `[E, groups, N]`.
    Scales,
    /// `[E, groups, N / pack]` int32.
    Zeros,
    /// `[E, K]` int32, ascending.
    GIdx,
    /// `[E, K]` int32.
    SortIndices,
    /// `[E, N]`.
    Bias,
    /// `[E]` float32.
    GlobalScale,
    /// `[1]` float32.
    InputGlobalScale,
    /// `[E]` float32: NVFP4's multipliers of the quantized activations.
    InputScale,
}

/// The tensor's name after the module and the `w13_` or `w2_`.
pub fn suffix(scheme: &Scheme, role: Role, kind: Kind) -> &'static str {
    let gptq_like = matches!(
        scheme,
        Scheme::Wna16(w) if matches!(
            w.checkpoint_format,
            IntContainer::Gptq | IntContainer::GptqV2 | IntContainer::Awq
        )
    );
    match kind {
        Kind::Weight if gptq_like => "qweight",
        Kind::Weight if matches!(scheme, Scheme::Wna16(_)) => "weight_packed",
        Kind::Weight => "weight",
        Kind::Scales if gptq_like => "scales",
        Kind::Scales if matches!(scheme, Scheme::Fp8(f) if f.scale_inv) => "weight_scale_inv",
        Kind::Scales => "weight_scale",
        Kind::Zeros if gptq_like => "qzeros",
        Kind::Zeros => "weight_zero_point",
        Kind::GIdx if gptq_like => "g_idx",
        Kind::GIdx => "weight_g_idx",
        Kind::SortIndices => "g_idx_sort_indices",
        Kind::Bias => "bias",
        Kind::GlobalScale if role == Role::Dense => "weight_global_scale",
        Kind::GlobalScale => "weight_scale_2",
        Kind::InputGlobalScale => "input_global_scale",
        Kind::InputScale => "input_scale",
    }
}

/// The tensor's full name.
pub fn full(module: &str, scheme: &Scheme, role: Role, kind: Kind) -> String {
    format!("{module}.{}{}", role.prefix(), suffix(scheme, role, kind))
}
