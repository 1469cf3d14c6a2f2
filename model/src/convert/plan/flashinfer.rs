//! FlashInfer's and CUTLASS's 4-bit experts: which stacks they take, what comes out, and what the files
//! say of it.

use std::collections::BTreeMap;
use std::ops::Range;

use marlinspike::config::{IntContainer, Scheme};
use marlinspike::container::TensorSpec;
use marlinspike::dims::{GroupSize, Shape};
use marlinspike::layout::Layout as _;
use marlinspike::layout::flashinfer::{BLOCK_K_BYTES, ExpertLayout, Nvfp4Backend, Projection};
use marlinspike::scalar::ScalarType;
use marlinspike::tensor::DType;
use marlinspike::{Error, Result};
use serde_json::{Value, json};

use super::stack::{StackInfo, cut};
use super::{Output, Packing, Settings, StackPlan};
use crate::convert::names::{self, Kind};
use crate::model::bind::{self, Part};
use crate::model::layers::{Role, Stack};

/// A layout of these kernels, by what it follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlashinferLayout {
    /// int4 with a bf16 scale for each 32 k, for `trtllm_mxint4_block_scale_moe`.
    Mxint4,
    /// NVFP4, for this backend.
    Nvfp4(Nvfp4Backend),
}

impl FlashinferLayout {
    /// The layout of a projection whose matrices are `shape`.
    ///
    /// # Errors
    /// As [`ExpertLayout::mxint4`] and [`ExpertLayout::nvfp4`]; [`Error::Unsupported`] for a linear
    /// layer.
    pub fn layout(self, role: Role, shape: Shape) -> Result<ExpertLayout> {
        let (projection, hidden, inner) = match role {
            Role::W13 => (Projection::W13, shape.size_k, shape.size_n / 2),
            Role::W2 => (Projection::W2, shape.size_n, shape.size_k),
            Role::Dense => return Err(Error::unsupported("a linear layer", "experts alone")),
        };
        match self {
            Self::Mxint4 => ExpertLayout::mxint4(projection, hidden, inner),
            Self::Nvfp4(backend) => ExpertLayout::nvfp4(backend, projection, hidden, inner, true),
        }
    }

    /// Shape of one expert's codes as bytes: `[K / 256, N, 128]` of mxint4, `[N, K / 2]` of NVFP4.
    fn weight_shape(self, layout: &ExpertLayout) -> Vec<usize> {
        let [lines, bytes] = layout.weights().packed_shape();
        let size_n = layout.weights().shape().size_n;
        match self {
            Self::Mxint4 => vec![lines / size_n, size_n, bytes],
            Self::Nvfp4(_) => vec![lines, bytes],
        }
    }

    /// The layout of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let backend = || Nvfp4Backend::NAMED.iter().find(|(n, _)| *n == name);
        match name {
            "mxint4" => Some(Self::Mxint4),
            _ => backend().map(|(_, backend)| Self::Nvfp4(*backend)),
        }
    }

    /// The name that files have for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mxint4 => "mxint4",
            Self::Nvfp4(backend) => {
                Nvfp4Backend::NAMED.iter().find(|(_, b)| *b == backend).map_or("", |(name, _)| name)
            }
        }
    }
}

/// The layout that takes a stack, or why none does.
fn choose(stack: &Stack, backend: Nvfp4Backend) -> Result<FlashinferLayout, String> {
    if stack.role == Role::Dense {
        return Err("found a linear layer, expected experts".to_owned());
    }
    match &stack.scheme {
        Scheme::Nvfp4 { .. } => Ok(FlashinferLayout::Nvfp4(backend)),
        Scheme::Wna16(w) => {
            let found =
                format!("{} {} in groups of {}", w.checkpoint_format, w.weight_type, w.group_size);
            let fits = w.checkpoint_format == IntContainer::CtPackQuantized
                && w.weight_type == ScalarType::UINT4B8
                && w.group_size == GroupSize::Of(32)
                && !w.desc_act;
            match fits {
                true => Ok(FlashinferLayout::Mxint4),
                false => Err(format!(
                    "found {found}{}, expected compressed-tensors pack-quantized uint4b8 in groups of 32",
                    if w.desc_act { " with act-order" } else { "" }
                )),
            }
        }
        other => Err(format!("found {}, expected nvfp4 or 4-bit integers", other.label())),
    }
}

