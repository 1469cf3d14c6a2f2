//! Mutants of whole layers.

use std::cell::Cell;

use marlinspike::Result;
use marlinspike::act_order;
use marlinspike::case::MoeConfig;
use marlinspike::layouts::marlin::{Activations, ScalePermutation};
use marlinspike::moe::Chain;
use marlinspike::moe::activation::Columns;
use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::layer::Arithmetic;
use marlinspike::num::array::FloatView2;
use marlinspike::num::dims::{GroupSize, LogicalK};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Chunks, Order};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

use crate::SubjectError;
use crate::ops::layer::laws::Forward;
use crate::ops::{LayerInput, Local};

/// A wrong implementation of a layer.
pub struct WrongLayer {
    /// What is wrong with it.
    pub name: &'static str,
    /// Configurations in which the mistake changes the result.
    pub shows: fn(&MoeConfig) -> bool,
    /// The implementation.
    pub forward: Box<Forward<'static>>,
}

fn mutant(
    name: &'static str,
    shows: fn(&MoeConfig) -> bool,
    make: impl Fn(&LayerInput) -> Result<Vec<u16>> + 'static,
) -> WrongLayer {
    let forward = move |input: &LayerInput| make(input).map_err(|e| SubjectError(e.to_string()));
    WrongLayer { name, shows, forward: Box::new(forward) }
}

/// The reference on a rank's changed matrices.
fn local(
    name: &'static str,
    shows: fn(&MoeConfig) -> bool,
    change: impl Fn(&LayerInput, &mut Local) -> Result<()> + 'static,
) -> WrongLayer {
    mutant(name, shows, move |input| {
        let mut local = input.local()?;
        change(input, &mut local)?;
        Ok(local.stages(input)?.y.into_bits())
    })
}

/// The reference under another arithmetic.
fn computed(
    name: &'static str,
    change: impl Fn(&LayerInput, &mut Arithmetic) + 'static,
) -> WrongLayer {
    mutant(name, always, move |input| {
        let local = input.local()?;
        let layer = local.layer(input);
        let mut how = layer.canonical()?;
        change(input, &mut how);
        Ok(layer.forward(input.x_view()?, input.routed()?, &how)?.y.into_bits())
    })
}

fn always(_: &MoeConfig) -> bool {
    true
}

fn has_global_scale(c: &MoeConfig) -> bool {
    c.quant.checkpoint_format.has_global_scale()
}

fn has_groups(c: &MoeConfig) -> bool {
    c.quant.group_size != GroupSize::Channel && !has_global_scale(c)
}

fn has_g_idx(c: &MoeConfig) -> bool {
    c.quant.has_act_order()
}

fn has_bias(c: &MoeConfig) -> bool {
    c.quant.has_bias
}

