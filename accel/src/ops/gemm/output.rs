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
}

impl Output<'_> {
    pub(super) fn is_part(&self) -> bool {
        matches!(self, Self::Part(_))
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Halves(y) => y.len(),
            Self::Part(y) => y.len(),
        }
    }

    pub(super) fn is_on(&self, device: &Device) -> bool {
        match self {
            Self::Halves(y) => y.is_on(device),
            Self::Part(y) => y.is_on(device),
        }
    }

    pub(super) fn pointer(self) -> Pointer {
        match self {
            Self::Halves(y) => y.into(),
            Self::Part(y) => y.into(),
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
            (Self::Part(_), None) => {
                let expected = "a part of the model's k: MarlinWeight::with_split";
                Err(row.refuse("weight", "no split", expected))
            }
            _ => Ok(()),
        }
    }
}
