//! Named schedules: the canonical ones of this project, and those of upstream's kernel.

use super::{
    AccumulatorType, Chunks, GroupScale, GroupSum, MultiplyAdd, Order, Rows, Schedule, Step,
    StepOp, Striped, Stripes, Sum, UnitName, WeightForm, Weights,
};
use crate::num::scalar::ScalarType;
use crate::products::tensor_core::{Architecture, Instruction};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

const F32: ScalarType = ScalarType::FLOAT32;

/// Shortest chunk of a canonical schedule, except the last.
const LEAST_CHUNK: usize = 256;
/// Chunks consist of tiles of this many k.
const CHUNK_STEP: usize = 128;

/// k of each of at most `most` chunks of `size_k`.
pub(super) const fn chunk_length(size_k: usize, most: usize) -> usize {
    let chunk = size_k.div_ceil(most).next_multiple_of(CHUNK_STEP);
    if chunk > LEAST_CHUNK { chunk } else { LEAST_CHUNK }
}

pub(super) fn step(op: StepOp, ty: ScalarType) -> Step {
    Step { op, ty }
}

/// `mma.sync` of Hopper with f32 or int32 sums; `wgmma` has the same arithmetic for 16-bit types
/// and int8.
fn unit(ty: ScalarType) -> UnitName {
    let (accumulator, size_k) = match ty {
        ScalarType::INT8 => (AccumulatorType::Int32, 32),
        ScalarType::FLOAT8_E4M3FN => (AccumulatorType::Float32, 32),
        _ => (AccumulatorType::Float32, 16),
    };
    let (architecture, instruction) = (Architecture::Hopper, Instruction::Mma);
    UnitName { architecture, instruction, a: ty, b: ty, accumulator, size_k }
}

pub(super) fn half(dtype: ScalarType) -> Result<()> {
    if [ScalarType::FLOAT16, ScalarType::BFLOAT16].contains(&dtype) {
        return Ok(());
    }
    Err(Error::unsupported(dtype, "activations are float16 or bfloat16"))
}

impl Schedule {
    /// Largest number of chunks of a canonical schedule.
    pub const CANONICAL_CHUNKS: usize = 8;

    /// k of each chunk of a canonical schedule: a multiple of 128 and at least 256. The last chunk
    /// ends with `size_k`.
    ///
    /// ```
    /// use marlinspike::products::schedule::Schedule;
    /// assert_eq!(Schedule::canonical_chunk(768), 256);
    /// assert_eq!(Schedule::canonical_chunk(14336), 1792);
    /// ```
    pub const fn canonical_chunk(size_k: usize) -> usize {
        chunk_length(size_k, Self::CANONICAL_CHUNKS)
    }

    /// The canonical schedule of a product with `weight` whose output is `dtype` (f16 or bf16) and
    /// whose activations enter the unit as `input` (`dtype` itself, int8 or e4m3fn): a function of
    /// the weight's shape and type alone, never of M.
    ///
    /// Weights are rounded to the type of the activations. k, sorted by group, is cut into at most
    /// eight chunks of equal length (a multiple of 128, at least 256), each one chain of
    /// instructions, added in ascending order in f32: few enough for a prefill kernel to add them
    /// in sequence, enough for a decode kernel to compute in parallel. int8 and e4m3 activations
    /// sum each group separately, with one fused multiply-add to the f32 sum. Scales, bias and
    /// router weight are applied in f32, in this order: activation, channel, global, bias, router
    /// weight; the result is rounded once.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other types.
    pub fn canonical(weight: &Weight<'_>, dtype: ScalarType, input: ScalarType) -> Result<Self> {
        half(dtype)?;
        let eight_bits = input != dtype;
        if eight_bits && ![ScalarType::INT8, ScalarType::FLOAT8_E4M3FN].contains(&input) {
            return Err(Error::unsupported(input, "activations are 16-bit, int8 or float8_e4m3fn"));
        }
        let groups = weight.scales.rows();
        let size = Self::canonical_chunk(weight.shape().size_k);
        let scale = match (groups > 1, input == ScalarType::INT8) {
            (false, _) => GroupScale::One,
            (true, true) => GroupScale::Int16,
            (true, false) => GroupScale::Stored,
        };
        let form = if eight_bits { WeightForm::Unscaled } else { WeightForm::Rounded };
        let mut epilogue = Vec::new();
        if eight_bits {
            epilogue.push(step(StepOp::ActivationScale, F32));
            if groups == 1 {
                epilogue.push(step(StepOp::ChannelScale, F32));
            }
        }
        epilogue.extend(
            [StepOp::GlobalScale, StepOp::Bias, StepOp::RouterWeight].map(|op| step(op, F32)),
        );
        epilogue.push(step(StepOp::Round, dtype));
        Ok(Self {
            unit: unit(input),
            weights: Weights { form, exponent: 0 },
            rows: Rows::ByGroup,
            chunks: Chunks::Size(size),
            stripes: None,
            group_sum: eight_bits.then_some(GroupSum::of(scale, MultiplyAdd::Fused)),
            warp_steps: Vec::new(),
            chunk_steps: Vec::new(),
            leaf_chunks: None,
            chunk_sum: Sum::default(),
            epilogue,
        })
    }

