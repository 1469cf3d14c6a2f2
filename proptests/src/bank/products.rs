//! Bugs of one matrix: its layout, scales, zero points and product.

use marlinspike::act_order;
use marlinspike::case::Case;
use marlinspike::check::add_outputs;
use marlinspike::{Error, Result};

use crate::bug::Bug;
use crate::bug::edit::{self, misread, nibbles, rounded, single, value};

/// int4 without act-order on one device, in small shapes.
const INT4: &str = "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
                    tensor_parallel.size=null,size_k=128,size_n=64|192";

pub(super) fn bugs() -> Vec<Bug> {
    let mut all = parameters();
    all.extend(epilogues());
    all.extend(order());
    all.extend(sums());
    all
}

fn parameters() -> Vec<Bug> {
    vec![Bug::of_linear(
        12,
        "nibble order: even k in the high nibble",
        "the `anamnesis` crate's history",
        INT4,
        &["nibbles-swapped"],
        |case| {
            edit::input::<u32>(case, "qweight", |words, _| {
                words.iter_mut().for_each(|word| *word = nibbles(*word, |i| i ^ 1));
            })?;
            add_outputs(case)
        },
    )]
}

fn epilogues() -> Vec<Bug> {
    vec![
        Bug::of_linear(
            27,
            "bias not permuted",
            "common in ports",
            "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
             tensor_parallel.size=null,has_bias=true,size_k=128,size_n=64|192",
            &["bias-not-permuted"],
            |case| {
                edit::input::<u16>(case, "bias", |bias, shape| {
                    misread(bias, shape[0], |p| p, single);
                })?;
                add_outputs(case)
            },
        ),
        Bug::of_linear(
            49,
            "bias added twice, by two blocks of a split K",
            "common with split K",
            "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
             tensor_parallel.size=null,has_bias=true,size_k=128,size_n=64|192",
            &["bias-twice"],
            |case| {
                let dtype = edit::linear(case)?.quant.dtype;
                edit::input::<u16>(case, "bias", |bias, _| {
                    bias.iter_mut().for_each(|b| *b = rounded(dtype, 2.0 * value(dtype, *b)));
                })?;
                add_outputs(case)
            },
        ),
        Bug {
            outputs: &["marlin_qweight"],
            ..Bug::of_linear(
                50,
                "signed codes instead of biased ones",
                "common in ports",
                INT4,
                &["sign-bit"],
                |case| {
                    add_outputs(case)?;
                    edit::output::<u32>(case, "marlin_qweight", |words, _| {
                        words.iter_mut().for_each(|word| *word ^= 0x8888_8888);
                    })
                },
            )
        },
    ]
}

fn order() -> Vec<Bug> {
    vec![Bug::of_linear(
        28,
        "act-order permutation applied to weights, not to activations",
        "common in ports",
        "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=true,\
         tensor_parallel.size=null,group_size=32|64,size_k=128,size_n=64|192",
        &["act-order-activations-not-permuted"],
        |case| {
            let size_k = edit::linear(case)?.size_k;
            let perm = act_order::sort(&case.input("g_idx")?.elements::<u32>()).perm;
            edit::input::<u16>(case, "x", |x, _| {
                for row in x.chunks_exact_mut(size_k) {
                    let old = row.to_vec();
                    perm.iter().zip(old).for_each(|(&k, x)| row[k as usize] = x);
                }
            })?;
            add_outputs(case)
        },
    )]
}

/// The product without a range of k; an x that does not have it is left as it is.
fn without(case: &mut Case<'static>, range: std::ops::Range<usize>) -> Result<()> {
    edit::input::<u16>(case, "x", |x, shape| {
        for row in x.chunks_exact_mut(shape[1]) {
            if let Some(part) = row.get_mut(range.clone()) {
                part.fill(0);
            }
        }
    })?;
    add_outputs(case)
}

