//! The table of matrix units.

use serde::{Deserialize, Serialize};

use crate::num::scalar::ScalarType;

/// GPU generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Architecture {
    /// sm_70.
    Volta,
    /// sm_75.
    Turing,
    /// sm_80, sm_86.
    Ampere,
    /// sm_89.
    Ada,
    /// sm_90.
    Hopper,
    /// sm_100.
    Blackwell,
    /// sm_120.
    RtxBlackwell,
}

/// The instruction family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Instruction {
    /// `mma.sync`: one warp.
    Mma,
    /// `wgmma.mma_async`: four warps.
    Wgmma,
    /// `tcgen05.mma`: one thread for a whole block.
    Tcgen05,
}

/// Type and rounding of the accumulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Accumulator {
    /// f32, the sum truncated to `kept_bits` significant bits.
    F32 {
        /// At most 24.
        kept_bits: u32,
    },
    /// f16, the sum rounded to nearest even.
    F16,
    /// int32, exact modulo 2^32.
    S32,
}

/// How an instruction's k is split into fused sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KSplit {
    /// One sum.
    Whole,
    /// Sums of this many consecutive k, ascending.
    Blocks(usize),
    /// Two sums: the k with k mod 4 in {0, 1}, then those with k mod 4 in {2, 3}. The unit
    /// unpacks each register of four 8-bit floats to two registers of f16 and multiplies the low
    /// ones first.
    Pairs,
}

/// One row: an instruction on an architecture, and how it computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// Generation.
    pub architecture: Architecture,
    /// Instruction family.
    pub instruction: Instruction,
    /// Types of `a` and `b`; tf32 is written as float32.
    pub inputs: (ScalarType, ScalarType),
    /// Type and rounding of `c` and `d`.
    pub accumulator: Accumulator,
    /// k of the instruction.
    pub size_k: usize,
    /// How k is split.
    pub split: KSplit,
    /// F: fraction bits kept below the largest exponent.
    pub fraction_bits: i32,
    /// Whether 8-bit floats are converted to f16 before they are multiplied.
    pub through_f16: bool,
    /// Whether the products are summed from zero, and the accumulator is added to the result with
    /// another rounding (to nearest even).
    pub adds_accumulator_last: bool,
    /// Evidence for the row.
    pub evidence: &'static str,
}

const F16: ScalarType = ScalarType::FLOAT16;
const BF16: ScalarType = ScalarType::BFLOAT16;
const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const E5M2: ScalarType = ScalarType::FLOAT8_E5M2;
const F32: Accumulator = Accumulator::F32 { kept_bits: 24 };

const MEASURED: &str = "measured on an H200: scripts/probe, golden tiles";
pub(super) const REPORTED: &str = "reported by MMA-Sim (arXiv 2511.10909), not measured here";

const DEFINED: &str = "defined: integer sums are exact (PTX ISA)";

/// A float row of one sum.
const fn float(
    architecture: Architecture,
    instruction: Instruction,
    ty: ScalarType,
    accumulator: Accumulator,
    size_k: usize,
    fraction_bits: i32,
) -> Unit {
    Unit {
        architecture,
        instruction,
        inputs: (ty, ty),
        accumulator,
        size_k,
        split: KSplit::Whole,
        fraction_bits,
        through_f16: false,
        adds_accumulator_last: false,
        evidence: MEASURED,
    }
}

const fn hopper(
    instruction: Instruction,
    ty: ScalarType,
    accumulator: Accumulator,
    size_k: usize,
    fraction_bits: i32,
) -> Unit {
    float(Architecture::Hopper, instruction, ty, accumulator, size_k, fraction_bits)
}

/// `mma.sync` with 8-bit floats on Hopper: two f16 sums from zero, then the accumulator.
const fn hopper_mma_fp8(a: ScalarType, b: ScalarType, accumulator: Accumulator) -> Unit {
    Unit {
        inputs: (a, b),
        split: KSplit::Pairs,
        through_f16: true,
        adds_accumulator_last: true,
        ..hopper(Instruction::Mma, a, accumulator, 32, 25)
    }
}

