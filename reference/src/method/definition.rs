//! Computes one output at a time, literally by its definition: without blocks, vectors or ranges.

use super::activations::Scales;
use super::block_scaled;
use super::product::{Arithmetic, Product, half_bits};
use super::scheduled::{Plan, plan};
use crate::moe::narrow;
use crate::products::Wide;
use crate::products::schedule::{
    Chunks, FP8_PROMOTION, FP8_UNIT, GroupScale, Rows, Schedule, StepOp, WeightForm,
};
use crate::products::tensor_core::{Operand, Unit};
use crate::weight::{Groups, Weight};
use crate::{Error, Result, act_order};

/// The order of one expert's products, determined once for all of its outputs.
pub(super) enum Order {
    /// No order: sums are exact.
    Exact,
    /// The order of a schedule, over these rows of the weight.
    Scheduled(Box<Schedule>, Vec<u32>),
    /// Group by group.
    Groups,
    /// Integers, then f32.
    Integers,
    /// Fused sums with block scales.
    BlockScaled,
}

impl Order {
    /// The order of `arithmetic` for expert `e`.
    ///
    /// # Errors
    /// As [`Product::compute`].
    pub(super) fn new(product: &Product<'_>, e: usize, arithmetic: Arithmetic) -> Result<Self> {
        if arithmetic == Arithmetic::Exact {
            return Ok(Self::Exact);
        }
        let weight = &product.weights[e];
        Ok(match plan(product, weight, arithmetic)? {
            Plan::Groups => Self::Groups,
            Plan::Integers => Self::Integers,
            Plan::BlockScaled => Self::BlockScaled,
            Plan::Schedule(schedule) => {
                let order = match (schedule.rows, &weight.groups) {
                    (Rows::ByGroup, Groups::Indexed { g_idx, .. }) => act_order::sort(g_idx).perm,
                    _ => (0..product.rows.size_k as u32).collect(),
                };
                Self::Scheduled(schedule, order)
            }
        })
    }

    /// The output of row `m`, expert `e`, column `n`, as bits.
    ///
    /// # Errors
    /// As [`Product::compute`].
    pub(super) fn output(&self, product: &Product<'_>, at: [usize; 3]) -> Result<u16> {
        match self {
            Self::Exact => Ok(exact(product, at)),
            Self::Scheduled(schedule, order) => scheduled(product, schedule, order, at),
            Self::Groups => groups(product, at),
            Self::Integers => Ok(integers(product, at)),
            Self::BlockScaled => Ok(block_scaled::define(product, at)),
        }
    }
}

/// The exact value of a weight without its global scale.
fn weight_value(weight: &Weight<'_>, k: usize, n: usize) -> f64 {
    let group = weight.groups.group_of(k);
    let q = weight.ty.to_f64(weight.codes.get(k, n).into());
    let zero = weight.zeros.as_ref().map_or(0.0, |z| f64::from(z.bits(group, n)));
    (q - zero) * weight.scales.value(group, n)
}

fn exact(product: &Product<'_>, at @ [m, e, n]: [usize; 3]) -> u16 {
    let weight = &product.weights[e];
    let mut sum = Wide::new();
    for k in 0..product.rows.size_k {
        sum.add_product(product.rows.value(m, k), weight_value(weight, k, n));
    }
    let scaled = |sum: &Wide, factor: f32| {
        let mut product = Wide::new();
        sum.add_scaled_to(factor.into(), &mut product);
        product
    };
    let mut sum = scaled(&sum, product.alpha(at));
    if let Some(bias) = &weight.bias {
        sum.add(bias.value(0, n));
    }
    let sum = product.router_weights.map_or(sum.clone(), |r| scaled(&sum, r[m]));
    half_bits(product.dtype, sum.round(product.dtype))
}

/// A chain of instructions over positions of k, starting from zero.
fn chain(unit: &Unit, terms: impl Iterator<Item = (u32, u32)>) -> f32 {
    let decode = |ty, code| Operand::decode(ty, code, unit.through_f16);
    let (a, b): (Vec<_>, Vec<_>) =
        terms.map(|(x, w)| (decode(unit.inputs.0, x), decode(unit.inputs.1, w))).unzip();
    f32::from_bits(unit.dot(&a, &b, 0))
}

