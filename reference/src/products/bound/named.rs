//! Named classes.

use super::{Adder, Ascending, Class, Order, Reduction, Split};
use crate::num::scalar::ScalarType;
use crate::products::kernel::Stripe;
use crate::products::schedule::{FP8_UNIT, MOST_PARTS, PROMOTIONS, SPLIT_TILES, UnitName};
use crate::products::tensor_core::{Accumulator, Architecture, Instruction, KSplit, UNITS, Unit};
use crate::{Error, Result};

/// The name of a class of one unit.
const OF_UNIT: &str = "matrix-unit-any-order";

impl Class {
    /// The named classes.
    pub fn named() -> Vec<Self> {
        let hopper = UNITS
            .iter()
            .find(|u| u.architecture == Architecture::Hopper && u.inputs.0 == ScalarType::FLOAT16);
        let hopper =
            hopper.map(|unit| Self { name: "hopper-any-order".to_owned(), ..Self::of_unit(unit) });
        let fused =
            Self { name: "fused-f32".to_owned(), adder: Adder::FusedF32, ..Self::any_order() };
        let separate = Self {
            name: "separate-f32".to_owned(),
            adder: Adder::SeparateF32,
            ..Self::any_order()
        };
        [
            Self::any_order(),
            Self::marlin_hopper(),
            fused,
            separate,
            Self::fp8_any_order(),
            Self::fp8_contiguous(),
            Self::fp8_hopper(),
            Self::fp8_block_scaled(),
        ]
        .into_iter()
        .chain(hopper)
        .collect()
    }

    /// The class of a name, or of a JSON object with the fields of [`Class`].
    ///
    /// # Errors
    /// [`Error::Size`] with all names, or with the number that is out of range;
    /// [`Error::Unsupported`] for JSON that states no class, or another one under the name of a
    /// named class.
    pub fn parse(text: &str) -> Result<Self> {
        if text.trim_start().starts_with('{') {
            let class: Self = serde_json::from_str(text)
                .map_err(|e| Error::unsupported(format!("class `{text}`"), e.to_string()))?;
            class.validate()?;
            class.expect_own_name()?;
            return Ok(class);
        }
        let classes = Self::named();
        let names: Vec<_> = classes.iter().map(|c| c.name.as_str()).collect();
        let expected = format!("one of {}, or JSON", names.join(", "));
        classes
            .iter()
            .find(|c| c.name == text)
            .cloned()
            .ok_or_else(|| Error::size("class", format!("`{text}`"), expected))
    }

    /// Checks that no report of this class can be taken for one of another, named class.
    fn expect_own_name(&self) -> Result<()> {
        let refuse = |reason: String| {
            Err(Error::unsupported(format!("the name `{}` of a class as JSON", self.name), reason))
        };
        let name = &self.name;
        if name.is_empty() || name.len() > 64 || !name.bytes().all(|b| (b' '..=b'~').contains(&b)) {
            return refuse("a name is 1 to 64 characters of printable ASCII".to_owned());
        }
        // A member's name begins with that of its class.
        let head = name.split([':', ',']).next().unwrap_or(name).trim();
        let named = Self::named().into_iter().filter(|named| named != self);
        let derived = [Self::exact(), Self::integer_groups(1), Self::int8(1, 1)];
        let names = named.chain(derived).map(|class| class.name);
        let mut names = names.chain([OF_UNIT.to_owned()]);
        match names.find(|known| known.eq_ignore_ascii_case(head)) {
            Some(known) => {
                refuse(format!("`{known}` is the name of another class: choose another"))
            }
            None => Ok(()),
        }
    }

    /// Every kernel that sums f16 or bf16 products on a matrix unit from Turing on, or with fused
    /// f32 multiply-adds, in any order, with partial sums reduced in f32. Known units keep at least
    /// F = 24 fraction bits and add at least eight products per sum.
    pub fn any_order() -> Self {
        Self {
            name: "f32-any-order".to_owned(),
            adder: Adder::MatrixUnit { products: 8, fraction_bits: 24, kept_bits: 24 },
            order: Order::Any,
            reduction: Reduction::F32 { steps: 1 },
            scales_in_unit: false,
        }
    }

    /// Every kernel that sums e4m3 products on a matrix unit from Ada on, in any order, with or
    /// without promotion to f32. Hopper's `wgmma` keeps the fewest fraction bits of all known
    /// units, 13, and truncates its result to as many. If sums restart from zero (scaled groups,
    /// promotion), the accumulator truncation that the bound counts covers the rounding of the
    /// multiplication or f32 addition.
    pub fn fp8_any_order() -> Self {
        let adder = Adder::MatrixUnit { products: 16, fraction_bits: 13, kept_bits: 14 };
        Self { name: "fp8-any-order".to_owned(), adder, ..Self::any_order() }
    }

