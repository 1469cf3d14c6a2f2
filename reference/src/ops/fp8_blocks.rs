//! Scales of blocks `[n, k]` of e4m3 weights and of groups of k of e4m3 rows, shared by `scaled_mm` and
//! `fp8_moe`.

use crate::Error;
use crate::Result;
use crate::formats::unflatten;
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::computation::codes;
use crate::ops::draw::{Rng, small};
use crate::ops::schema::{CaseError, Reader};
use crate::ops::w8a8_fp8::E4M3_TYPE;
use crate::products::schedule::{Fp8BlockKernel, GroupSum, Schedule, ScheduleChoice};
use crate::weight::{Groups, Table, TableData, Weight};

/// Types of the scales: f32, or UE8M0.
pub(super) const SCALES: &[DType] = &[DType::F32, DType::F8E8M0];

/// k of an instruction, which groups fill.
const UNIT_K: usize = 32;

/// `weight_block_size`: the columns and k of a block of the weight with one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSize {
    /// Columns of the weight; the last block may be narrower.
    pub n: usize,
    /// k of the weight's blocks and of the activations' groups.
    pub k: usize,
}

/// Which scales a generated config has: whether each row and each column has its own, or blocks.
pub(super) type ScaleAxis = (bool, bool, Option<BlockSize>);

/// A product of e4m3fn rows and an e4m3fn weight, whose case has `a`, `a_scales`, `weight`, `weight_scale`
/// and, with a bias, `bias`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Fp8Operands {
    /// Type of y and of the bias.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// Columns.
    pub size_n: usize,
    /// K.
    pub size_k: usize,
    /// Blocks of the weight and groups of the activations that share a scale; without them rows and
    /// columns have one each, or all have one.
    pub block: Option<BlockSize>,
    /// Whether there is a bias.
    pub has_bias: bool,
    /// The declared schedule.
    pub schedule: Option<ScheduleChoice>,
}

impl BlockSize {
    /// DeepSeek's blocks.
    pub const DEEPSEEK: Self = Self { n: 128, k: 128 };

    /// Reads the optional key `weight_block_size`, which excludes scales of rows and columns.
    pub(super) fn read(r: &Reader<'_>, others: &[(&str, bool)]) -> Result<Option<Self>, CaseError> {
        let key = "weight_block_size";
        let Some(sizes) = r.sizes(key)? else { return Ok(None) };
        let &[n, k] = sizes.as_slice() else {
            return Err(r.refuse(key, format!("{sizes:?}"), "two sizes, [n, k]"));
        };
        if !k.is_multiple_of(UNIT_K) {
            let expected = format!("blocks of a multiple of {UNIT_K} k, the k of an instruction");
            return Err(r.refuse(key, format!("{sizes:?}"), expected));
        }
        if let Some((other, _)) = others.iter().find(|(_, is_set)| *is_set) {
            return Err(r.refuse(other, true, "false: weight_block_size sets the scales"));
        }
        Ok(Some(Self { n, k }))
    }

    /// Checks that groups fill a size along k.
    pub(super) fn fills(
        block: Option<Self>,
        r: &Reader<'_>,
        key: &str,
        size: usize,
    ) -> Result<(), CaseError> {
        match block.filter(|b| !size.is_multiple_of(b.k)) {
            None => Ok(()),
            Some(b) => Err(r.refuse(key, size, format!("a multiple of {}, the k of a block", b.k))),
        }
    }

    /// Checks that a declared schedule applies the scales of both operands' groups.
    pub(super) fn fits(
        block: Option<Self>,
        r: &Reader<'_>,
        key: &str,
        schedule: Option<&ScheduleChoice>,
    ) -> Result<(), CaseError> {
        let Some(schedule) = schedule else { return Ok(()) };
        let by_group = match schedule {
            ScheduleChoice::Given(s) => s.group_sum.is_some_and(|g| g.row_scale.is_some()),
            ScheduleChoice::Canonical
            | ScheduleChoice::CanonicalV2
            | ScheduleChoice::CanonicalWgmma => false,
        };
        let named = || schedule.name().unwrap_or("a schedule");
        match (block, by_group) {
            (Some(_), false) => {
                let expected = "a schedule with group_sum.row_scale, for scales of blocks";
                Err(r.refuse(key, named(), expected))
            }
            (None, true) => {
                let expected = "a schedule without group_sum.row_scale, or weight_block_size";
                Err(r.refuse(key, named(), expected))
            }
            _ => Ok(()),
        }
    }

    /// `weight_block_size` as JSON.
    pub(super) fn json(block: Option<Self>) -> serde_json::Value {
        block.map_or(serde_json::Value::Null, |b| serde_json::json!([b.n, b.k]))
    }

    /// Rows and columns of the weight's scales.
    pub(super) fn scales(self, [size_n, size_k]: [usize; 2]) -> [usize; 2] {
        [size_n.div_ceil(self.n), size_k / self.k.max(1)]
    }
}

