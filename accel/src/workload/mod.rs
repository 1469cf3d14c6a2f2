//! Products and expert layers for timing, with weights of every type that products take. Copies of
//! the weights keep each call's weight out of the caches.

mod dense;
mod fp8;
mod layer;

use marlinspike::formats::BLOCK_FORMATS;
use marlinspike::formats::blocks::BlockFormat;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

use crate::error::AccelError;

pub use dense::{Dense, ProductPlan};
pub use fp8::Fp8Dense;
pub use layer::{ExpertLayer, LayerPlans, Sizes, routing};

/// Bytes that the weights of successive calls take together: four times the L2 cache of an H200,
/// the largest there is.
pub const COLD_BYTES: usize = 240 << 20;

/// A type of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightType {
    /// Short name.
    pub name: &'static str,
    /// Codes.
    ty: ScalarType,
    /// Scales.
    scale: ScalarType,
    /// k that share a scale.
    group_size: GroupSize,
}

/// All types; the first is the most common in checkpoints.
pub static WEIGHT_TYPES: [WeightType; 7] = {
    use ScalarType as T;
    const fn of(
        name: &'static str,
        ty: ScalarType,
        scale: ScalarType,
        group_size: GroupSize,
    ) -> WeightType {
        WeightType { name, ty, scale, group_size }
    }
    const fn block(f: &BlockFormat) -> WeightType {
        of(f.name, f.element, f.scale, f.group_size())
    }
    [
        of("uint4b8", T::UINT4B8, T::BFLOAT16, GroupSize::Of(128)),
        of("uint4b8-g32", T::UINT4B8, T::BFLOAT16, GroupSize::Of(32)),
        of("uint8b128", T::UINT8B128, T::BFLOAT16, GroupSize::Of(128)),
        of("fp8", T::FLOAT8_E4M3FN, T::BFLOAT16, GroupSize::Channel),
        block(BLOCK_FORMATS[2]),
        block(BLOCK_FORMATS[1]),
        block(BLOCK_FORMATS[0]),
    ]
};

impl WeightType {
    /// The type of that name.
    pub fn named(name: &str) -> Option<Self> {
        WEIGHT_TYPES.into_iter().find(|ty| ty.name == name)
    }

    /// A matrix of random finite codes; scales between 2^-7 and 2^-6, or such powers of two.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a shape that groups or words do not divide.
    pub fn weight(self, rng: &mut Rng, shape: Shape) -> Result<Weight<'static>, AccelError> {
        self.matrix(rng, shape).map_err(|error| AccelError::Argument {
            operation: "workload",
            what: "shape",
            found: format!("{shape} of {}: {error}", self.name),
            expected: "whole groups of k".into(),
        })
    }

    fn matrix(self, rng: &mut Rng, shape: Shape) -> marlinspike::Result<Weight<'static>> {
        let bits = if self.ty.size_bits() == 8 { 8 } else { 4u32 };
        // No e4m3 code is a NaN where bit 0 is never set.
        let kept = if self.ty == ScalarType::FLOAT8_E4M3FN { 0xfefe_fefe } else { u32::MAX };
        let words: Vec<u32> =
            (0..shape.len() * bits as usize / 32).map(|_| rng.next_u32() & kept).collect();
        let groups = self.group_size.groups(shape.k())?;
        let len = groups * shape.size_n;
        let mut byte =
            |least: u32, most| (0..len).map(|_| rng.between(least, most) as u8).collect();
        let scales = match self.scale {
            ScalarType::FLOAT8_E8M0FNU => TableData::B8(byte(120, 121)),
            ScalarType::FLOAT8_E4M3FN => TableData::B8(byte(0x08, 0x0f)),
            _ => TableData::B16((0..len).map(|_| rng.between(0x3c00, 0x3c7f) as u16).collect()),
        };
        Ok(Weight {
            name: "weight".into(),
            ty: self.ty,
            codes: Codes::from_words(bits, shape, words)?,
            scales: Table::new(self.scale, groups, shape.size_n, scales)?,
            zeros: None,
            groups: Groups::Uniform(self.group_size),
            global_scale: (self.scale == ScalarType::FLOAT8_E4M3FN).then_some(1.0),
            bias: None,
        })
    }
}

/// Normal bf16 numbers of magnitude 1/4 to 4, both signs.
fn activations(rng: &mut Rng, len: usize) -> Vec<u16> {
    let number = |r: u32| ((0x3e80 + r % 0x200) | (r >> 16 & 0x8000)) as u16;
    (0..len).map(|_| number(rng.next_u32())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_makes_a_valid_weight() {
        for ty in WEIGHT_TYPES {
            let weight = ty.weight(&mut Rng::new(1), Shape::new(256, 128)).unwrap();
            weight.validate().unwrap();
            assert_eq!(WeightType::named(ty.name), Some(ty));
            let error = ty.weight(&mut Rng::new(1), Shape::new(100, 128));
            assert!(ty.group_size == GroupSize::Channel || error.is_err(), "{}", ty.name);
        }
        assert_eq!(WeightType::named("int3"), None);
    }

    #[test]
    fn activations_are_tame() {
        let x = activations(&mut Rng::new(2), 4096);
        let magnitude = |bits: &u16| ScalarType::BFLOAT16.to_f64((*bits & 0x7fff).into());
        assert!(x.iter().map(magnitude).all(|x| (0.25..4.0).contains(&x)));
        assert!(x.iter().any(|bits| bits & 0x8000 != 0));
    }
}
