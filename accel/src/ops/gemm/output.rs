//! Where a product goes.

use super::MarlinWeight;
use crate::{device::Device, error::AccelError, launch::Pointer, memory::Buffer, operation::Row};

/// y of a product.
#[derive(Debug)]
pub(crate) enum Output<'a> {
    /// Outputs of f16 or bf16.
    Halves(&'a mut Buffer<u16>),
    /// The f32 sums of a rank's part of k.
    Part(&'a mut Buffer<f32>),
    /// The same in memory that ranks share.
    Peer(PeerSums),
}

/// Memory of this device that other devices may read: for `len` f32 sums, alive until the product is done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerSums {
    pub(crate) address: Pointer,
    pub(crate) len: usize,
}

impl Output<'_> {
    pub(super) fn is_part(&self) -> bool {
        !matches!(self, Self::Halves(_))
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Halves(y) => y.len(),
            Self::Part(y) => y.len(),
            Self::Peer(y) => y.len,
        }
    }

    pub(super) fn is_on(&self, device: &Device) -> bool {
        match self {
            Self::Halves(y) => y.is_on(device),
            Self::Part(y) => y.is_on(device),
            // By the rank that owns the memory.
            Self::Peer(_) => true,
        }
    }

    pub(super) fn pointer(self) -> Pointer {
        match self {
            Self::Halves(y) => y.into(),
            Self::Part(y) => y.into(),
            Self::Peer(y) => y.address,
        }
    }

    /// Returns an error unless the product of the weight's rows of k has these outputs.
    pub(super) fn check(&self, row: &Row, weight: &MarlinWeight) -> Result<(), AccelError> {
        let ranks = weight.split().map(|split| split.ranks());
        match (self, ranks) {
            (Self::Halves(_), Some(2..)) => {
                let found = format!("the part of one of {} ranks", ranks.unwrap_or(1));
                Err(row.refuse(
                    "weight",
                    found,
                    "all of k; a part has f32 sums, by marlin_gemm_part",
                ))
            }
            (Self::Part(_) | Self::Peer(_), None) => {
                let expected = "a part of the model's k: MarlinWeight::of_part";
                Err(row.refuse("weight", "no split", expected))
            }
            _ => Ok(()),
        }
    }
}