const fn int8(architecture: Architecture, instruction: Instruction) -> Unit {
    float(architecture, instruction, ScalarType::INT8, Accumulator::S32, 32, 0)
}

const fn reported(unit: Unit, split: KSplit) -> Unit {
    Unit { split, evidence: REPORTED, ..unit }
}

use Architecture::{Ada, Ampere, Blackwell, Hopper, RtxBlackwell, Turing, Volta};
use Instruction::{Mma, Tcgen05, Wgmma};

/// A row that was not measured here.
const fn unmeasured(
    architecture: Architecture,
    instruction: Instruction,
    inputs: (ScalarType, ScalarType),
    accumulator: Accumulator,
    size_k: usize,
    fraction_bits: i32,
) -> Unit {
    let unit = float(architecture, instruction, inputs.0, accumulator, size_k, fraction_bits);
    reported(Unit { inputs, ..unit }, KSplit::Whole)
}

/// Ampere and Ada: sums over 16 bytes of k.
const fn ampere(
    architecture: Architecture,
    ty: ScalarType,
    accumulator: Accumulator,
    size_k: usize,
) -> Unit {
    let per_sum = 128 / ty.storage_bits() as usize;
    let split = if size_k > per_sum { KSplit::Blocks(per_sum) } else { KSplit::Whole };
    reported(float(architecture, Mma, ty, accumulator, size_k, 24), split)
}

/// Ada's 8-bit floats: two sums of 16, 14 significant bits.
const fn ada_fp8(a: ScalarType, b: ScalarType, accumulator: Accumulator) -> Unit {
    reported(unmeasured(Ada, Mma, (a, b), accumulator, 32, 13), KSplit::Blocks(16))
}

const F32_14: Accumulator = Accumulator::F32 { kept_bits: 14 };
const TF32: ScalarType = ScalarType::FLOAT32;

