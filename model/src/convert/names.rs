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

use marlinspike::config::Scheme;

use crate::model::layers::Role;

/// A tensor in the kernel's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorKind {
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
pub fn suffix(scheme: &Scheme, role: Role, kind: TensorKind) -> &'static str {
    let integers = match scheme {
        Scheme::Wna16(w) => Some(w.checkpoint_format.kernel_names),
        _ => None,
    };
    match kind {
        TensorKind::Weight => integers.map_or("weight", |names| names.weight),
        TensorKind::Scales if matches!(scheme, Scheme::Fp8(f) if f.scale_inv) => "weight_scale_inv",
        TensorKind::Scales => integers.map_or("weight_scale", |names| names.scales),
        TensorKind::Zeros => integers.map_or("weight_zero_point", |names| names.zeros),
        TensorKind::GIdx => integers.map_or("weight_g_idx", |names| names.g_idx),
        TensorKind::SortIndices => "g_idx_sort_indices",
        TensorKind::Bias => "bias",
        TensorKind::GlobalScale if role == Role::Dense => "weight_global_scale",
        TensorKind::GlobalScale => "weight_scale_2",
        TensorKind::InputGlobalScale => "input_global_scale",
        TensorKind::InputScale => "input_scale",
    }
}

/// The tensor's full name.
pub fn full(module: &str, scheme: &Scheme, role: Role, kind: TensorKind) -> String {
    format!("{module}.{}{}", role.prefix(), suffix(scheme, role, kind))
}
