//! The schedule that a file names or states.

use super::Schedule;
use crate::num::scalar::ScalarType;
use crate::weight::Weight;
use crate::{Error, Result};

/// The schedule that is declared for a product.
#[derive(Debug, Clone, PartialEq)]
pub enum ScheduleChoice {
    /// The name `canonical`: [`Schedule::canonical`] of the case's weight and types.
    Canonical,
    /// The name `canonical_v2`: [`Schedule::canonical_v2`] of the case's weight and types.
    CanonicalV2,
    /// The name `canonical_wgmma`: [`Schedule::canonical_wgmma`] of the case's weight and output type.
    CanonicalWgmma,
    /// A given schedule.
    Given(Box<Schedule>),
}

impl ScheduleChoice {
    /// The schedules that have a name.
    pub(crate) const NAMED: [(&'static str, Self); 3] = [
        ("canonical", Self::Canonical),
        ("canonical_v2", Self::CanonicalV2),
        ("canonical_wgmma", Self::CanonicalWgmma),
    ];

    /// The name; `None` for a given schedule.
    pub fn name(&self) -> Option<&'static str> {
        Self::NAMED.iter().find(|(_, named)| named == self).map(|(name, _)| *name)
    }

    /// Resolves the schedule for these matrices, activations of type `input` and output `dtype`.
    pub(crate) fn resolve(
        &self,
        weights: &[Weight<'_>],
        dtype: ScalarType,
        input: ScalarType,
    ) -> Result<Schedule> {
        match (self, weights.first()) {
            (Self::Given(schedule), _) => Ok((**schedule).clone()),
            (Self::Canonical, Some(w)) => Schedule::canonical(w, dtype, input),
            (Self::CanonicalV2, Some(w)) => Schedule::canonical_v2(w, dtype, input),
            (Self::CanonicalWgmma, Some(_)) if input != ScalarType::FLOAT8_E4M3FN => {
                Err(Error::unsupported(
                    input,
                    "schedule canonical_wgmma takes float8_e4m3fn activations",
                ))
            }
            (Self::CanonicalWgmma, Some(w)) => Schedule::canonical_wgmma(w, dtype),
            (Self::Canonical | Self::CanonicalV2 | Self::CanonicalWgmma, None) => {
                Err(Error::size("experts", 0, "1 or more"))
            }
        }
    }
}