/// Requires positive finite f32 scales of activations, or UE8M0 scales that are numbers.
pub(super) fn check_scales(tensor: &Tensor<'_>) -> Result<()> {
    if tensor.dtype() == DType::F32 {
        return crate::ops::schema::positive(tensor);
    }
    match tensor.bytes().iter().position(|&b| b == 0xff) {
        None => Ok(()),
        Some(i) => {
            let at = unflatten(tensor.shape(), i);
            Err(Error::value(tensor.name(), &at, "NaN (0xff)", "a power of two"))
        }
    }
}

/// The values of f32 or UE8M0 scales.
pub(super) fn scale_values(tensor: &Tensor<'_>) -> Vec<f32> {
    match tensor.dtype() {
        DType::F32 => tensor.elements::<f32>().into_owned(),
        _ => {
            let ty = ScalarType::FLOAT8_E8M0FNU;
            tensor.bytes().iter().map(|&b| ty.to_f64(b.into()) as f32).collect()
        }
    }
}

/// Whether all scales are powers of two. UE8M0's smallest, 2^-127, is a subnormal f32.
pub(super) fn are_powers(scales: &[f32]) -> bool {
    scales.iter().all(|s| {
        let fraction = s.to_bits() & 0x7f_ffff;
        fraction == 0 || (s.abs() < f32::MIN_POSITIVE && fraction.is_power_of_two())
    })
}

/// An e4m3fn matrix `[N, K]` with scales `[blocks of N, blocks of K]`.
pub(super) fn block_weight(
    tensor: &Tensor<'_>,
    scales: &[f32],
    [size_n, size_k]: [usize; 2],
    block: BlockSize,
) -> Result<Weight<'static>> {
    let [_, groups] = block.scales([size_n, size_k]);
    let bits = |i: usize| scales[i % size_n / block.n * groups + i / size_n].to_bits();
    let bits = (0..groups * size_n).map(bits).collect();
    Ok(Weight {
        name: tensor.name().to_owned(),
        ty: E4M3_TYPE,
        codes: codes(tensor, 8, Shape::new(size_k, size_n))?,
        scales: Table::new(ScalarType::FLOAT32, groups, size_n, TableData::B32(bits))?,
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(block.k)),
        global_scale: None,
        bias: None,
    })
}

/// Gives each block of the weight the scale of another: `from` maps (block of N, group) and the
/// number of both to the block it is taken from.
pub(super) fn move_scales(
    weight: &mut Weight<'_>,
    block: Option<BlockSize>,
    from: impl Fn([usize; 2], [usize; 2]) -> [usize; 2],
) {
    let Some(block) = block else { return };
    let [groups, size_n] = [weight.scales.rows(), weight.scales.cols()];
    let blocks = size_n.div_ceil(block.n);
    let bits = |i: usize| {
        let (g, n) = (i / size_n, i % size_n);
        let [b, g] = from([n / block.n, g], [blocks, groups]);
        weight.scales.bits(g, b * block.n)
    };
    let bits = (0..groups * size_n).map(bits).collect();
    if let Ok(moved) = Table::new(ScalarType::FLOAT32, groups, size_n, TableData::B32(bits)) {
        weight.scales = moved;
    }
}

/// Scales `[rows, groups]` read as if the other axis came first in memory.
pub(super) fn transposed(scales: &[f32], rows: usize) -> Vec<f32> {
    let groups = scales.len() / rows.max(1);
    (0..scales.len()).map(|i| scales[i % groups * rows + i / groups]).collect()
}

/// The schedule of an output whose case declares none.
pub(super) fn default_schedule(dtype: ScalarType) -> Result<Schedule> {
    Schedule::w8a8_fp8_blocks(Fp8BlockKernel::DeepGemm, dtype)
}

/// The schedules of each kernel, and one whose k-tile is half a block.
pub(super) fn block_schedules(dtype: ScalarType) -> Result<Vec<ScheduleChoice>> {
    let mut all = Vec::new();
    for kernel in [Fp8BlockKernel::DeepGemm, Fp8BlockKernel::Triton] {
        all.push(Schedule::w8a8_fp8_blocks(kernel, dtype)?);
    }
    let triton = all[1].clone();
    let group_sum = triton.group_sum.map(|sum| GroupSum { every: Some(64), ..sum });
    all.push(Schedule { group_sum, ..triton });
    Ok(all.into_iter().map(|s| ScheduleChoice::Given(Box::new(s))).collect())
}

/// Random scales: f32, or now and then UE8M0.
pub(super) fn draw_scales(rng: &mut Rng, shape: Vec<usize>) -> Result<Tensor<'static>> {
    if rng.chance(1, 3) {
        let len = shape.iter().product();
        let bytes: Vec<u8> = (0..len).map(|_| rng.between(108, 118) as u8).collect();
        return Tensor::new("", DType::F8E8M0, shape, bytes);
    }
    small(rng, shape)
}

#[cfg(test)]
mod tests {
    use super::are_powers;

    #[test]
    fn every_ue8m0_scale_is_a_power_of_two() {
        let all: Vec<f32> = (-127..=127).map(|e| 2f64.powi(e) as f32).collect();
        assert!(are_powers(&all));
        for other in
            [3.0, 0.75, 1.0 + f32::EPSILON, 1.5 * f32::MIN_POSITIVE, 0.75 * f32::MIN_POSITIVE]
        {
            assert!(!are_powers(&[1.0, other]), "{other:e}");
        }
    }
}
