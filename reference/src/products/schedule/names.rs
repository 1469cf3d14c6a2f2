//! Names of units and types in JSON.

use serde::{Deserialize, Serialize};

use super::ScheduleError;
use crate::num::scalar::ScalarType;
use crate::products::tensor_core::{self, Accumulator, Architecture, Instruction, Unit};

/// The key of a row in the table of matrix units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitName {
    /// GPU generation.
    pub architecture: Architecture,
    /// Instruction family.
    pub instruction: Instruction,
    /// Type of x in the unit.
    #[serde(with = "scalar")]
    pub a: ScalarType,
    /// Type of the weights in the unit.
    #[serde(with = "scalar")]
    pub b: ScalarType,
    /// Type of the sum.
    pub accumulator: AccumulatorType,
    /// k of the instruction.
    pub size_k: usize,
}

/// Type of a unit's sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccumulatorType {
    /// f32.
    Float32,
    /// f16.
    Float16,
    /// int32.
    Int32,
}

impl UnitName {
    /// The name of a row.
    pub fn of(unit: &Unit) -> Self {
        Self {
            architecture: unit.architecture,
            instruction: unit.instruction,
            a: unit.inputs.0,
            b: unit.inputs.1,
            accumulator: match unit.accumulator {
                Accumulator::F32 { .. } => AccumulatorType::Float32,
                Accumulator::F16 => AccumulatorType::Float16,
                Accumulator::S32 => AccumulatorType::Int32,
            },
            size_k: unit.size_k,
        }
    }

    /// The row.
    ///
    /// # Errors
    /// [`ScheduleError::Value`] when the table has no such row.
    pub fn find(&self) -> Result<&'static Unit, ScheduleError> {
        tensor_core::UNITS.iter().find(|u| Self::of(u) == *self).ok_or_else(|| {
            let found = format!(
                "{:?} {:?} {} x {} -> {:?}, k {}",
                self.architecture, self.instruction, self.a, self.b, self.accumulator, self.size_k
            );
            ScheduleError::value("unit", found, "a row of the table of matrix units")
        })
    }
}

/// The default type of a sum.
pub(super) fn float32() -> ScalarType {
    ScalarType::FLOAT32
}

/// A scalar type by its name.
pub(super) mod scalar {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::num::scalar::ScalarType;

    pub(in super::super) fn serialize<S: Serializer>(
        ty: &ScalarType,
        s: S,
    ) -> Result<S::Ok, S::Error> {
        s.serialize_str(ty.name())
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        d: D,
    ) -> Result<ScalarType, D::Error> {
        let name = std::borrow::Cow::<'de, str>::deserialize(d)?;
        ScalarType::from_name(&name)
            .ok_or_else(|| D::Error::custom(format!("unknown scalar type {name:?}")))
    }
}
