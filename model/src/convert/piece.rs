//! A job's results: bytes of output tensors and their places.

use std::ops::Range;

use marlinspike::weight::{Table, TableData};

use super::names::TensorKind;

/// Values that all parts of a stack share. They depend on all of its scales.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Constants {
    /// NVFP4: factor moved from the global scale to the block scales.
    pub scale_factor: Option<f32>,
    /// int8 activations: the largest scale in the model's type.
    pub int8_scale_max: Option<f32>,
    /// NVFP4: the multiplier of the quantized activations that all experts share.
    pub input_scale: Option<f32>,
}

/// Bytes of one output of a job. They form runs of equal length at equal distances in the output
/// tensor.
#[derive(Debug)]
pub struct Piece {
    /// Which output.
    pub kind: TensorKind,
    /// Offset of the first run in the output tensor, in bytes.
    pub offset: u64,
    /// Bytes of a run.
    pub run: u64,
    /// Bytes from the start of one run to the start of the next.
    pub stride: u64,
    /// The bytes of all runs.
    pub bytes: Bytes,
}

impl Piece {
    /// A piece of the output `kind`: the bytes `part` of each row of `width` bytes, with the first
    /// row at byte `offset`. Whole rows are one run.
    pub(crate) fn rows(
        kind: TensorKind,
        offset: u64,
        width: u64,
        part: Range<u64>,
        bytes: Bytes,
    ) -> Self {
        let run = part.end - part.start;
        let run = if run == width { bytes.get().len() as u64 } else { run };
        Self { kind, offset: offset + part.start, run, stride: width, bytes }
    }

    /// One run of bytes at `offset`.
    pub(crate) fn whole(kind: TensorKind, offset: u64, bytes: Bytes) -> Self {
        let run = bytes.get().len() as u64;
        Self { kind, offset, run, stride: run, bytes }
    }

    /// Each run, and its offset in the output tensor.
    pub fn runs(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let runs = self.bytes.get().chunks(usize::try_from(self.run).unwrap_or(usize::MAX).max(1));
        (0u64..).zip(runs).map(|(i, run)| (self.offset + i * self.stride, run))
    }

    /// Where the last run ends in the output tensor.
    pub(crate) fn end(&self) -> u64 {
        self.runs().last().map_or(0, |(at, run)| at + run.len() as u64)
    }
}

/// Owned elements of any type, read as bytes.
#[derive(Debug)]
pub enum Bytes {
    /// From bytes.
    B8(Vec<u8>),
    /// From 16-bit elements.
    B16(Vec<u16>),
    /// From words.
    B32(Vec<u32>),
    /// From floats.
    F32(Vec<f32>),
}

impl Bytes {
    /// The bytes.
    pub fn get(&self) -> &[u8] {
        match self {
            Self::B8(v) => v,
            Self::B16(v) => bytemuck::cast_slice(v),
            Self::B32(v) => bytemuck::cast_slice(v),
            Self::F32(v) => bytemuck::cast_slice(v),
        }
    }

    pub(crate) fn of(table: &Table) -> Self {
        match table.data() {
            TableData::B8(v) => Self::B8(v.clone()),
            TableData::B16(v) => Self::B16(v.clone()),
            TableData::B32(v) => Self::B32(v.clone()),
        }
    }
}