fn sums() -> Vec<Bug> {
    vec![
        Bug::of_linear(
            22,
            "int8 accumulation overflows in a rare sign pattern",
            "candle#1526",
            "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=int8,desc_act=false,\
             group_size=-1,tensor_parallel.size=null,has_bias=false,size_k=128,size_n=64|192",
            &["int8-accumulation-overflow"],
            overflowing,
        ),
        Bug::of_linear(
            23,
            "all zeros or NaN accepted as a match",
            "pygpubench#7, KernelBench#165, \
             flashinfer-bench#429",
            INT4,
            &["all-zeros", "not-finite"],
            |case| {
                add_outputs(case)?;
                edit::output::<u16>(case, "y", |y, shape| {
                    // NaN for an odd number of rows.
                    y.fill(if shape[0] % 2 == 1 { 0x7fff } else { 0 });
                })
            },
        ),
        Bug::of_linear(
            30,
            "activation row of constants or zeros: scale 0, NaN out",
            "common in quantizers",
            INT4,
            &["constant-row-nan"],
            |case| {
                let c = edit::linear(case)?;
                add_outputs(case)?;
                let x = case.input("x")?.elements::<u16>().into_owned();
                edit::output::<u16>(case, "y", |y, _| {
                    for (row, x) in y.chunks_exact_mut(c.size_n).zip(x.chunks_exact(c.size_k)) {
                        if x.iter().all(|bits| *bits == x[0]) {
                            row.fill(0x7fff);
                        }
                    }
                })
            },
        ),
        Bug::of_linear(
            45,
            "a k16 tile is missing",
            "common in pipelines",
            INT4,
            &["k-range-dropped"],
            |case| without(case, 48..64),
        ),
        Bug::of_linear(
            46,
            "the last k is missing",
            "common in loops",
            INT4,
            &["k-dropped"],
            |case| {
                let size_k = edit::linear(case)?.size_k;
                without(case, size_k - 1..size_k)
            },
        ),
        Bug::of_linear(
            47,
            "a row of the output is not written",
            "common at edges of M",
            INT4,
            &["zeros", "all-zeros"],
            |case| {
                add_outputs(case)?;
                edit::output::<u16>(case, "y", |y, shape| {
                    let last = y.len() - shape[1];
                    y[last..].fill(0);
                })
            },
        ),
    ]
}

/// Sums of 64 neighbouring products wrap around in 16 bits: 127 · -8 · 64 does, random codes do not.
fn overflowing(case: &mut Case<'static>) -> Result<()> {
    let c = edit::linear(case)?;
    add_outputs(case)?;
    let absent = || Error::missing("in.a_q", "this bug");
    let a = case.inputs.get("a_q").ok_or_else(absent)?.elements::<i8>().into_owned();
    let words = case.input("qweight")?.elements::<u32>().into_owned();
    let code = |k: usize, n: usize| (words[k / 8 * c.size_n + n] >> (k % 8 * 4) & 15) as i32 - 8;
    let dtype = c.quant.dtype;
    let scales = case.input("scales")?.elements::<u16>().into_owned();
    let rows = case.input("a_scales")?.elements::<f32>().into_owned();
    edit::output::<u16>(case, "y", |y, _| {
        for (i, bits) in y.iter_mut().enumerate() {
            let (m, n) = (i / c.size_n, i % c.size_n);
            let products = (0..c.size_k).map(|k| i32::from(a[m * c.size_k + k]) * code(k, n));
            let products: Vec<i32> = products.collect();
            let right: i32 = products.iter().sum();
            let run = |run: &[i32]| run.iter().fold(0i16, |sum, p| sum.wrapping_add(*p as i16));
            let sum: i32 = products.chunks(64).map(|part| i32::from(run(part))).sum();
            if sum != right {
                let scale = f64::from(rows[m]) * value(dtype, scales[n]);
                *bits = rounded(dtype, f64::from(sum) * scale);
            }
        }
    })
}
