//! Pads sizes for a kernel with zero codes, zero scale bytes and zero biases.
//!
//! Source: vLLM 0.21.0 `mxfp4_round_up_hidden_size_and_intermediate_size` (`oracle/mxfp4.py`);
//! upstream allocates zeros of the rounded shape and copies the file's part over them.
//!
//! A zero code times any finite scale is zero, and e8m0's zero byte is 2^−127, not NaN: padding
//! adds nothing to a product over K, and padded columns are zero.

use super::gate_up::{GateUp, intermediate};
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::select::Platform;
use crate::weight::{Codes, Groups, Table, TableData, Weight};
use crate::{Error, Result};

/// Kernels of e2m1 experts with e8m0 scales (MXFP4), grouped by their padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PaddedKernel {
    /// `DEEPGEMM_MXFP4`.
    DeepGemm,
    /// `MARLIN`, `BATCHED_MARLIN`.
    Marlin,
    /// `FLASHINFER_TRTLLM_MXFP4_BF16`, `_MXFP8`.
    FlashInferTrtllm,
    /// `FLASHINFER_CUTLASS_MXFP4_BF16`, `_MXFP8`.
    FlashInferCutlass,
    /// `TRITON`, `EMULATION` and the rest.
    Other,
}

impl PaddedKernel {
    /// Every backend with upstream's name; `TRITON` is any other.
    pub const NAMED: [(&'static str, Self); 5] = [
        ("DEEPGEMM_MXFP4", Self::DeepGemm),
        ("MARLIN", Self::Marlin),
        ("FLASHINFER_TRTLLM_MXFP4_BF16", Self::FlashInferTrtllm),
        ("FLASHINFER_CUTLASS_MXFP4_BF16", Self::FlashInferCutlass),
        ("TRITON", Self::Other),
    ];

    /// The units of hidden size and intermediate size per rank on `platform`.
    pub const fn multiples(self, platform: Platform) -> [usize; 2] {
        match (self, platform) {
            (Self::DeepGemm | Self::FlashInferCutlass, _) => [128, 128],
            (Self::Marlin, Platform::Xpu) => [128, 128],
            (Self::Marlin, _) => [256, 128],
            (Self::FlashInferTrtllm, _) | (Self::Other, Platform::Rocm) => [256, 256],
            (Self::Other, _) => [1, 64],
        }
    }

    /// Hidden size and intermediate size per rank, rounded up.
    ///
    /// # Errors
    /// [`Error::Size`] if a rounded size overflows.
    pub fn round_up(self, platform: Platform, sizes: [usize; 2]) -> Result<[usize; 2]> {
        let [hidden, inner] = self.multiples(platform);
        let round = |what, size: usize, of| {
            size.checked_next_multiple_of(of)
                .ok_or_else(|| Error::size(what, size, format!("room for a multiple of {of}")))
        };
        Ok([
            round("hidden_size", sizes[0], hidden)?,
            round("intermediate_size_per_partition", sizes[1], inner)?,
        ])
    }
}

/// `weight` padded with zeros to `to`. K grows by rows of zero codes in new groups, N by columns.
///
/// # Errors
/// [`Error::Unsupported`] for types whose code 0 is not zero, and for act-order; [`Error::Size`] if
/// a size shrinks or `to` does not fill whole groups.
pub fn pad(weight: &Weight<'_>, to: Shape) -> Result<Weight<'static>> {
    let columns: Vec<_> = (0..weight.shape().size_n).collect();
    place(weight, to, &columns)
}

/// w13 padded to `sizes` (hidden rows, intermediate features); gate and up are padded separately,
/// each at its end.
///
/// # Errors
/// As [`pad`].
pub fn pad_w13(w13: &Weight<'_>, order: GateUp, sizes: [usize; 2]) -> Result<Weight<'static>> {
    let (from, [hidden, to]) = (intermediate(w13)?, sizes);
    let size_n = to.checked_mul(2).filter(|_| to >= from).ok_or_else(|| {
        Error::size(format!("{}: intermediate_size", w13.name), to, format!("at least {from}"))
    })?;
    place(w13, Shape::new(hidden, size_n), &features(order, from, to))
}

/// The inverse of [`pad_w13`]: `sizes` are the hidden and intermediate size without padding.
///
/// # Errors
/// As [`unpad`].
pub fn unpad_w13(w13: &Weight<'_>, order: GateUp, sizes: [usize; 2]) -> Result<Weight<'static>> {
    let (to, [hidden, from]) = (intermediate(w13)?, sizes);
    if from > to {
        let what = format!("{}: intermediate_size", w13.name);
        return Err(Error::size(what, from, format!("at most {to}")));
    }
    remove(w13, hidden, &features(order, from, to))
}

/// The inverse of [`pad`]: the first `to.size_k` rows and `to.size_n` columns.
///
/// # Errors
/// [`Error::Value`] if the removed part is not zero; [`Error::Size`] if `to` is larger or cuts a
/// group.
pub fn unpad(weight: &Weight<'_>, to: Shape) -> Result<Weight<'static>> {
    let size_n = weight.shape().size_n;
    if to.size_n > size_n {
        let what = format!("{}: size_n", weight.name);
        return Err(Error::size(what, to.size_n, format!("at most {size_n}")));
    }
    remove(weight, to.size_k, &(0..to.size_n).collect::<Vec<_>>())
}

/// The columns of the unpadded features in the padded matrix.
fn features(order: GateUp, from: usize, to: usize) -> Vec<usize> {
    let mut columns = vec![0; 2 * from];
    for i in 0..from {
        for up in [false, true] {
            columns[order.column(i, up, from)] = order.column(i, up, to);
        }
    }
    columns
}

/// `weight` inside a matrix of zeros, with column n at `columns[n]`.
fn place(weight: &Weight<'_>, to: Shape, columns: &[usize]) -> Result<Weight<'static>> {
    let from = weight.shape();
    let zero_is_zero = matches!(weight.ty, ScalarType::FLOAT4_E2M1F | ScalarType::FLOAT8_E4M3FN);
    let Groups::Uniform(group_size) = weight.groups else {
        let what = format!("{}: padding under act-order", weight.name);
        return Err(Error::unsupported(what, "a new row belongs to no group"));
    };
    if !zero_is_zero || weight.zeros.is_some() {
        let what = format!("{}: padding of {} weights", weight.name, weight.ty);
        return Err(Error::unsupported(what, "code 0 must be the number zero"));
    }
    if to.size_k < from.size_k || to.size_n < from.size_n {
        return Err(Error::size(format!("{}: shape", weight.name), to, format!("at least {from}")));
    }
    weight.validate()?;
    let groups = group_size.groups(to.k())?;
    let mut source = vec![None; to.size_n];
    for (n, &column) in columns.iter().enumerate() {
        source[column] = Some(n);
    }
    let code = |k, n: usize| match source[n] {
        Some(n) if k < from.size_k => weight.codes.get(k, n),
        _ => 0,
    };
    Ok(Weight {
        name: weight.name.clone(),
        ty: weight.ty,
        codes: Codes::from_fn(weight.codes.bits(), to, code)?,
        scales: padded(&weight.scales, groups, &source)?,
        zeros: None,
        groups: Groups::Uniform(group_size),
        global_scale: weight.global_scale,
        bias: weight.bias.as_ref().map(|b| padded(b, 1, &source)).transpose()?,
    })
}

/// A table padded with zero bits.
fn padded(table: &Table, rows: usize, source: &[Option<usize>]) -> Result<Table> {
    let bits = (0..rows).flat_map(|row| {
        source.iter().map(move |n| match n {
            Some(n) if row < table.rows() => table.bits(row, *n),
            _ => 0,
        })
    });
    let data = match table.data() {
        TableData::B8(_) => TableData::B8(bits.map(|b| b as u8).collect()),
        TableData::B16(_) => TableData::B16(bits.map(|b| b as u16).collect()),
        TableData::B32(_) => TableData::B32(bits.collect()),
    };
    Table::new(table.ty(), rows, source.len(), data)
}

/// The first `size_k` rows of `columns`; everything else must be zero.
fn remove(weight: &Weight<'_>, size_k: usize, columns: &[usize]) -> Result<Weight<'static>> {
    let Shape { size_k: padded_k, size_n } = weight.shape();
    if size_k > padded_k {
        let what = format!("{}: size_k", weight.name);
        return Err(Error::size(what, size_k, format!("at most {padded_k}")));
    }
    let mut kept = vec![false; size_n];
    columns.iter().for_each(|&n| kept[n] = true);
    for k in 0..padded_k {
        for n in (0..size_n).filter(|&n| k >= size_k || !kept[n]) {
            let code = weight.codes.get(k, n);
            if code != 0 {
                let what = format!("{}: padding", weight.name);
                return Err(Error::value(what, &[k, n], code, "code 0 outside the matrix"));
            }
        }
    }
    if let Some(bias) = &weight.bias
        && let Some(n) = (0..size_n).find(|&n| !kept[n] && bias.bits(0, n) != 0)
    {
        let what = format!("{}: bias", weight.name);
        return Err(Error::value(what, &[n], bias.value(0, n), "0 outside the matrix"));
    }
    weight.slice_rows(0..size_k)?.gather_columns(columns)
}