/// Every matrix of a list changed.
fn each(
    weights: &mut [Weight<'static>],
    change: impl Fn(&mut Weight<'static>) -> Result<()>,
) -> Result<()> {
    weights.iter_mut().try_for_each(change)
}

/// The scales that a kernel reads if they were stored in the order for K = `taken`.
fn misread_scales(w: &mut Weight<'static>, taken: usize) -> Result<()> {
    let order = |k| {
        ScalePermutation::choose(w.groups.group_size(), LogicalK(k), Activations::Bits16).columns()
    };
    let (right, wrong) = (order(w.shape().size_k), order(taken));
    if right != wrong {
        // Position p stores column wrong[p]; the kernel reads it as column right[p].
        let at = |order: &[usize], p: usize| p / order.len() * order.len() + order[p % order.len()];
        let mut back = vec![0; 64];
        for p in 0..64 {
            back[at(right, p)] = at(wrong, p);
        }
        w.scales = w.scales.permute_columns(&back)?;
    }
    Ok(())
}

fn swap_nibbles(w: &mut Weight<'static>) -> Result<()> {
    if w.codes.bits() == 4 {
        let codes = w.codes.clone();
        w.codes = Codes::from_fn(4, codes.shape(), |k, n| codes.get(k ^ 1, n))?;
    }
    Ok(())
}

/// `table` with all values doubled, if its type is a 16-bit float.
fn doubled(table: &Table) -> Table {
    let shift = if table.ty() == ScalarType::FLOAT16 { 10 } else { 7 };
    match table.data() {
        TableData::B16(_) => {
            table.map(table.ty(), |b| if b & 0x7fff == 0 { b } else { b + (1 << shift) })
        }
        _ => table.clone(),
    }
}

/// All wrong layers.
pub fn layers() -> Vec<WrongLayer> {
    vec![
        local(
            "w13's scale order chosen with the intermediate size as K",
            |c| {
                let g = GroupSize::Of(c.intermediate_size);
                c.quant.group_size == g && c.hidden_size > c.intermediate_size
            },
            |i, l| {
                let k = i.config.intermediate_size;
                each(&mut l.w13, |w| misread_scales(w, k))
            },
        ),
        local("scale order chosen with the packed K", has_groups, |_, l| {
            each(&mut l.w2, |w| misread_scales(w, w.shape().size_k / w.codes.pack()))
        }),
        mutant("act-order: w2's scales cut along K all the same", has_g_idx, |input| {
            let mut local = input.local()?;
            if let Some(tp) = input.config.quant.tensor_parallel {
                each(&mut local.w2, |w| {
                    let Groups::Indexed { g_idx, .. } = &mut w.groups else { return Ok(()) };
                    let groups = act_order::k_slice(w.scales.rows(), tp.size, tp.rank)?;
                    w.scales = w.scales.slice_rows(groups.clone())?;
                    g_idx.iter_mut().for_each(|g| *g %= groups.len().max(1) as u32);
                    Ok(())
                })?;
            }
            Ok(local.stages(input)?.y.into_bits())
        }),
        mutant(
            "w2's group scales not cut along K",
            |c| has_groups(c) && !c.quant.desc_act,
            |input| {
                let mut local = input.local()?;
                if input.config.quant.tensor_parallel.is_some() && input.config.ep_size == 1 {
                    for (w, whole) in local.w2.iter_mut().zip(&input.w2) {
                        if matches!(w.groups, Groups::Uniform(_)) {
                            w.scales = whole.scales.slice_rows(0..w.scales.rows())?;
                        }
                    }
                }
                Ok(local.stages(input)?.y.into_bits())
            },
        ),
        mutant(
            "tensor parallel: w13 cut in one piece, not in each half",
            |c| c.definition().columns != Columns::Interleaved,
            |input| {
                let mut local = input.local()?;
                if let Some(tp) = input.config.quant.tensor_parallel {
                    for (w, whole) in local.w13.iter_mut().zip(&input.w13) {
                        let columns = act_order::k_slice(whole.shape().size_n, tp.size, tp.rank)?;
                        *w = whole.slice_columns(columns)?;
                    }
                }
                Ok(local.stages(input)?.y.into_bits())
            },
        ),
        mutant("tensor parallel: the bias added on every rank", has_bias, |input| {
            let mut local = input.local()?;
            for (w, whole) in local.w2.iter_mut().zip(&input.w2) {
                w.bias = whole.bias.clone();
            }
            Ok(local.stages(input)?.y.into_bits())
        }),
        mutant("gate and up swapped", always, |input| {
            let local = input.local()?;
            let mut layer = local.layer(input);
            layer.activation.exchanged = layer.activation.is_gated();
            Ok(layer.forward(input.x_view()?, input.routed()?, &layer.canonical()?)?.y.into_bits())
        }),
        local("the first expert's global scale for all", has_global_scale, |_, l| {
            let first = l.w13[0].global_scale;
            each(&mut l.w13, |w| {
                w.global_scale = first;
                Ok(())
            })
        }),
        local("global scale multiplied where the format divides", has_global_scale, |_, l| {
            each(&mut l.w2, |w| {
                w.global_scale = w.global_scale.map(|g| 1.0 / g);
                Ok(())
            })
        }),
        local(
            "even k in the high nibble",
            |c| c.quant.weight_type.size_bits() == 4,
            |_, l| each(&mut l.w13, swap_nibbles),
        ),
        local(
            "zero points off by one",
            |c| c.quant.has_zero_points(),
            |_, l| {
                each(&mut l.w2, |w| {
                    w.zeros = w.zeros.as_ref().map(|z| z.map(z.ty(), |b| b ^ 1));
                    Ok(())
                })
            },
        ),
        local(
            "w2's scales twice as large",
            |c| !has_global_scale(c) && c.quant.checkpoint_format.fixed_group().is_none(),
            |_, l| {
                each(&mut l.w2, |w| {
                    w.scales = doubled(&w.scales);
                    Ok(())
                })
            },
        ),
        mutant(
            "an expert of another rank (-1) used as an index",
            |c| c.num_experts > 1,
            |input| {
                let mut local = input.local()?;
                let last = local.w13.len() as i32 - 1;
                for e in local.expert_map.iter_mut().flatten().filter(|e| **e < 0) {
                    *e = last;
                }
                Ok(local.stages(input)?.y.into_bits())
            },
        ),
        mutant("the sentinel of sorted_token_ids read as the last token", always, sentinel),
        mutant("router weight applied twice", always, |input| {
            let mut input = input.clone();
            input.topk_weights.iter_mut().for_each(|w| *w *= *w);
            Ok(input.local()?.stages(&input)?.y.into_bits())
        }),
        mutant("router weight on the wrong product", always, |input| {
            let local = input.local()?;
            let mut layer = local.layer(input);
            layer.router_weight_on_input ^= true;
            Ok(layer.forward(input.x_view()?, input.routed()?, &layer.canonical()?)?.y.into_bits())
        }),
        mutant(
            "router weights of the neighbouring token",
            |c| c.top_k > 1,
            |input| {
                let mut input = input.clone();
                input.topk_weights.rotate_left(1);
                Ok(input.local()?.stages(&input)?.y.into_bits())
            },
        ),
        local("bias not permuted", has_bias, |_, l| {
            let order: Vec<usize> =
                (0..32).map(|p| 2 * (p % 32 / 8) + [0, 1, 8, 9, 16, 17, 24, 25][p % 8]).collect();
            each(&mut l.w13, |w| {
                w.bias = w.bias.as_ref().map(|b| b.permute_columns(&order)).transpose()?;
                Ok(())
            })
        }),
        mutant("act-order applied to activations and not to weights", has_g_idx, |input| {
            let mut local = input.local()?;
            if let Some(orders) = local.orders[0].clone() {
                for (w, order) in local.w13.iter_mut().zip(orders) {
                    let inverse = act_order::inverse(&order)?;
                    w.codes = w.codes.gather_rows(&inverse)?;
                }
            }
            Ok(local.stages(input)?.y.into_bits())
        }),
        local("act-order forgotten: groups taken in stored order", has_g_idx, |_, l| {
            each(&mut l.w2, |w| {
                let size_k = w.shape().size_k;
                let groups = w.scales.rows();
                if let Groups::Indexed { g_idx, .. } = &mut w.groups {
                    g_idx
                        .iter_mut()
                        .enumerate()
                        .for_each(|(k, g)| *g = (k * groups / size_k) as u32);
                }
                Ok(())
            })?;
            l.orders[1] = crate::ops::layer::stable(&l.w2);
            Ok(())
        }),
        computed(
            "split along K by the number of tokens, added in the output's type",
            |input, how| {
                if input.size_m() > 1 {
                    how.w13.chunks = Chunks::Size(32);
                    how.w13.chunk_sum.ty = input.config.quant.dtype;
                }
            },
        ),
        atomics(),
        mutant(
            "the global scale in the router weight, so the bias is scaled too",
            |c| has_global_scale(c) && has_bias(c),
            |input| {
                let mut local = input.local()?;
                each(&mut local.w2, |w| {
                    let global = w.global_scale;
                    w.bias = w
                        .bias
                        .as_ref()
                        .zip(global)
                        .map(|(b, g)| scaled(b, g))
                        .or_else(|| w.bias.clone());
                    Ok(())
                })?;
                Ok(local.stages(input)?.y.into_bits())
            },
        ),
        mutant("cast to the activation type before the global scale", has_global_scale, early_cast),
        mutant(
            "8-bit activations: a row of zeros gives NaN",
            |c| c.quant.input_dtype.is_some(),
            |input| {
                let mut y = input.local()?.stages(input)?.y.into_bits();
                let h = input.config.hidden_size;
                for (row, x) in y.chunks_mut(h).zip(input.x.chunks(h)) {
                    if input.config.quant.input_dtype.is_some() && x.iter().all(|b| b & 0x7fff == 0)
                    {
                        row.fill(0x7fff);
                    }
                }
                Ok(y)
            },
        ),
        mutant(
            "the last slot left out of the sum",
            |c| c.top_k > 1,
            |input| {
                let mut input = input.clone();
                let top_k = input.config.top_k;
                input.topk_ids.chunks_mut(top_k).for_each(|ids| ids[top_k - 1] = -1);
                Ok(input.local()?.stages(&input)?.y.into_bits())
            },
        ),
        mutant(
            "two experts exchanged",
            |c| c.num_experts > 1,
            |input| {
                let mut input = input.clone();
                for id in input.topk_ids.iter_mut().filter(|id| (0..2).contains(*id)) {
                    *id = (1 - *id).min(input.config.num_experts as i32 - 1);
                }
                Ok(input.local()?.stages(&input)?.y.into_bits())
            },
        ),
        mutant("all zeros", always, |input| Ok(vec![0; input.x.len()])),
        mutant("all NaN", always, |input| Ok(vec![0x7fff; input.x.len()])),
    ]
}

/// The last block of each expert runs to its end, so padding writes the row of the last token.
fn sentinel(input: &LayerInput) -> Result<Vec<u16>> {
    let local = input.local()?;
    let layer = local.layer(input);
    let how = layer.canonical()?;
    let stages = layer.forward(input.x_view()?, input.routed()?, &how)?;
    let mut down = stages.down.into_bits();
    let ids: Vec<i32> = input.topk_ids.iter().map(|&i| if i < 0 { i32::MAX } else { i }).collect();
    let align = Align {
        block_size: 16,
        num_experts: input.config.num_experts,
        expert_map: local.expert_map.as_deref(),
        absent: Absent::Ignore,
    };
    if let Some(run) = align.run(&ids)?.runs.last().filter(|r| r.tokens.len() % 16 != 0) {
        let (h, top_k) = (input.config.hidden_size, input.config.top_k);
        let last = input.size_m() - 1;
        let mut other = input.with_tokens(&[last]);
        other.topk_ids[top_k - 1] = run.expert as i32;
        let made = layer.forward(other.x_view()?, other.routed()?, &how)?;
        let at = down.len() - h;
        down[at..].copy_from_slice(&made.down.bits()[(top_k - 1) * h..]);
    }
    let down = FloatView2::from_rows("down", layer.dtype, layer.hidden_size(), &down)?;
    Ok(layer.sum(down, input.config.top_k, Chain::Canonical)?.into_bits())
}

/// Partial sums added in the order of their arrival, which differs between calls.
fn atomics() -> WrongLayer {
    let calls = Cell::new(0u32);
    mutant("partial sums added in any order", always, move |input| {
        let local = input.local()?;
        let layer = local.layer(input);
        let mut how = layer.canonical()?;
        let order = [Order::Ascending, Order::Descending, Order::Pairwise];
        for schedule in [&mut how.w13, &mut how.w2] {
            schedule.chunks = Chunks::Size(32);
            // As with atomic additions to the output.
            schedule.chunk_sum.ty = layer.dtype;
            schedule.chunk_sum.order = order[calls.get() as usize % 3];
        }
        calls.set(calls.get() + 1);
        Ok(layer.forward(input.x_view()?, input.routed()?, &how)?.y.into_bits())
    })
}

/// A bias times a factor, rounded to its type.
fn scaled(bias: &Table, factor: f32) -> Table {
    let ty = bias.ty();
    bias.map(ty, |b| round(ty, ty.to_f64(b) * f64::from(factor)).into())
}

fn round(ty: ScalarType, x: f64) -> u16 {
    match ty {
        ScalarType::FLOAT16 => marlinspike::num::scalar::f64_to_f16_rne(x),
        _ => marlinspike::num::scalar::f64_to_bf16_rne(x),
    }
}

/// The product of the scaled codes in the 16-bit type, and the global scale after that.
fn early_cast(input: &LayerInput) -> Result<Vec<u16>> {
    let local = input.local()?;
    let layer = local.layer(input);
    let how = layer.canonical()?;
    let ty = layer.dtype;
    let Some(first) = local.w13[0].global_scale else {
        return Ok(layer.forward(input.x_view()?, input.routed()?, &how)?.y.into_bits());
    };
    let mut plain = local.clone();
    each(&mut plain.w13, |w| {
        w.global_scale = None;
        w.bias = None;
        Ok(())
    })?;
    let experts = layer.local_experts(input.routed()?)?;
    let gate_up = plain.layer(input).gate_up(input.x_view()?, input.routed()?, &how.w13)?;
    let mut gate_up = gate_up.into_bits();
    let width = local.w13[0].shape().size_n;
    for (row, expert) in gate_up.chunks_mut(width).zip(experts) {
        let Some(weight) = expert.map(|e| &local.w13[e]) else { continue };
        for (n, bits) in row.iter_mut().enumerate() {
            let global = f64::from(weight.global_scale.unwrap_or(first));
            let bias = weight.bias.as_ref().map_or(0.0, |b| b.value(0, n));
            *bits = round(ty, ty.to_f64((*bits).into()) * global + bias);
        }
    }
    let gate_up = FloatView2::from_rows("gate_up", ty, width, &gate_up)?;
    let activated = layer.activate(gate_up, Chain::Canonical)?;
    let down = layer.down(&activated, input.routed()?, &how.w2)?;
    Ok(layer.sum(&down, input.config.top_k, Chain::Canonical)?.into_bits())
}
