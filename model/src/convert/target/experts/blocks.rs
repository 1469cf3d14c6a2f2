//! Experts of FP8 blocks.

use marlinspike::layouts::Layout as _;
use marlinspike::layouts::deepgemm::repeat_blocks;
use marlinspike::num::tensor::DType;
use marlinspike::weight::Weight;
use marlinspike::{Error, Result};
use serde_json::{Value, json};

use super::{
    BLOCK_K_BYTES, ExpertBackend, Fp8BlockBackend, Fp8BlockExpert, Planned, Role, projection,
};
use crate::convert::entry::Entry;
use crate::convert::names::TensorKind;
use crate::convert::piece::{Bytes, Piece};
use crate::convert::stack::StackPlan;
use crate::convert::target::fp8_blocks;
use marlinspike::num::dims::Shape;

/// The layouts with their names in files.
const NAMED: [(&str, Fp8BlockBackend); 2] = [
    ("fp8_block_trtllm", Fp8BlockBackend::TrtLlm),
    ("fp8_block_cutlass", Fp8BlockBackend::Cutlass),
];

/// The layout's name in files.
pub(super) fn name(backend: Fp8BlockBackend) -> &'static str {
    NAMED.iter().find(|(_, b)| *b == backend).map_or("", |(name, _)| name)
}

/// The layout of this name.
pub(super) fn from_name(name: &str) -> Option<Fp8BlockBackend> {
    NAMED.iter().find(|(n, _)| *n == name).map(|(_, backend)| *backend)
}

/// The kernel for FP8 blocks of upstream's backend `chosen`.
///
/// # Errors
/// The reason why it has none.
pub(super) fn backend(chosen: ExpertBackend) -> Result<Fp8BlockBackend, String> {
    match chosen {
        ExpertBackend::FlashInferTrtllm => Ok(Fp8BlockBackend::TrtLlm),
        ExpertBackend::FlashInferCutlass => Ok(Fp8BlockBackend::Cutlass),
        other => Err(format!(
            "fp8 block 128x128: found {}, expected FLASHINFER_TRTLLM or FLASHINFER_CUTLASS",
            ExpertBackend::NAMED.iter().find(|(_, b)| *b == other).map_or("", |(name, _)| name)
        )),
    }
}

/// The layout of a stack's matrices of `shape`.
pub(super) fn layout(backend: Fp8BlockBackend, role: Role, shape: Shape) -> Result<Fp8BlockExpert> {
    Fp8BlockExpert::new(backend, projection(role)?, shape, true)
}

/// Adds the outputs to a plan that is cut to its rank.
pub(super) fn outputs(backend: Fp8BlockBackend, mut plan: StackPlan) -> Planned {
    let shape = plan.slice.shape;
    let layout = layout(backend, plan.role, shape).map_err(|e| vec![e.to_string()])?;
    let (experts, groups) = (plan.experts.len(), shape.size_k / fp8_blocks::BLOCK);
    plan.groups.count = groups;
    let [lines, bytes] = layout.weight().packed_shape();
    let codes = match backend {
        Fp8BlockBackend::TrtLlm => vec![experts, lines / shape.size_n, shape.size_n, bytes],
        Fp8BlockBackend::Cutlass => vec![experts, lines, bytes],
    };
    plan.push(TensorKind::Weight, DType::F8E4M3, codes);
    let blocks = shape.size_n / fp8_blocks::BLOCK;
    plan.push(TensorKind::Scales, DType::F32, vec![experts, blocks, groups]);
    Ok(plan)
}

/// The description of a stack in the files' metadata.
pub(super) fn description(layout: &Fp8BlockExpert) -> Value {
    let weight = layout.weight();
    let steps: Vec<_> = weight.rows().steps().iter().map(ToString::to_string).collect();
    json!({
        "size_k": weight.shape().size_k,
        "size_n": weight.shape().size_n,
        "rows": steps,
        "block_k_bytes": weight.block().map(|_| BLOCK_K_BYTES),
    })
}

/// The pieces of an expert.
pub(super) fn pack(
    backend: Fp8BlockBackend,
    plan: &StackPlan,
    expert: usize,
    weight: &Weight<'_>,
) -> Result<Vec<Piece>> {
    let layout = layout(backend, plan.role, plan.slice.shape)?;
    let (codes, scales) = layout.pack(&weight.codes, &fp8_blocks::block_scales(weight)?)?;
    let whole =
        |kind, bytes: Bytes| Piece::whole(kind, expert as u64 * bytes.get().len() as u64, bytes);
    Ok(vec![
        whole(TensorKind::Weight, Bytes::B8(codes)),
        whole(TensorKind::Scales, Bytes::F32(scales)),
    ])
}

/// Every expert's weight of a converted stack.
pub(super) fn unpack(backend: Fp8BlockBackend, entry: &Entry<'_>) -> Result<Vec<Weight<'static>>> {
    let shape = entry.shape()?;
    let layout = layout(backend, entry.role, shape)?;
    entry.need("weight")?.expect_dtype(&[DType::F8E4M3])?;
    entry.need("scales")?.expect_dtype(&[DType::F32])?;
    let one = |e: usize| -> Result<Weight<'static>> {
        let part =
            |role| -> Result<_> { entry.part(role, e)?.ok_or_else(|| entry.bad("tensors", role)) };
        let (codes, scales) = (part("weight")?, part("scales")?);
        if codes.len() != shape.size_k * shape.size_n {
            return Err(Error::shape(codes.name(), codes.shape(), format!("codes of {shape}")));
        }
        let (codes, blocks) = layout.unpack(codes.bytes(), &scales.elements::<f32>())?;
        let scales = repeat_blocks(&blocks, shape.size_n, fp8_blocks::BLOCK)?;
        let weight = fp8_blocks::weight(entry, e, codes, scales)?;
        weight.validate()?;
        Ok(weight)
    };
    (0..entry.experts()?).map(one).collect()
}