/// Every unit whose arithmetic is known.
pub const UNITS: &[Unit] = &[
    // Hopper, mma.sync.
    hopper(Mma, F16, F32, 16, 25),
    hopper(Mma, F16, F32, 8, 25),
    hopper(Mma, BF16, F32, 16, 25),
    hopper(Mma, ScalarType::FLOAT32, F32, 8, 25),
    hopper(Mma, F16, Accumulator::F16, 16, 25),
    hopper_mma_fp8(E4M3, E4M3, F32),
    hopper_mma_fp8(E5M2, E5M2, F32),
    hopper_mma_fp8(E4M3, E5M2, F32),
    hopper_mma_fp8(E4M3, E4M3, Accumulator::F16),
    hopper_mma_fp8(E5M2, E5M2, Accumulator::F16),
    int8(Hopper, Mma),
    // Hopper, wgmma.
    hopper(Wgmma, F16, F32, 16, 25),
    hopper(Wgmma, BF16, F32, 16, 25),
    hopper(Wgmma, F16, Accumulator::F16, 16, 25),
    hopper(Wgmma, E4M3, Accumulator::F32 { kept_bits: 14 }, 32, 13),
    hopper(Wgmma, E5M2, Accumulator::F32 { kept_bits: 14 }, 32, 13),
    hopper(Wgmma, E4M3, Accumulator::F16, 32, 13),
    hopper(Wgmma, E5M2, Accumulator::F16, 32, 13),
    int8(Hopper, Wgmma),
    // Hopper, not measured here.
    unmeasured(Hopper, Wgmma, (TF32, TF32), F32, 8, 25),
    unmeasured(Hopper, Wgmma, (E4M3, E5M2), F32_14, 32, 13),
    // Volta and Turing.
    unmeasured(Volta, Mma, (F16, F16), F32, 4, 23),
    unmeasured(Volta, Mma, (F16, F16), Accumulator::F16, 4, 23),
    unmeasured(Turing, Mma, (F16, F16), F32, 8, 24),
    unmeasured(Turing, Mma, (F16, F16), Accumulator::F16, 8, 24),
    // Ampere and Ada.
    ampere(Ampere, F16, F32, 16),
    ampere(Ampere, F16, F32, 8),
    ampere(Ampere, F16, Accumulator::F16, 16),
    ampere(Ampere, F16, Accumulator::F16, 8),
    ampere(Ampere, BF16, F32, 16),
    ampere(Ampere, BF16, F32, 8),
    ampere(Ampere, TF32, F32, 8),
    ampere(Ampere, TF32, F32, 4),
    Unit { evidence: DEFINED, ..int8(Ampere, Mma) },
    ampere(Ada, F16, F32, 16),
    ampere(Ada, F16, F32, 8),
    ampere(Ada, F16, Accumulator::F16, 16),
    ampere(Ada, F16, Accumulator::F16, 8),
    ampere(Ada, BF16, F32, 16),
    ampere(Ada, BF16, F32, 8),
    ampere(Ada, TF32, F32, 8),
    ampere(Ada, TF32, F32, 4),
    Unit { evidence: DEFINED, ..int8(Ada, Mma) },
    ada_fp8(E4M3, E4M3, F32_14),
    ada_fp8(E4M3, E4M3, Accumulator::F16),
    ada_fp8(E5M2, E5M2, F32_14),
    ada_fp8(E5M2, E5M2, Accumulator::F16),
    ada_fp8(E4M3, E5M2, F32_14),
    ada_fp8(E4M3, E5M2, Accumulator::F16),
    // mma.sync of Blackwell.
    unmeasured(Blackwell, Mma, (F16, F16), F32, 16, 25),
    unmeasured(Blackwell, Mma, (F16, F16), Accumulator::F16, 16, 25),
    unmeasured(Blackwell, Mma, (BF16, BF16), F32, 16, 25),
    unmeasured(Blackwell, Mma, (TF32, TF32), F32, 8, 25),
    unmeasured(Blackwell, Mma, (E4M3, E4M3), F32, 32, 25),
    unmeasured(Blackwell, Mma, (E5M2, E5M2), F32, 32, 25),
    unmeasured(Blackwell, Mma, (E4M3, E5M2), F32, 32, 25),
    // tcgen05 of Blackwell.
    unmeasured(Blackwell, Tcgen05, (F16, F16), F32, 16, 25),
    unmeasured(Blackwell, Tcgen05, (F16, F16), Accumulator::F16, 16, 25),
    unmeasured(Blackwell, Tcgen05, (BF16, BF16), F32, 16, 25),
    unmeasured(Blackwell, Tcgen05, (TF32, TF32), F32, 8, 25),
    unmeasured(Blackwell, Tcgen05, (E4M3, E4M3), F32, 32, 25),
    unmeasured(Blackwell, Tcgen05, (E5M2, E5M2), F32, 32, 25),
    unmeasured(Blackwell, Tcgen05, (E4M3, E5M2), F32, 32, 25),
    // mma.sync of RtxBlackwell.
    unmeasured(RtxBlackwell, Mma, (F16, F16), F32, 16, 25),
    unmeasured(RtxBlackwell, Mma, (F16, F16), Accumulator::F16, 16, 25),
    unmeasured(RtxBlackwell, Mma, (BF16, BF16), F32, 16, 25),
    unmeasured(RtxBlackwell, Mma, (TF32, TF32), F32, 8, 25),
    unmeasured(RtxBlackwell, Mma, (E4M3, E4M3), F32, 32, 25),
    unmeasured(RtxBlackwell, Mma, (E5M2, E5M2), F32, 32, 25),
    unmeasured(RtxBlackwell, Mma, (E4M3, E5M2), F32, 32, 25),
];

/// The row of an instruction: architecture, family, input types, accumulator type and k.
pub fn find(
    architecture: Architecture,
    instruction: Instruction,
    inputs: (ScalarType, ScalarType),
    accumulator: ScalarType,
    size_k: usize,
) -> Option<&'static Unit> {
    UNITS.iter().find(|u| {
        let ty = match u.accumulator {
            Accumulator::F32 { .. } => ScalarType::FLOAT32,
            Accumulator::F16 => ScalarType::FLOAT16,
            Accumulator::S32 => {
                return u.architecture == architecture
                    && u.instruction == instruction
                    && u.inputs == inputs
                    && u.size_k == size_k;
            }
        };
        (u.architecture, u.instruction, u.inputs, u.size_k)
            == (architecture, instruction, inputs, size_k)
            && ty == accumulator
    })
}
