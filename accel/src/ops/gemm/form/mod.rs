//! The properties of a weight that products' sources are compiled for.

mod bytes;
mod halves;
mod packed;
#[cfg(test)]
mod table;

pub use packed::{Packed, PackedScales, ScaleBound};

use crate::{
    nvrtc::Parameter,
    parameters::{Codes, Scales},
};

/// The parameters that follow from a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    pub(crate) codes: Codes,
    /// With 8-bit activations [`Scales::E8m0`] of e2m1 codes, else [`Scales::Bits16`].
    pub(crate) scales: Scales,
    /// Scale groups in a stage: 64 k, or 128 with 8-bit activations; 0: one group for all k.
    pub(crate) groups: u32,
    /// Whether groups are of several sizes, so that each k has the number of its own.
    pub(crate) has_g_idx: bool,
}

impl Form {
    /// The parameters of products with 16-bit activations.
    pub(super) fn parameters(self) -> [Parameter; 4] {
        [
            ("CODES", self.codes as u32),
            ("SCALES", self.scales as u32),
            ("GROUPS", self.groups),
            ("HAS_G_IDX", self.has_g_idx.into()),
        ]
    }

    /// Bytes of a scale in the device's memory.
    pub(super) fn scale_size(self) -> usize {
        if matches!(self.scales, Scales::E8m0 | Scales::E8m0Wide | Scales::Ue4m3) { 1 } else { 2 }
    }
}
