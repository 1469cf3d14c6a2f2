//! What releases of vLLM decide for a layer, and what changes between two of them.
//!
//! The rest of `select` follows vLLM 0.21.0. [`answer`] gives the answers of another release, and
//! [`changes`] the answers that differ. The answers hold for default settings: every package
//! installed, SiLU (`swigluoai` for gpt-oss), no backend requested, tokens in their original order,
//! on CUDA devices from compute capability 7.5 on (the integer path also on CPUs).
//! `reference/tests/data/upstream_drift.json` has the answers of upstream's own functions.

mod experts;
mod linear;
mod shapes;

use std::fmt;

pub use experts::experts_kernel;
pub use linear::linear_kernel;
pub use shapes::{Padding, experts_padding, linear_padding, padded_intermediate, padded_nk};

use super::{Capability, InputType, LinearDesc, MoeDesc, Platform};
use crate::config::Scheme;
use crate::num::dims::GroupSize;

/// A release of vLLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Release {
    /// 0.21.0, which the rest of `select` follows.
    V0_21,
    /// 0.33.0.
    V0_33,
}

impl Release {
    /// Every release, the oldest first.
    pub const ALL: &'static [Self] = &[Self::V0_21, Self::V0_33];

    /// The newest release.
    pub const NEWEST: Self = Self::V0_33;

    /// The number, such as `0.33.0`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V0_21 => "0.21.0",
            Self::V0_33 => "0.33.0",
        }
    }

    /// The release of this number, with or without the patch number: `0.33.0` or `0.33`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|r| {
            let full = r.name();
            name == full || full.strip_suffix(".0") == Some(name)
        })
    }

    /// Number of arguments of the CPU operator `dynamic_4bit_int_moe`; 0.33.0 passes one fewer.
    pub const fn int4_moe_arguments(self) -> usize {
        match self {
            Self::V0_21 => 11,
            Self::V0_33 => 10,
        }
    }

    /// Whether Marlin takes e4m3fn activations with 4-bit weights on `device`: compute capability
    /// 8.9 and 12.0; since 0.33.0 also 12.1.
    pub fn takes_fp8_inputs(self, device: &Capability) -> bool {
        let family_12 = device.compute.is_some_and(|(major, _)| major == 12);
        matches!(device.to_int(), 89 | 120) || self == Self::V0_33 && family_12
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vLLM {}", self.name())
    }
}

/// A kernel by upstream's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// Backend; for linear layers the class.
    pub backend: &'static str,
    /// Class of the experts, or the function that is called; empty for linear layers.
    pub class: &'static str,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.class {
            "" => f.write_str(self.backend),
            class => write!(f, "{} ({class})", self.backend),
        }
    }
}

/// A layer on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// A linear layer.
    Linear(LinearDesc),
    /// Experts, and the number of expert-parallel ranks.
    Experts(MoeDesc, usize),
}

impl Layer {
    const fn inputs(&self) -> InputType {
        match self {
            Self::Linear(desc) => desc.options.input_type,
            Self::Experts(desc, _) => desc.options.input_type,
        }
    }
}

/// A question about a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Question {
    /// Whether the checkpoint's act-order is read.
    ActOrder,
    /// The kernel.
    Kernel,
    /// What Marlin does with sizes that are not multiples of its tiles.
    Sizes,
    /// Whether Marlin takes e4m3fn activations with these weights.
    Fp8Activations,
    /// Arguments of the operator that multiplies the experts on CPUs.
    CpuOperator,
}

impl Question {
    /// Every question.
    pub const ALL: &'static [Self] =
        &[Self::ActOrder, Self::Kernel, Self::Sizes, Self::Fp8Activations, Self::CpuOperator];

    /// Name in reports and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ActOrder => "act-order",
            Self::Kernel => "kernel",
            Self::Sizes => "sizes for Marlin",
            Self::Fp8Activations => "FP8 activations in Marlin",
            Self::CpuOperator => "CPU operator",
        }
    }
}

