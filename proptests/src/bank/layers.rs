//! Bugs of a Mixture-of-Experts layer.

use marlinspike::Result;
use marlinspike::case::Case;
use marlinspike::check::add_outputs;
use serde_json::{Value, json};

use crate::bug::Bug;
use crate::bug::edit::{self, columns, grouped, misread, rounded, single, value};

/// int4 without act-order, in small shapes.
const INT4: &str = "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
                    hidden_size=128,intermediate_size=64";
const WEIGHTED: &str = "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
                        apply_router_weight_on_input=false,top_k=2|3|4,hidden_size=128,\
                        intermediate_size=64";

pub(super) fn bugs() -> Vec<Bug> {
    let mut all = weights();
    all.extend(shapes());
    all.extend(rows());
    all
}

fn weights() -> Vec<Bug> {
    vec![
        Bug::of_moe(
            1,
            "w13 scale permutation chosen with the rank-local intermediate size as K",
            "V#50196",
            (
                "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
                 group_size=128,hidden_size=256,intermediate_size=128",
                &["gate_up"],
            ),
            &["scales-other-permutation"],
            |case| {
                edit::input::<u16>(case, "w13_scales", |scales, shape| {
                    misread(scales, shape[2], single, grouped);
                })?;
                add_outputs(case)
            },
        ),
        Bug::of_moe(
            8,
            "gate and up halves swapped",
            "S#32430",
            (
                "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
                 activation=silu|gelu|gelu_tanh,hidden_size=128,intermediate_size=64",
                &["gate_up"],
            ),
            &["gate-up-swapped"],
            |case| {
                let swap = |n: usize, shape: &[usize]| {
                    let size_n = shape[shape.len() - 1];
                    (n + size_n / 2) % size_n
                };
                edit::input::<u32>(case, "w13_qweight", |words, shape| {
                    columns(words, shape[2], |n| swap(n, shape));
                })?;
                for name in ["w13_scales", "w13_bias"] {
                    edit::input::<u16>(case, name, |values, shape| {
                        columns(values, shape[shape.len() - 1], |n| swap(n, shape));
                    })?;
                }
                add_outputs(case)
            },
        ),
    ]
}

fn shapes() -> Vec<Bug> {
    vec![
        Bug {
            keys: &[("activation", "relu2_no_mul")],
            ..Bug::of_moe(
                11,
                "two w13 shards assumed for a non-gated activation",
                "V#51125",
                (
                    "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
                     hidden_size=128,intermediate_size=128",
                    &["gate_up"],
                ),
                &["two-shards-not-gated"],
                |case| {
                    add_outputs(case)?;
                    edit::output::<u16>(case, "gate_up", |y, shape| {
                        columns(y, shape[1], |n| n % (shape[1] / 2));
                    })
                },
            )
        },
        Bug::of_moe(
            39,
            "gate and up read as interleaved although they are halves",
            "gpt-oss loaders (checkpoints interleave, the operator splits halves)",
            (
                "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
                 activation=silu|gelu|gelu_tanh,hidden_size=128,intermediate_size=64",
                &["gate_up"],
            ),
            &["gate-up-interleaved"],
            |case| {
                add_outputs(case)?;
                edit::output::<u16>(case, "gate_up", |y, shape| {
                    let half = shape[1] / 2;
                    columns(y, shape[1], |n| n / 2 + n % 2 * half);
                })
            },
        ),
        Bug::of_moe(
            48,
            "one expert's scales used for all experts",
            "common in expert loops",
            (INT4, &["gate_up"]),
            &["scales-of-another-expert"],
            |case| {
                edit::input::<u16>(case, "w13_scales", |scales, shape| {
                    let first = scales[..shape[1] * shape[2]].to_vec();
                    scales.chunks_exact_mut(first.len()).for_each(|s| s.copy_from_slice(&first));
                })?;
                add_outputs(case)
            },
        ),
    ]
}

fn rows() -> Vec<Bug> {
    vec![
        Bug::of_moe(
            14,
            "invalid expert id (-1 in expert_map) used as an index",
            "S#12701",
            (
                "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
                 ep_size=2|3|4,hidden_size=128,intermediate_size=64",
                &["gate_up"],
            ),
            &["absent-expert-indexed"],
            absent_indexed,
        ),
        Bug::of_moe(
            24,
            "router weight applied twice",
            "common in fused layers",
            (WEIGHTED, &["activated", "down"]),
            &["router-weight-twice"],
            |case| {
                let dtype = edit::moe(case)?.quant.dtype;
                add_outputs(case)?;
                let weights = edit::found(case, "topk_weights")?.elements::<f32>().into_owned();
                edit::output::<u16>(case, "down", |down, shape| {
                    for (row, weight) in down.chunks_exact_mut(shape[1]).zip(weights) {
                        let again = |b: u16| rounded(dtype, value(dtype, b) * f64::from(weight));
                        row.iter_mut().for_each(|b| *b = again(*b));
                    }
                })
            },
        ),
        Bug::of_moe(
            38,
            "SWIGLUOAI computed as SiLU(gate) · up",
            "a comment in vLLM 0.21.0",
            (
                "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
                 activation=swigluoai,hidden_size=128,intermediate_size=64",
                &["gate_up", "activated"],
            ),
            &[],
            |case| {
                // SiLU without swigluoai's parameters, stated or not.
                let none = |key| (key, Value::Null);
                let stated = ["swiglu_limit", "swiglu_alpha", "swiglu_beta"].map(none);
                edit::keys(case, &[&stated[..], &[("activation", json!("silu"))]].concat())?;
                add_outputs(case)
            },
        ),
        Bug::of_moe(
            51,
            "the last slot is missing from the sum",
            "common in reductions",
            (WEIGHTED, &["down", "y"]),
            &["slot-dropped"],
            |case| {
                let c = edit::moe(case)?;
                add_outputs(case)?;
                let down = edit::found(case, "down")?.elements::<u16>().into_owned();
                let (dtype, top_k, h) = (c.quant.dtype, c.top_k, c.hidden_size);
                edit::output::<u16>(case, "y", |y, _| {
                    for (i, bits) in y.iter_mut().enumerate() {
                        let slot = |j: usize| value(dtype, down[(i / h * top_k + j) * h + i % h]);
                        *bits = rounded(dtype, (0..top_k - 1).map(slot).sum());
                    }
                })
            },
        ),
    ]
}

/// Rows of absent experts are multiplied with the last local expert, which -1 indexes.
fn absent_indexed(case: &mut Case<'static>) -> Result<()> {
    let map = case.input("expert_map")?.elements::<i32>().into_owned();
    let last = map.iter().copied().max().unwrap_or(0);
    add_outputs(case)?;
    let ids = edit::found(case, "topk_ids")?.elements::<i32>().into_owned();
    for absent in (0..map.len()).filter(|&e| map[e] < 0) {
        // The expert's rows, in a layer whose last local expert it is.
        let mut other = case.clone();
        edit::input::<i32>(&mut other, "expert_map", |map, _| {
            map.iter_mut().filter(|e| **e == last).for_each(|e| *e = -1);
            map[absent] = last;
        })?;
        add_outputs(&mut other)?;
        let rows = edit::found(&other, "gate_up")?.elements::<u16>().into_owned();
        edit::output::<u16>(case, "gate_up", |y, shape| {
            let size_n = shape[1];
            for (i, id) in ids.iter().enumerate() {
                if *id as usize == absent {
                    y[i * size_n..][..size_n].copy_from_slice(&rows[i * size_n..][..size_n]);
                }
            }
        })?;
    }
    Ok(())
}