fn scheduled(
    product: &Product<'_>,
    schedule: &Schedule,
    order: &[u32],
    [m, e, n]: [usize; 3],
) -> Result<u16> {
    let (rows, weight) = (product.rows, &product.weights[e]);
    let unit = schedule.unit.find()?;
    let chunk = match schedule.chunks {
        Chunks::Whole => rows.size_k,
        Chunks::Size(size) => size,
        _ => return Err(Error::unsupported("striped chunks", "no method's arithmetic has them")),
    };
    let code = |k: usize| {
        let value = match schedule.weights.form {
            WeightForm::Unscaled => weight.ty.to_f64(weight.codes.get(k, n).into()),
            WeightForm::Rounded | WeightForm::Exact => weight_value(weight, k, n),
        };
        unit.inputs.1.encode_rne(value)
    };
    let row = rows.row(m);
    let dot =
        |places: &[u32]| chain(unit, places.iter().map(|&k| (row[k as usize], code(k as usize))));
    let sums = order.chunks(chunk).map(|places| match schedule.group_sum {
        None => dot(places),
        Some(rule) => {
            let same = |a: &u32, b: &u32| {
                weight.groups.group_of(*a as usize) == weight.groups.group_of(*b as usize)
            };
            places.chunk_by(same).fold(0f32, |sum, places| {
                let group = weight.groups.group_of(places[0] as usize);
                let scale = match rule.scale {
                    GroupScale::One => 1.0,
                    _ => weight.scales.value(group, n) as f32,
                };
                dot(places).mul_add(scale, sum)
            })
        }
    });
    let mut value = sums.reduce(|a, b| a + b).unwrap_or(0.0);
    for step in &schedule.epilogue {
        value = match step.op {
            StepOp::ChannelScale => value * weight.scales.value(0, n) as f32,
            StepOp::ActivationScale => value * rows.scale(m, 0),
            StepOp::GlobalScale => value * product.multiplier(e, n).unwrap_or(1.0),
            StepOp::Bias => match &weight.bias {
                Some(bias) => value + bias.value(0, n) as f32,
                None => value,
            },
            StepOp::RouterWeight => value * product.router_weights.map_or(1.0, |r| r[m]),
            StepOp::Round => return Ok(narrow(step.ty, value)),
            _ => return Err(Error::unsupported("a step", "no method's arithmetic has it")),
        };
    }
    Ok(narrow(product.dtype, value))
}

/// The sum without overflow, of which a kernel has the low 32 bits.
fn integers(product: &Product<'_>, [m, e, n]: [usize; 3]) -> u16 {
    let (rows, weight) = (product.rows, &product.weights[e]);
    let sum: i128 = (0..rows.size_k)
        .map(|k| {
            let code = i128::from(rows.row(m)[k] as u8 as i8) - i128::from(rows.zero(m));
            code * i128::from(weight.codes.get(k, n) as i8)
        })
        .sum();
    let bias = weight.bias.as_ref().map_or(0.0, |b| b.value(0, n) as f32);
    let scaled = sum as i32 as f32 * weight.scales.value(0, n) as f32;
    let value = scaled.mul_add(rows.scale(m, 0), bias);
    narrow(product.dtype, product.router_weights.map_or(value, |r| value * r[m]))
}

fn groups(product: &Product<'_>, [m, e, n]: [usize; 3]) -> Result<u16> {
    let (rows, weight) = (product.rows, &product.weights[e]);
    let Scales::Group { values, size } = &rows.scales else {
        return Err(Error::unsupported(
            "rows without groups",
            "both operands have scales in groups",
        ));
    };
    let unit = FP8_UNIT.find()?;
    let of_row = &values[m * (rows.size_k / size)..];
    let mut sum = 0f32;
    for (g, codes) in rows.row(m).chunks(FP8_PROMOTION).enumerate() {
        let weights = (g * FP8_PROMOTION..).map(|k| u32::from(weight.codes.get(k, n)));
        let part = chain(unit, codes.iter().copied().zip(weights));
        sum = part.mul_add(of_row[g] * weight.scales.value(g, n) as f32, sum);
    }
    let bias = weight.bias.as_ref().map_or(0.0, |b| b.value(0, n) as f32);
    let router = product.router_weights.map_or(1.0, |r| r[m]);
    Ok(narrow(product.dtype, (sum + bias) * router))
}