    /// The schedule of vLLM 0.21.0's Marlin kernel for a thread block of `cta`: weights rounded,
    /// the k of a tile shared by warps, warps added by halves, blocks added in f32 from the last k
    /// to the first. It reproduces an H200's outputs of that kernel bit for bit (18 products in the
    /// golden cases). `input` as in [`Schedule::canonical`].
    ///
    /// Column scale and bias of 4-bit weights are one multiply-add, except in some rows and columns
    /// ([`StepOp::ChannelScaleBiasMarlin`]). int8: the integer sums of groups times their int16
    /// scales stay integers modulo 2^32, even if they overflow; the sum of each warp is converted
    /// to f32 and multiplied by the activations' scale before the warps are added.
    ///
    /// e4m3fn: the sum of each group is multiplied by its scale and added in f32 by one fused
    /// multiply-add; the rest is as for int8. The order of sums is assumed to be that of 16-bit
    /// activations; it has not been compared with a GPU.
    ///
    /// `weights.exponent` of NVFP4 in bf16 follows from this matrix's largest scale; of a stack of
    /// experts upstream takes the largest of all.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other types.
    pub fn marlin(
        weight: &Weight<'_>,
        dtype: ScalarType,
        input: ScalarType,
        cta: Cta,
    ) -> Result<Self> {
        half(dtype)?;
        let int8 = input == ScalarType::INT8;
        let fp8 = input == ScalarType::FLOAT8_E4M3FN;
        let narrow = int8 || fp8;
        if !narrow && input != dtype {
            return Err(Error::unsupported(input, "activations are 16-bit, int8 or float8_e4m3fn"));
        }
        let channel_wise = weight.scales.rows() == 1
            && matches!(&weight.groups, Groups::Uniform(g) if !g.is_grouped(weight.shape().k()));
        let eight_bits = weight.codes.bits() == 8;
        let form = if channel_wise || narrow { WeightForm::Unscaled } else { WeightForm::Rounded };
        let mut chunk_steps = Vec::new();
        let mut epilogue = Vec::new();
        let warp_steps = match narrow {
            true => vec![step(StepOp::ActivationScale, F32)],
            false => Vec::new(),
        };
        if channel_wise && (narrow || eight_bits) {
            chunk_steps.push(step(StepOp::ChannelScale, F32));
        }
        if weight.global_scale.is_some() {
            epilogue.push(step(StepOp::GlobalScale, F32));
        }
        epilogue.push(step(StepOp::Round, dtype));
        let op = match channel_wise && !narrow && !eight_bits {
            true => StepOp::ChannelScaleBiasMarlin,
            false => StepOp::Bias,
        };
        epilogue.push(step(op, dtype));
        epilogue.push(step(StepOp::RouterWeight, dtype));
        let sum = Sum { order: Order::Halving, ty: F32 };
        let group_sum = match (int8, fp8 && !channel_wise) {
            (true, _) => {
                let scale = if channel_wise { GroupScale::One } else { GroupScale::Int16 };
                Some(GroupSum::of(scale, MultiplyAdd::Integer))
            }
            (_, true) => Some(GroupSum::of(GroupScale::Stored, MultiplyAdd::Fused)),
            (false, false) => None,
        };
        // 8-bit operands enter unchanged.
        let exponent = if fp8 { 0 } else { exponent(weight, dtype, channel_wise) };
        Ok(Self {
            unit: unit(input),
            weights: Weights { form, exponent },
            rows: Rows::ByGroup,
            chunks: Chunks::Striped(Striped {
                tile: cta.tile_k,
                columns: cta.tile_n,
                run: cta.run,
                rows: cta.rows,
                whole: cta.whole,
            }),
            stripes: Some(Stripes { tile: cta.tile_k, warps: cta.warps_k, sum }),
            group_sum,
            warp_steps,
            chunk_steps,
            leaf_chunks: None,
            chunk_sum: Sum { order: Order::Descending, ty: F32 },
            epilogue,
        })
    }
}

/// The power of two by which upstream scales weights until the channel or global scale: it moves
/// the bits of an 8-bit or 4-bit float into a wider float with another exponent bias. It matters if
/// sums become subnormal.
fn exponent(weight: &Weight<'_>, dtype: ScalarType, channel_wise: bool) -> i32 {
    let half = dtype == ScalarType::FLOAT16;
    match weight.ty {
        ScalarType::FLOAT8_E4M3FN if channel_wise => {
            if half {
                -8
            } else {
                -120
            }
        }
        ScalarType::FLOAT4_E2M1F if weight.global_scale.is_some() => {
            if half {
                return -7;
            }
            // bf16: the scales are multiplied up to just below 448.
            let scales = weight.scales.iter_bits().map(|b| weight.scales.ty().to_f64(b));
            let largest = scales.fold(0.0, f64::max);
            let room = if largest > 0.0 { (448.0 / largest).log2().floor() as i32 } else { 0 };
            -119 + room.clamp(0, 16)
        }
        _ => 0,
    }
}

/// A thread block of upstream's Marlin kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cta {
    /// k of its tile (`thread_k`: 64 or 128; 128 threads for tiles of half the size, else 256).
    pub tile_k: usize,
    /// Columns of its tile (`thread_n`: 64, 128 or 256).
    pub tile_n: usize,
    /// Warps that share the tile's k: threads / 32, over tile_n / 64.
    pub warps_k: usize,
    /// Number of tiles per block (`iters`).
    pub run: usize,
    /// Rows per block; `None`: all.
    pub rows: Option<usize>,
    /// Number of columns of tiles that are not cut, each computed by one block; the rest is dealt
    /// in runs.
    pub whole: usize,
}
