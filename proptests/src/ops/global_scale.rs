//! Block scales with a global scale, NVFP4's, in Marlin's kernels.

use marlinspike::Result;
use marlinspike::case::Case;
use marlinspike::check::add_outputs;
use marlinspike::layouts::marlin::{
    Activations, ScaleLayout, ScalePermutation, e4m3_scale_factor, e4m3_scales, kernel_global_scale,
};
use marlinspike::num::dims::{GroupSize, LogicalK};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Table, TableData};
use proptest::prelude::*;

use super::scales::{SIZES_N, bytes, place};
use super::{dtype, fill, one_of};
use crate::Operation;
use crate::bug::Bug;
use crate::bug::edit::{self, rounded, value};
use crate::mutant::{Mutant, common, mutant, with};

/// `nvfp4_marlin_process_scales`, after the permutation of the columns.
#[derive(Debug)]
pub struct E4m3Scales;

/// Arguments of [`E4m3Scales`].
#[derive(Debug, Clone)]
pub struct E4m3Input {
    /// `[size_k / 16, size_n]` e4m3 bits, not negative.
    pub scales: Vec<u8>,
    /// Rows of the matrix.
    pub size_k: usize,
    /// Columns.
    pub size_n: usize,
    /// Activations.
    pub dtype: ScalarType,
}

/// The order of columns before the reordering in fours.
fn block_layout(size_k: usize, size_n: usize, block: usize) -> Result<ScaleLayout> {
    let order =
        ScalePermutation::choose(GroupSize::Of(block), LogicalK(size_k), Activations::Bits16);
    ScaleLayout::new(size_k / block, size_n, order, ScalarType::FLOAT16)
}

impl Operation for E4m3Scales {
    const NAME: &'static str = "nvfp4_marlin_process_scales";
    type Input = E4m3Input;
    type Element = u8;

    fn inputs() -> BoxedStrategy<E4m3Input> {
        (one_of(&[64usize, 128, 256]), one_of(SIZES_N), dtype(), fill(), one_of(&[0x7eu8, 0x20]))
            .prop_map(|(size_k, size_n, dtype, fill, max)| {
                let scales = fill.bytes(size_k / 16 * size_n, max);
                E4m3Input { scales, size_k, size_n, dtype }
            })
            .boxed()
    }

    fn expected(i: &E4m3Input) -> Result<Vec<u8>> {
        let data = TableData::B8(i.scales.clone());
        let table = Table::new(ScalarType::FLOAT8_E4M3FN, i.size_k / 16, i.size_n, data)?;
        let factor = e4m3_scale_factor(i.scales.iter().copied(), i.dtype);
        e4m3_scales(&table, block_layout(i.size_k, i.size_n, 16)?, factor).map(|t| bytes(&t))
    }

    fn place(i: &E4m3Input, element: usize, _bit: u32) -> String {
        place(block_layout(i.size_k, i.size_n, 16).map(ScaleLayout::with_quads), element)
    }

    fn describe(i: &E4m3Input) -> String {
        format!("size_k {} size_n {} {}", i.size_k, i.size_n, i.dtype)
    }
}

/// `nvfp4_marlin_process_global_scale` of a w13, which has one value for gate and one for up; the
/// kernel gets the first.
#[derive(Debug)]
pub struct GlobalScale;

/// Arguments of [`GlobalScale`].
#[derive(Debug, Clone)]
pub struct GlobalInput {
    /// Gate's global scale in the file.
    pub gate: f32,
    /// Up's global scale in the file.
    pub up: f32,
    /// Whether the file stores the divisor (compressed-tensors) and not the multiplier (ModelOpt).
    pub divisor: bool,
    /// Activations.
    pub dtype: ScalarType,
    /// The factor that went into the block scales.
    pub scale_factor: f32,
}

impl Operation for GlobalScale {
    const NAME: &'static str = "nvfp4_marlin_process_global_scale";
    type Input = GlobalInput;
    type Element = u32;

    fn inputs() -> BoxedStrategy<GlobalInput> {
        let global = || (115u32..136, 0u32..1 << 23).prop_map(|(e, m)| f32::from_bits(e << 23 | m));
        (global(), global(), any::<bool>(), dtype(), 0i32..8)
            .prop_map(|(gate, up, divisor, dtype, power)| {
                let bf16 = dtype == ScalarType::BFLOAT16;
                let scale_factor = if bf16 { (1u32 << power) as f32 } else { 1.0 };
                GlobalInput { gate, up, divisor, dtype, scale_factor }
            })
            .boxed()
    }

    fn expected(i: &GlobalInput) -> Result<Vec<u32>> {
        let multiplier = if i.divisor { 1.0 / i.gate } else { i.gate };
        Ok(vec![kernel_global_scale(multiplier, i.dtype, i.scale_factor).to_bits()])
    }

    fn place(_: &GlobalInput, _element: usize, _bit: u32) -> String {
        "the global scale".to_owned()
    }

    fn describe(i: &GlobalInput) -> String {
        format!("{i:?}")
    }
}