    /// Every kernel whose matrix unit multiplies by the scales of groups, which are powers of two,
    /// from Blackwell on (`kind::mxf8f6f4.block_scale`), in any order. Known units of 8-bit floats keep
    /// 25 fraction bits there; the class allows 24.
    pub fn fp8_block_scaled() -> Self {
        let name = "fp8-block-scaled".to_owned();
        Self { name, scales_in_unit: true, ..Self::any_order() }
    }

    /// As [`Self::fp8_any_order`], for kernels that sum contiguous ranges of k in ascending order,
    /// cut at any multiples of 32.
    pub fn fp8_contiguous() -> Self {
        let (name, order) = ("fp8-contiguous".to_owned(), Order::Contiguous { block: 32 });
        Self { name, order, ..Self::fp8_any_order() }
    }

    /// Kernels with e4m3 operands on Hopper: k ascending on `wgmma` or `mma.sync`, with or without
    /// promotion to f32 every 32, 64 or 128 k; in 1 to 16 parts with the same number of tiles of
    /// 64, 128 or 256 k (the last part may have fewer), added in f32 in any order.
    pub fn fp8_hopper() -> Self {
        let mma = UnitName { instruction: Instruction::Mma, ..FP8_UNIT };
        let parts = |tile| (2..=MOST_PARTS).map(move |parts| Split::Parts { parts, tile });
        let splits = std::iter::once(Split::Whole).chain(SPLIT_TILES.into_iter().flat_map(parts));
        let order = Order::Ascending(Ascending {
            units: vec![FP8_UNIT, mma],
            promotions: std::iter::once(0).chain(PROMOTIONS).collect(),
            splits: splits.collect(),
        });
        Self { name: "fp8-hopper".to_owned(), order, ..Self::fp8_any_order() }
    }

    /// Every kernel that sums its products with one matrix unit of the table, in any order, with
    /// partial sums reduced in f32.
    pub fn of_unit(unit: &Unit) -> Self {
        let products = match unit.split {
            KSplit::Whole => unit.size_k,
            KSplit::Blocks(len) => len,
            KSplit::Pairs => unit.size_k / 2,
        };
        // An accumulator that is added last costs one more rounded addition per sum, which the
        // bound counts as a reduction.
        let adder = match unit.accumulator {
            Accumulator::F32 { kept_bits } => {
                let fraction_bits = unit.fraction_bits as u32;
                Adder::MatrixUnit { products, fraction_bits, kept_bits }
            }
            Accumulator::F16 => Adder::MatrixUnit {
                products,
                fraction_bits: unit.fraction_bits as u32,
                kept_bits: 11,
            },
            Accumulator::S32 => Adder::Exact,
        };
        let (order, reduction) = (Order::Any, Reduction::F32 { steps: 1 });
        let name = OF_UNIT.to_owned();
        Self { name, adder, order, reduction, scales_in_unit: false }
    }

    /// The Marlin kernels on Hopper: steps of 16 k; two or four warps share each tile of 64 or 128
    /// k in runs of 32; thread blocks process contiguous ranges of at least two steps per warp; all
    /// partial sums are added in f32.
    pub fn marlin_hopper() -> Self {
        let stripes = [(4, 2), (8, 2)].map(|(period, length)| Stripe { period, length });
        Self {
            name: "marlin-hopper".to_owned(),
            adder: Adder::MatrixUnit { products: 16, fraction_bits: 25, kept_bits: 24 },
            order: Order::Striped { block: 16, stripes: stripes.to_vec() },
            reduction: Reduction::F32 { steps: 2 },
            scales_in_unit: false,
        }
    }

    /// Integer sums of groups, scaled and added in f32 in any order: int8 activations.
    pub fn integer_groups(group_size: usize) -> Self {
        Self {
            name: "integer-groups".to_owned(),
            adder: Adder::IntegerGroups { group_size },
            order: Order::Any,
            reduction: Reduction::F32 { steps: 1 },
            scales_in_unit: false,
        }
    }

    /// int8 activations with `groups` group scales over `size_k`: integers per group; with one
    /// group, per part of at least 64 k, since kernels scale the sums of warps and thread blocks
    /// separately and add them in f32.
    pub fn int8(size_k: usize, groups: usize) -> Self {
        Self::integer_groups(if groups > 1 { size_k / groups } else { 64 })
    }

    /// Integer sums, which are exact.
    pub fn exact() -> Self {
        Self {
            name: "exact".to_owned(),
            adder: Adder::Exact,
            order: Order::Any,
            reduction: Reduction::F32 { steps: 1 },
            scales_in_unit: false,
        }
    }
}
