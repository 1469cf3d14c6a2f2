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
    /// A given schedule.
    Given(Box<Schedule>),
}

impl ScheduleChoice {
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
            (Self::Canonical, None) => Err(Error::size("experts", 0, "1 or more")),
        }
    }
}