/// The stack on this rank, or every reason against.
pub(super) fn stack_plan(
    stack: &Stack,
    info: StackInfo,
    settings: &Settings,
    backend: Nvfp4Backend,
) -> Result<StackPlan, Vec<String>> {
    let (k, n) = cut(stack, &info, None, settings).map_err(|e| vec![e])?;
    let kind = choose(stack, backend).map_err(|e| vec![e])?;
    let shape = Shape::new(k.len(), n.iter().map(Range::len).sum());
    let layout = kind.layout(stack.role, shape).map_err(|e| vec![e.to_string()])?;
    let group_size = bind::group_size(&stack.scheme, info.size_k);
    let groups = group_size.groups(shape.k()).map_err(|e| vec![e.to_string()])?;
    let activations = info.experts[0].iter().all(|b| b.get(Part::InputScale).is_some());
    let mut plan = StackPlan {
        module: stack.module.clone(),
        role: stack.role,
        scheme: stack.scheme.clone(),
        experts: info.experts,
        k,
        n,
        shape,
        group_size,
        groups,
        act_order: false,
        is_k_full: true,
        padding: None,
        packing: Packing::Flashinfer(kind),
        outputs: Vec::new(),
    };
    let experts = plan.experts.len();
    let mut push = |kind, dtype, shape| {
        let name = names::full(&plan.module, &plan.scheme, plan.role, kind);
        plan.outputs.push(Output { kind, spec: TensorSpec { name, dtype, shape } });
    };
    push(Kind::Weight, DType::U8, [&[experts], kind.weight_shape(&layout).as_slice()].concat());
    let [rows, cols] = layout.scales().packed_shape();
    let scale = match kind {
        FlashinferLayout::Mxint4 => DType::BF16,
        FlashinferLayout::Nvfp4(_) => DType::F8E4M3,
    };
    push(Kind::Scales, scale, vec![experts, rows, cols]);
    if let FlashinferLayout::Nvfp4(_) = kind {
        push(Kind::GlobalScale, DType::F32, vec![experts]);
        if matches!(stack.scheme, Scheme::Nvfp4 { weight_only: false, .. }) && activations {
            push(Kind::InputScale, DType::F32, vec![experts]);
        }
    }
    Ok(plan)
}

/// The key under which a file's metadata describes a layer.
pub fn key(module: &str) -> String {
    format!("marlinspike.flashinfer.{module}")
}

/// What the files say of each layer, by module: see the README.
pub(super) fn descriptions(stacks: &[StackPlan]) -> BTreeMap<String, Value> {
    let mut all: BTreeMap<String, Value> = BTreeMap::new();
    for plan in stacks {
        let Packing::Flashinfer(kind) = plan.packing else { continue };
        let Ok(layout) = kind.layout(plan.role, plan.shape) else { continue };
        let value = all.entry(plan.module.clone()).or_insert_with(|| {
            json!({
                "version": 1,
                "layer": "moe",
                "layout": kind.name(),
                "num_experts": plan.experts.len(),
                "group_size": plan.group_size.to_config(),
                "scale_tile": "128x4",
            })
        });
        if plan.role == Role::W13 {
            value["hidden_size"] = json!(plan.shape.size_k);
            value["intermediate_size"] = json!(plan.shape.size_n / 2);
        }
        let padded = layout.weights().shape();
        let steps: Vec<_> =
            layout.weights().rows().steps().iter().map(ToString::to_string).collect();
        value[plan.role.prefix().trim_end_matches('_')] = json!({
            "size_k": padded.size_k,
            "size_n": padded.size_n,
            "rows": steps,
            "block_k_bytes": (kind == FlashinferLayout::Mxint4).then_some(BLOCK_K_BYTES),
        });
    }
    all
}
