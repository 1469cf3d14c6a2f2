//! The operands of the operator besides a weight's codes, and the parts of a packed matrix.

use crate::num::scalar::ScalarType;
use crate::weight::{Groups, TableData, Weight};
use crate::{Error, Result};

/// Scales and bias of a weight, as the operator expects them.
pub(super) struct Parts<'w> {
    /// Rows of a group; all of K for channel-wise scales.
    pub(super) group_size: usize,
    pub(super) scales: Scales<'w>,
    /// `[N]`; zeros without a bias.
    pub(super) bias: Vec<f32>,
}

/// Bits of the scales.
pub(super) enum Scales<'w> {
    /// f32 `[N]`.
    Channel(&'w [u32]),
    /// bf16 `[groups, N]`.
    Group(&'w [u16]),
}

impl<'w> Parts<'w> {
    /// Scales and bias of a weight that the operator supports.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other codes than `uint4b8`, zero points, a global scale,
    /// act-order, and other types of scales than f32 for columns and bf16 for groups; the errors of
    /// [`Weight::validate`].
    pub(super) fn of(weight: &'w Weight<'_>) -> Result<Self> {
        weight.validate()?;
        let name = &weight.name;
        let refuse = |what: String, reason: &str| Err(Error::unsupported(what, reason));
        if weight.ty != ScalarType::UINT4B8 {
            return refuse(format!("{name}: codes of type {}", weight.ty), "4 bits only (uint4b8)");
        }
        if weight.zeros.is_some() || weight.global_scale.is_some() {
            let what = format!("{name}: zero points or a global scale");
            return refuse(what, "the operator has neither");
        }
        let Groups::Uniform(group) = weight.groups else {
            return refuse(format!("{name}: g_idx"), "the operator's groups are uniform");
        };
        let shape = weight.shape();
        let group_size = group.rows(shape.k());
        let ty = weight.scales.ty();
        let scales = match (group_size == shape.size_k, weight.scales.data()) {
            (true, TableData::B32(bits)) if ty == ScalarType::FLOAT32 => Scales::Channel(bits),
            (false, TableData::B16(bits)) if ty == ScalarType::BFLOAT16 => Scales::Group(bits),
            (is_channel_wise, _) => {
                let wanted = if is_channel_wise { "float32" } else { "bfloat16" };
                let what = format!("{name}: {ty} scales with group_size {group}");
                let reason = format!(
                    "{wanted}; `weight.scales.rounded(ScalarType::{})` converts them",
                    wanted.to_uppercase()
                );
                return refuse(what, &reason);
            }
        };
        let bias = match &weight.bias {
            None => vec![0.0; shape.size_n],
            Some(b) => b.iter_bits().map(|bits| b.ty().to_f64(bits) as f32).collect(),
        };
        Ok(Self { group_size, scales, bias })
    }
}

/// A matrix's bytes by their meaning. Tables that it lacks are empty.
#[derive(Debug, Clone, Copy)]
pub struct MatrixBytes<'b> {
    /// The blocks.
    pub blocks: &'b [u8],
    /// `[blocks][groups][nr]`: 8 − zero point, which is added to each code of the group.
    pub offsets: &'b [i8],
    /// `[K]`, uint32: row k of the blocks is this row of the checkpoint.
    pub order: &'b [[u8; 4]],
}

impl MatrixBytes<'_> {
    /// The checkpoint's row that is row `k` of the blocks.
    pub fn row(&self, k: usize) -> usize {
        self.order.get(k).map_or(k, |&bytes| u32::from_le_bytes(bytes) as usize)
    }
}