/// Wrong variants of the operations.
pub(crate) fn mutants() -> Vec<Mutant> {
    let mut all = vec![
        mutant::<E4m3Scales>("not reordered in fours", |i| {
            let out = E4m3Scales::expected(i)?;
            Ok(out.chunks_exact(4).flat_map(|q| [q[0], q[2], q[1], q[3]]).collect())
        }),
        mutant::<E4m3Scales>("not shifted: the sign bit kept", |i| {
            Ok(E4m3Scales::expected(i)?.into_iter().map(|b| b >> 1).collect())
        }),
        with::<GlobalScale>("up's global scale for gate", |i| i.gate = i.up),
        with::<GlobalScale>("multiplied where the format divides", |i| i.divisor = false),
        with::<GlobalScale>("divided where the format multiplies", |i| i.divisor = true),
        mutant::<GlobalScale>("scale factor not divided out", |i| {
            let multiplier = if i.divisor { 1.0 / i.gate } else { i.gate };
            Ok(vec![kernel_global_scale(multiplier, i.dtype, 1.0).to_bits()])
        }),
    ];
    all.extend(common::<E4m3Scales>());
    all.extend(common::<GlobalScale>());
    all
}

/// Products on one device, in small shapes.
const SCALED: &str = "checkpoint_format=nvfp4,dtype=bfloat16,tensor_parallel.size=null,\
                      size_k=128,size_n=64|192";
/// Small layers.
const LAYER: &str = "checkpoint_format=nvfp4,input_dtype=null,activation=silu|gelu|gelu_tanh,\
                     hidden_size=128,intermediate_size=64";

/// Bugs of the bank in global scales.
pub(crate) fn bugs() -> Vec<Bug> {
    vec![
        Bug::of_moe(
            9,
            "gate's global scale applied to up",
            "V#54150, V#54974",
            (LAYER, &["gate_up"]),
            &["gate-scale-on-up"],
            |case| {
                let dtype = edit::moe(case)?.quant.dtype;
                add_outputs(case)?;
                // Up's own global scale is 4/3 of gate's.
                edit::output::<u16>(case, "gate_up", |y, shape| {
                    for row in y.chunks_exact_mut(shape[1]) {
                        let up = &mut row[shape[1] / 2..];
                        up.iter_mut().for_each(|b| *b = rounded(dtype, 0.75 * value(dtype, *b)));
                    }
                })
            },
        ),
        Bug::of_linear(
            10,
            "global scale multiplied where the format divides",
            "compressed-tensors NVFP4",
            SCALED,
            &["global-scale-inverted"],
            |case| {
                edit::input::<f32>(case, "weight_global_scale", |scale, _| {
                    scale.iter_mut().for_each(|s| *s = 1.0 / *s);
                })?;
                add_outputs(case)
            },
        ),
        Bug::of_linear(
            19,
            "cast to f16 before the global scale: overflow to infinity",
            "V#37135",
            "checkpoint_format=nvfp4,dtype=float16,tensor_parallel.size=null,has_bias=false,\
             size_k=256,size_n=64",
            &["overflow-before-global-scale", "global-scale-after-rounding"],
            cast_early,
        ),
        Bug::of_moe(
            31,
            "NVFP4 global scale folded into the router weight, so the bias is scaled too",
            "V 0.21.0's Marlin MoE, confirmed",
            (
                "checkpoint_format=nvfp4,input_dtype=null,dtype=float16,has_bias=true,\
                 apply_router_weight_on_input=false,hidden_size=128,intermediate_size=64",
                &["activated", "down"],
            ),
            &["upstream-nvfp4-bias-scaled"],
            bias_scaled,
        ),
    ]
}

/// The product is rounded to f16, then multiplied by the global scale.
fn cast_early(case: &mut Case<'static>) -> Result<()> {
    let dtype = edit::linear(case)?.quant.dtype;
    let global = f64::from(case.input("weight_global_scale")?.elements::<f32>()[0]);
    edit::input::<f32>(case, "weight_global_scale", |scale, _| scale.fill(1.0))?;
    add_outputs(case)?;
    edit::output::<u16>(case, "y", |y, _| {
        y.iter_mut().for_each(|bits| *bits = rounded(dtype, value(dtype, *bits) * global));
    })
}

/// The kernel form of the global scale multiplies the bias, too.
fn bias_scaled(case: &mut Case<'static>) -> Result<()> {
    let dtype = edit::moe(case)?.quant.dtype;
    add_outputs(case)?;
    let global = edit::found(case, "w2_marlin_global_scale")?.elements::<f32>().into_owned();
    edit::input::<u16>(case, "w2_bias", |bias, shape| {
        for (bias, global) in bias.chunks_exact_mut(shape[1]).zip(global) {
            let scale = |b: u16| rounded(dtype, value(dtype, b) * f64::from(global));
            bias.iter_mut().for_each(|b| *b = scale(*b));
        }
    })?;
    add_outputs(case)
}