/// An answer that differs between two releases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The question.
    pub question: Question,
    /// The older release's answer.
    pub before: String,
    /// The newer release's answer.
    pub after: String,
}

/// The answer of `release` to a question about `layer`, whose weights are stored as `scheme`; `None`
/// if the question does not apply, or if the tables do not cover the layer (other platforms,
/// linear layers of floating-point weights, types that no release takes).
pub fn answer(
    release: Release,
    question: Question,
    scheme: &Scheme,
    layer: &Layer,
    device: &Capability,
) -> Option<String> {
    match question {
        Question::ActOrder => act_order(release, scheme),
        Question::Kernel if refuses_act_order(release, scheme) => None,
        Question::Kernel => match layer {
            Layer::Linear(desc) => linear_kernel(release, scheme, desc, device),
            Layer::Experts(desc, ep_size) => {
                experts_kernel(release, scheme, desc, *ep_size, device)
            }
        }
        .map(|found| found.map_or_else(|| "none".to_owned(), |kernel| kernel.to_string())),
        Question::Sizes => {
            let marlin = matches!(scheme, Scheme::Wna16(_)) && device.platform == Platform::Cuda;
            marlin.then(|| sizes(release, scheme.group_size(), layer))
        }
        Question::Fp8Activations => {
            let asked = layer.inputs() == InputType::Fp8 && device.platform == Platform::Cuda;
            asked.then(|| if release.takes_fp8_inputs(device) { "yes" } else { "no" }.to_owned())
        }
        Question::CpuOperator => {
            let asked = matches!(scheme, Scheme::W4A8Int8 { .. }) && device.platform.is_cpu();
            let experts = matches!(layer, Layer::Experts(..));
            let count = release.int4_moe_arguments();
            (asked && experts).then(|| format!("dynamic_4bit_int_moe with {count} arguments"))
        }
    }
}

/// The questions that `from` and `to` answer differently. Kernels of one backend count as equal.
pub fn changes(
    [from, to]: [Release; 2],
    scheme: &Scheme,
    layer: &Layer,
    device: &Capability,
) -> Vec<Change> {
    let backend = |text: &str| text.split(" (").next().unwrap_or(text).to_owned();
    let one = |&question: &Question| {
        let before = answer(from, question, scheme, layer, device)?;
        let after = answer(to, question, scheme, layer, device)?;
        let same =
            before == after || question == Question::Kernel && backend(&before) == backend(&after);
        (!same).then_some(Change { question, before, after })
    };
    Question::ALL.iter().filter_map(one).collect()
}

/// Rows belong to groups through a `g_idx`, and there is more than one group.
fn has_act_order(scheme: &Scheme) -> bool {
    matches!(scheme, Scheme::Wna16(w) if w.desc_act && w.group_size != GroupSize::Channel)
}

fn refuses_act_order(release: Release, scheme: &Scheme) -> bool {
    release >= Release::V0_33 && has_act_order(scheme)
}

fn act_order(release: Release, scheme: &Scheme) -> Option<String> {
    has_act_order(scheme).then(|| match refuses_act_order(release, scheme) {
        true => "refused: the checkpoint does not load".to_owned(),
        false => "rows are sorted by group".to_owned(),
    })
}

fn sizes(release: Release, group_size: GroupSize, layer: &Layer) -> String {
    let found = match layer {
        Layer::Linear(desc) => linear_padding(release, desc, group_size),
        Layer::Experts(desc, _) => experts_padding(release, desc, group_size),
    };
    match found {
        Ok(Padding::None) => "taken as they are".to_owned(),
        Ok(Padding::Linear { size_n, size_k }) => {
            format!("padded with zeros to K x N = {size_k} x {size_n}")
        }
        Ok(Padding::Intermediate(size)) => {
            format!("intermediate size padded with zeros to {size}")
        }
        Err(refusal) => format!("refused: {refusal}"),
    }
}
