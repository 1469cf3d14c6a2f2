//! Known schedules of kernels, for outputs whose case declares none.

use super::{
    Chunks, FP8_PROMOTION, FP8_UNIT, Fp8BlockKernel, Fp8Kernel, GroupSum, MultiplyAdd, Order,
    Related, Schedule, StepOp, Sum, UnitName,
};
use crate::num::scalar::ScalarType;
use crate::products::tensor_core::{Architecture, Instruction};
use crate::weight::Weight;

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// Largest number of split-K parts.
pub(crate) const MOST_PARTS: usize = 16;
/// k of the tiles that form parts.
pub(crate) const SPLIT_TILES: [usize; 3] = [128, 64, 256];
/// k after which a sum is promoted to f32.
pub(crate) const PROMOTIONS: [usize; 3] = [FP8_PROMOTION, 64, 32];

/// Every known schedule of a product with one of `weights` (a matrix, or a stack of experts),
/// activations of type `input` in the unit and output `dtype`, each with a description; likely ones
/// first. The caller compares them with the output.
pub fn known_schedules(
    weights: &[Weight<'_>],
    dtype: ScalarType,
    input: ScalarType,
) -> Vec<(String, Schedule)> {
    let Some(weight) = weights.first() else { return Vec::new() };
    let mut known = Vec::new();
    if (input, weight.ty) == (E4M3, E4M3) {
        match weight.scales.rows() {
            1 => known.extend(w8a8(weight, dtype)),
            _ => known.extend(w8a8_blocks(dtype)),
        }
    }
    known.extend(canonical(weight, dtype, input));
    for Related { text, schedule, .. } in Schedule::upstream(weight, dtype, input) {
        let text = text.trim_start_matches(COMPUTED);
        if input != E4M3 {
            known.push((format!("upstream's Marlin kernel, {text}"), schedule));
            continue;
        }
        for unit in fp8_mma() {
            let name = format!("upstream's Marlin kernel, {text}, on {}", describe(&unit));
            known.push((name, Schedule { unit, ..schedule.clone() }));
        }
    }
    known
}

/// The first words of the text of [`Schedule::upstream`].
const COMPUTED: &str = "upstream's Marlin kernel computed it: ";

/// `mma.sync` with e4m3; Blackwell's arithmetic is that of every later unit.
fn fp8_mma() -> [UnitName; 3] {
    [Architecture::Ada, Architecture::Hopper, Architecture::RtxBlackwell]
        .map(|architecture| UnitName { architecture, instruction: Instruction::Mma, ..FP8_UNIT })
}

fn describe(unit: &UnitName) -> String {
    let instruction = match unit.instruction {
        Instruction::Mma => "mma.sync",
        Instruction::Wgmma => "wgmma",
        Instruction::Tcgen05 => "tcgen05",
    };
    format!("{instruction} of {:?}", unit.architecture)
}

/// The canonical schedule, for each unit of 8-bit floats.
fn canonical(weight: &Weight<'_>, dtype: ScalarType, input: ScalarType) -> Vec<(String, Schedule)> {
    let Ok(schedule) = Schedule::canonical(weight, dtype, input) else { return Vec::new() };
    let mut all = vec![("the canonical schedule".to_owned(), schedule.clone())];
    if input != E4M3 {
        return all;
    }
    let whole = Schedule { chunks: Chunks::Whole, ..schedule.clone() };
    for unit in std::iter::once(FP8_UNIT).chain(fp8_mma()) {
        let unit_name = describe(&unit);
        all.push((
            format!("the canonical schedule on {unit_name}"),
            Schedule { unit, ..schedule.clone() },
        ));
        all.push((format!("one chain over k on {unit_name}"), Schedule { unit, ..whole.clone() }));
        // The scales of several groups already cut the sums.
        if weight.scales.rows() == 1 {
            for n in PROMOTIONS {
                let chunks = Chunks::Size(n);
                let name = format!("one chain over k on {unit_name}, promoted to f32 every {n} k");
                all.push((name, Schedule { unit, chunks, ..whole.clone() }));
            }
        }
    }
    all
}

/// Products of two e4m3 operands with scales after the sum.
fn w8a8(weight: &Weight<'_>, dtype: ScalarType) -> Vec<(String, Schedule)> {
    let mut all = Vec::new();
    let mut cuts = vec![(String::new(), Chunks::Whole)];
    for n in PROMOTIONS {
        cuts.push((format!(", promoted to f32 every {n} k"), Chunks::Size(n)));
    }
    let size_k = weight.shape().size_k;
    let mut lengths = Vec::new();
    for parts in 2..=MOST_PARTS {
        for tile in SPLIT_TILES {
            let length = size_k.div_ceil(tile).div_ceil(parts) * tile;
            if length < size_k && !lengths.contains(&length) && !PROMOTIONS.contains(&length) {
                lengths.push(length);
                cuts.push((format!(", in parts of {length} k"), Chunks::Size(length)));
            }
        }
    }
    let orders = [Order::Ascending, Order::Descending, Order::Pairwise];
    for unit in std::iter::once(FP8_UNIT).chain(fp8_mma()) {
        for (cut, chunks) in &cuts {
            for (epilogue, base) in epilogues(weight, dtype) {
                for order in orders {
                    let parts = match chunks {
                        Chunks::Size(n) => size_k.div_ceil(*n),
                        _ => 1,
                    };
                    // Two parts have only one order, and promotions are added in ascending order.
                    if order != Order::Ascending && (parts < 3 || cut.contains("promoted")) {
                        continue;
                    }
                    let added = match order {
                        Order::Ascending => "",
                        Order::Descending => " added from the last to the first",
                        _ => " added in pairs",
                    };
                    let unit_name = describe(&unit);
                    let name = format!("{epilogue}, {unit_name}, k ascending{cut}{added}");
                    let chunk_sum = Sum { order, ty: ScalarType::FLOAT32 };
                    let chunks = chunks.clone();
                    all.push((name, Schedule { unit, chunks, chunk_sum, ..base.clone() }));
                }
            }
        }
    }
    all
}

/// Products of two e4m3 operands with scales of both for each group of k.
fn w8a8_blocks(dtype: ScalarType) -> Vec<(String, Schedule)> {
    let kernels = [
        ("DeepGEMM's and CUTLASS's promotion", Fp8BlockKernel::DeepGemm),
        ("Triton's promotion", Fp8BlockKernel::Triton),
    ];
    let mut all = Vec::new();
    for unit in std::iter::once(FP8_UNIT).chain(fp8_mma()) {
        for (kernel, which) in kernels {
            let Ok(schedule) = Schedule::w8a8_fp8_blocks(which, dtype) else { continue };
            for every in PROMOTIONS {
                for multiply_add in [MultiplyAdd::Fused, MultiplyAdd::Separate] {
                    let rounded = match multiply_add {
                        MultiplyAdd::Fused => "",
                        _ => " with the product rounded apart",
                    };
                    let unit_name = describe(&unit);
                    let name = format!("{kernel} every {every} k{rounded}, {unit_name}");
                    let every = (every != FP8_PROMOTION).then_some(every);
                    let group_sum =
                        schedule.group_sum.map(|sum| GroupSum { multiply_add, every, ..sum });
                    all.push((name, Schedule { unit, group_sum, ..schedule.clone() }));
                }
            }
        }
    }
    all
}

/// The epilogues of upstream's kernels; with a bias, CUTLASS's also with two roundings.
fn epilogues(weight: &Weight<'_>, dtype: ScalarType) -> Vec<(&'static str, Schedule)> {
    let kernels =
        [("CUTLASS's epilogue", Fp8Kernel::Cutlass), ("Triton's epilogue", Fp8Kernel::Triton)];
    let mut all: Vec<_> = kernels
        .into_iter()
        .filter_map(|(name, kernel)| Some((name, Schedule::w8a8_fp8(kernel, dtype, false).ok()?)))
        .collect();
    if weight.bias.is_some()
        && let Some((_, schedule)) = all.first()
    {
        let mut apart = schedule.clone();
        if let Some(i) = apart.epilogue.iter().position(|s| s.op == StepOp::ActivationScaleBias) {
            let step = apart.epilogue[i];
            apart.epilogue[i].op = StepOp::ActivationScale;
            apart.epilogue.insert(i + 1, super::Step { op: StepOp::Bias, ..step });
            all.push(("CUTLASS's epilogue with the bias rounded apart", apart));
        }
    }
    all
}
