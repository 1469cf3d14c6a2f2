//! Bugs in what one format alone has: AWQ's order and zero points, scales of blocks, global scales.

use marlinspike::Result;
use marlinspike::case::Case;
use marlinspike::check::add_outputs;

use super::edit::{self, nibbles, rounded, value};
use super::products::bug;
use super::{Bug, layers};

/// Nibble i of an AWQ word holds column `AWQ[i]` of its eight.
const AWQ: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

const ZEROS: &str = "checkpoint_format=awq,weight_type=uint4,input_dtype=null,\
                     tensor_parallel.size=null,size_k=128,size_n=64|192";
const SCALED: &str = "checkpoint_format=nvfp4,dtype=bfloat16,tensor_parallel.size=null,\
                      size_k=128,size_n=64|192";
const NVFP4_LAYER: &str = "checkpoint_format=nvfp4,input_dtype=null,activation=silu|gelu|gelu_tanh,\
                     hidden_size=128,intermediate_size=64";

pub(super) fn bugs() -> Vec<Bug> {
    [awq(), blocks(), global_scales()].concat()
}

fn awq() -> Vec<Bug> {
    vec![
        bug(
            7,
            "GPTQ v2 zeros read as v1 (off by one)",
            "V#26092, V#38966",
            ZEROS,
            &["zero-off-by-one"],
            |case| {
                let next = |word: u32| {
                    (0..8).fold(0, |w, i| w | (((word >> (4 * i)) + 1) & 15) << (4 * i))
                };
                edit::input::<u32>(case, "qzeros", |zeros, _| {
                    zeros.iter_mut().for_each(|word| *word = next(*word));
                })?;
                add_outputs(case)
            },
        ),
        bug(
            13,
            "AWQ interleave undone with the permutation instead of its inverse",
            "common in ports",
            ZEROS,
            &["awq-interleave-inverted", "interleave-inverted"],
            |case| {
                // Column c is taken from nibble AWQ[c]; it is nibble i with AWQ[i] = c.
                let from = |i: usize| AWQ[AWQ[i]];
                edit::input::<u32>(case, "qweight", |words, _| {
                    words.iter_mut().for_each(|word| *word = nibbles(*word, from));
                })?;
                add_outputs(case)
            },
        ),
        bug(
            44,
            "zero points not subtracted",
            "common in ports",
            ZEROS,
            &["zeros-missing"],
            |case| {
                edit::input::<u32>(case, "qzeros", |zeros, _| zeros.fill(0))?;
                add_outputs(case)
            },
        ),
    ]
}

fn blocks() -> Vec<Bug> {
    vec![bug(
        16,
        "padded e8m0 bytes reach the product",
        "TransformerEngine#3070",
        "checkpoint_format=mxfp8,dtype=bfloat16,tensor_parallel.size=null,size_k=128,\
             size_n=64|192",
        &["padded-scale-bytes"],
        |case| {
            edit::input::<u8>(case, "weight_scale", |scales, shape| {
                let groups = shape[1];
                scales.chunks_exact_mut(groups).for_each(|row| row[groups / 2..].fill(0));
            })?;
            add_outputs(case)
        },
    )]
}

fn global_scales() -> Vec<Bug> {
    vec![
        layers::bug(
            9,
            "gate's global scale applied to up",
            "V#54150, V#54974",
            (NVFP4_LAYER, &["gate_up"]),
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
        bug(
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
        bug(
            19,
            "cast to f16 before the global scale: overflow to infinity",
            "V#37135",
            "checkpoint_format=nvfp4,dtype=float16,tensor_parallel.size=null,has_bias=false,\
             size_k=256,size_n=64",
            &["overflow-before-global-scale", "global-scale-after-rounding"],
            cast_early,
        ),
        layers::bug(
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
