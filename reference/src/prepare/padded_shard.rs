//! gpt-oss: the padded part of MXFP4 experts on a rank.
//!
//! Source: vLLM 0.21.0 `models/gpt_oss.py` (`_load_weights_mxfp4`) and `oracle/mxfp4.py`. The
//! file's w13 interleaves gate and up, so a rank's part is one range of columns. Ranges are whole
//! blocks of 32, so the last rank may hold fewer than the others.

use std::ops::Range;

use super::gate_up::{GateUp, reorder};
use super::pad::{PaddedKernel, pad, pad_w13};
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::select::Platform;
use crate::weight::{Table, TableData, Weight};
use crate::{Error, Result};

/// k per scale.
const BLOCK: usize = 32;

/// One rank of a tensor-parallel group, and its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PaddedShard {
    /// Hidden size of the model.
    pub hidden_size: usize,
    /// Intermediate size of the model; a multiple of 32.
    pub intermediate_size: usize,
    /// Ranks that share the intermediate size.
    pub tp_size: usize,
    /// This rank.
    pub tp_rank: usize,
    /// Kernel.
    pub backend: PaddedKernel,
    /// Device.
    pub platform: Platform,
}

impl PaddedShard {
    /// The features of the intermediate size that this rank holds: ceil(blocks / ranks) blocks of
    /// 32, fewer or none on the last ranks.
    ///
    /// # Errors
    /// [`Error::Size`] for no ranks, a rank outside them, or an intermediate size that is not
    /// whole blocks (upstream drops the rest).
    pub fn features(&self) -> Result<Range<usize>> {
        let Self { intermediate_size, tp_size, tp_rank, .. } = *self;
        if tp_rank >= tp_size {
            return Err(Error::size("tp_rank", tp_rank, format!("below tp_size {tp_size}")));
        }
        if !intermediate_size.is_multiple_of(BLOCK) {
            let expected = format!("a multiple of {BLOCK}");
            return Err(Error::size("intermediate_size", intermediate_size, expected));
        }
        let per_rank = (intermediate_size / BLOCK).div_ceil(tp_size) * BLOCK;
        let at = |rank: usize| rank.saturating_mul(per_rank).min(intermediate_size);
        Ok(at(tp_rank)..at(tp_rank + 1))
    }

    /// Hidden size and intermediate size per rank in the kernel. The intermediate size is rounded
    /// up from its share of the whole (upstream's `intermediate_size_per_partition`), which always
    /// leaves room for [`PaddedShard::features`].
    ///
    /// # Errors
    /// [`Error::Size`] unless the ranks divide the intermediate size.
    pub fn sizes(&self) -> Result<[usize; 2]> {
        let Self { intermediate_size, tp_size, .. } = *self;
        if intermediate_size.checked_rem(tp_size) != Some(0) {
            let expected = format!("a multiple of tp_size {tp_size}");
            return Err(Error::size("intermediate_size", intermediate_size, expected));
        }
        self.backend.round_up(self.platform, [self.hidden_size, intermediate_size / tp_size])
    }

    /// This rank's padded part of one expert's w13 (hidden rows, interleaved columns), in the
    /// kernel's order.
    ///
    /// # Errors
    /// [`Error::Size`] if `w13` does not have the shard's sizes; as [`PaddedShard::features`],
    /// [`PaddedShard::sizes`] and [`pad`].
    pub fn w13(&self, w13: &Weight<'_>, order: GateUp) -> Result<Weight<'static>> {
        self.expect(w13, Shape::new(self.hidden_size, 2 * self.intermediate_size))?;
        let Range { start, end } = self.features()?;
        let part = w13.slice_columns(2 * start..2 * end)?;
        pad_w13(&reorder(&part, GateUp::Interleaved, order)?, order, self.sizes()?)
    }

    /// This rank's part of one expert's w2 (intermediate rows, hidden columns), padded. Only the
    /// first rank has the bias; the others have zeros, so the sum over ranks adds it once.
    ///
    /// # Errors
    /// As [`PaddedShard::w13`].
    pub fn w2(&self, w2: &Weight<'_>) -> Result<Weight<'static>> {
        self.expect(w2, Shape::new(self.intermediate_size, self.hidden_size))?;
        let mut part = w2.slice_rows(self.features()?)?;
        if self.tp_rank > 0 {
            part.bias = w2.bias.as_ref().map(zeros).transpose()?;
        }
        let [hidden, inner] = self.sizes()?;
        pad(&part, Shape::new(inner, hidden))
    }

    fn expect(&self, weight: &Weight<'_>, shape: Shape) -> Result<()> {
        if weight.ty != ScalarType::FLOAT4_E2M1F {
            let what = format!("{}: {} weights", weight.name, weight.ty);
            return Err(Error::unsupported(what, "padded shards are of e2m1 in blocks of 32"));
        }
        if weight.shape() == shape {
            return Ok(());
        }
        Err(Error::size(format!("{}: shape", weight.name), weight.shape(), shape))
    }
}

fn zeros(table: &Table) -> Result<Table> {
    let len = table.rows() * table.cols();
    let data = match table.data() {
        TableData::B8(_) => TableData::B8(vec![0; len]),
        TableData::B16(_) => TableData::B16(vec![0; len]),
        TableData::B32(_) => TableData::B32(vec![0; len]),
    };
    Table::new(table.ty(), table.rows(), table.cols(), data)
}
