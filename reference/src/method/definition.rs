//! Computes each output literally by its definition: without blocks, vectors or ranges. The numbers of a
//! row or a column are decoded once for all of its outputs.

use std::ops::Range;

use super::activations::Scales;
use super::block_scaled;
use super::product::{Arithmetic, Product, half_bits};
use super::scheduled::{Plan, plan};
use crate::moe::narrow;
use crate::num::scalar::ScalarType;
use crate::products::Wide;
use crate::products::schedule::{
    Chunks, FP8_PROMOTION, FP8_UNIT, GroupScale, Rows, Schedule, StepOp, WeightForm,
};
use crate::products::tensor_core::{Operand, Unit};
use crate::weight::Groups;
use crate::{Error, Result, act_order};

/// The rows of one expert and the order of their products.
pub(super) struct Expert<'p> {
    product: &'p Product<'p>,
    e: usize,
    /// The expert's rows.
    rows: Vec<usize>,
    /// The value of each code of the weight.
    values: Vec<f64>,
    order: Order,
}

enum Order {
    /// No order: sums are exact. The values of each row.
    Exact(Vec<Vec<f64>>),
    /// The order of a schedule.
    Scheduled(Box<Scheduled>),
    /// Group by group. The decoded codes of each row.
    Groups(Vec<Vec<Operand>>),
    /// Integers, then f32.
    Integers,
    /// Fused sums with block scales.
    BlockScaled,
}

struct Scheduled {
    schedule: Schedule,
    unit: &'static Unit,
    /// The k in the order of the schedule.
    order: Vec<usize>,
    /// Positions in `order` that are summed separately: by chunk, then by group where groups have their own
    /// sums.
    chunks: Vec<Vec<Range<usize>>>,
    /// The decoded codes of each row, in that order.
    rows: Vec<Vec<Operand>>,
}

impl<'p> Expert<'p> {
    /// The rows of expert `e` under `arithmetic`.
    ///
    /// # Errors
    /// As [`Product::compute`].
    pub(super) fn new(product: &'p Product<'p>, e: usize, arithmetic: Arithmetic) -> Result<Self> {
        let weight = &product.weights[e];
        let size_k = product.rows.size_k;
        let rows: Vec<usize> =
            (0..product.expert_of.len()).filter(|&m| product.expert_of[m] == Some(e)).collect();
        let of_rows = |one: &dyn Fn(usize, usize) -> Operand, order: &[usize]| {
            let row = |&m: &usize| order.iter().map(|&k| one(m, k)).collect();
            rows.iter().map(row).collect::<Vec<Vec<Operand>>>()
        };
        let code = |m: usize, k: usize| product.rows.row(m)[k];
        let order = if arithmetic == Arithmetic::Exact {
            let row = |&m: &usize| (0..size_k).map(|k| product.rows.value(m, k)).collect();
            Order::Exact(rows.iter().map(row).collect())
        } else {
            match plan(product, weight, arithmetic)? {
                Plan::Groups => {
                    let unit = FP8_UNIT.find()?;
                    let k: Vec<usize> = (0..size_k).collect();
                    Order::Groups(of_rows(&|m, k| decode(unit, unit.inputs.0, code(m, k)), &k))
                }
                Plan::Integers => Order::Integers,
                Plan::BlockScaled => Order::BlockScaled,
                Plan::Schedule(schedule) => {
                    let unit = schedule.unit.find()?;
                    let order: Vec<usize> = match (schedule.rows, &weight.groups) {
                        (Rows::ByGroup, Groups::Indexed { g_idx, .. }) => {
                            act_order::sort(g_idx).perm.iter().map(|&k| k as usize).collect()
                        }
                        _ => (0..size_k).collect(),
                    };
                    let chunks = chunks(&schedule, &order, &weight.groups)?;
                    let rows = of_rows(&|m, k| decode(unit, unit.inputs.0, code(m, k)), &order);
                    let schedule = *schedule;
                    Order::Scheduled(Box::new(Scheduled { schedule, unit, order, chunks, rows }))
                }
            }
        };
        let values = (0..1 << weight.codes.bits()).map(|c| weight.ty.to_f64(c)).collect();
        Ok(Self { product, e, rows, values, order })
    }

    /// The expert's rows.
    pub(super) fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// The outputs of column `n` for each of [`Self::rows`], as bits.
    ///
    /// # Errors
    /// As [`Product::compute`].
    pub(super) fn column(&self, n: usize) -> Result<Vec<u16>> {
        let each = |one: &dyn Fn([usize; 3]) -> u16| {
            Ok(self.rows.iter().map(|&m| one([m, self.e, n])).collect())
        };
        match &self.order {
            Order::Exact(rows) => {
                let column = self.scaled(n);
                let one = |(row, &m): (&Vec<f64>, &usize)| {
                    exact(self.product, row, &column, [m, self.e, n])
                };
                Ok(rows.iter().zip(&self.rows).map(one).collect())
            }
            Order::Scheduled(scheduled) => self.scheduled(scheduled, n),
            Order::Groups(rows) => self.groups(rows, n),
            Order::Integers => each(&|at| integers(self.product, at)),
            Order::BlockScaled => each(&|at| block_scaled::define(self.product, at)),
        }
    }

    /// The values of the codes of column `n`.
    fn unscaled(&self, n: usize) -> Vec<f64> {
        let codes = &self.product.weights[self.e].codes;
        (0..codes.shape().size_k).map(|k| self.values[usize::from(codes.get(k, n))]).collect()
    }

    /// The exact values of column `n` of the weight without its global scale.
    fn scaled(&self, n: usize) -> Vec<f64> {
        let weight = &self.product.weights[self.e];
        let groups = 0..weight.scales.rows();
        let scales: Vec<f64> = groups.clone().map(|g| weight.scales.value(g, n)).collect();
        let zero = |g| weight.zeros.as_ref().map_or(0.0, |z| f64::from(z.bits(g, n)));
        let zeros: Vec<f64> = groups.map(zero).collect();
        let scale = |(k, q): (usize, f64)| {
            let group = weight.groups.group_of(k);
            (q - zeros[group]) * scales[group]
        };
        self.unscaled(n).into_iter().enumerate().map(scale).collect()
    }

    fn scheduled(&self, scheduled: &Scheduled, n: usize) -> Result<Vec<u16>> {
        let Scheduled { schedule, unit, order, chunks, rows } = scheduled;
        let (product, weight) = (self.product, &self.product.weights[self.e]);
        let values = match schedule.weights.form {
            WeightForm::Unscaled => self.unscaled(n),
            WeightForm::Rounded | WeightForm::Exact => self.scaled(n),
        };
        let ty = unit.inputs.1;
        let column: Vec<Operand> =
            order.iter().map(|&k| decode(unit, ty, ty.encode_rne(values[k]))).collect();
        let scale = |places: &Range<usize>| match schedule.group_sum.map(|rule| rule.scale) {
            Some(GroupScale::One) => 1.0,
            _ => weight.scales.value(weight.groups.group_of(order[places.start]), n) as f32,
        };
        let mut out = Vec::new();
        for (row, &m) in rows.iter().zip(&self.rows) {
            let dot = |places: &Range<usize>| {
                f32::from_bits(unit.dot(&row[places.clone()], &column[places.clone()], 0))
            };
            let sums = chunks.iter().map(|runs| match schedule.group_sum {
                None => dot(&runs[0]),
                Some(_) => runs.iter().fold(0f32, |sum, run| dot(run).mul_add(scale(run), sum)),
            });
            let sum = sums.reduce(|a, b| a + b).unwrap_or(0.0);
            out.push(finish(product, schedule, sum, [m, self.e, n])?);
        }
        Ok(out)
    }

    fn groups(&self, rows: &[Vec<Operand>], n: usize) -> Result<Vec<u16>> {
        let (product, weight) = (self.product, &self.product.weights[self.e]);
        let Scales::Group { values, size } = &product.rows.scales else {
            let expected = "both operands have scales in groups";
            return Err(Error::unsupported("rows without groups", expected));
        };
        let unit = FP8_UNIT.find()?;
        let size_k = product.rows.size_k;
        let operand = |k| decode(unit, unit.inputs.1, weight.codes.get(k, n).into());
        let column: Vec<Operand> = (0..size_k).map(operand).collect();
        let bias = weight.bias.as_ref().map_or(0.0, |b| b.value(0, n) as f32);
        let one = |(row, &m): (&Vec<Operand>, &usize)| {
            let of_row = &values[m * (size_k / size)..];
            let pairs = row.chunks(FP8_PROMOTION).zip(column.chunks(FP8_PROMOTION));
            let sum = pairs.enumerate().fold(0f32, |sum, (g, (a, b))| {
                let part = f32::from_bits(unit.dot(a, b, 0));
                part.mul_add(of_row[g] * weight.scales.value(g, n) as f32, sum)
            });
            let router = product.router_weights.map_or(1.0, |r| r[m]);
            narrow(product.dtype, (sum + bias) * router)
        };
        Ok(rows.iter().zip(&self.rows).map(one).collect())
    }
}

fn decode(unit: &Unit, ty: ScalarType, code: u32) -> Operand {
    Operand::decode(ty, code, unit.through_f16)
}

/// Positions in `order` by chunk, and by group where `schedule` sums groups separately.
fn chunks(schedule: &Schedule, order: &[usize], groups: &Groups) -> Result<Vec<Vec<Range<usize>>>> {
    let chunk = match schedule.chunks {
        Chunks::Whole => order.len(),
        Chunks::Size(size) => size,
        _ => return Err(Error::unsupported("striped chunks", "no method's arithmetic has them")),
    };
    let same = |a: &usize, b: &usize| {
        schedule.group_sum.is_none() || groups.group_of(*a) == groups.group_of(*b)
    };
    let mut next = 0;
    let mut range = |run: &[usize]| {
        next += run.len();
        next - run.len()..next
    };
    let mut runs = |places: &[usize]| places.chunk_by(same).map(&mut range).collect();
    Ok(order.chunks(chunk).map(&mut runs).collect())
}

fn exact(product: &Product<'_>, row: &[f64], column: &[f64], at @ [m, e, n]: [usize; 3]) -> u16 {
    let mut sum = Wide::new();
    for (x, w) in row.iter().zip(column) {
        sum.add_product(*x, *w);
    }
    let scaled = |sum: &Wide, factor: f32| {
        let mut product = Wide::new();
        sum.add_scaled_to(factor.into(), &mut product);
        product
    };
    let mut sum = scaled(&sum, product.alpha(at));
    if let Some(bias) = &product.weights[e].bias {
        sum.add(bias.value(0, n));
    }
    let sum = product.router_weights.map_or(sum.clone(), |r| scaled(&sum, r[m]));
    half_bits(product.dtype, sum.round(product.dtype))
}

/// The sum of a schedule's chunks after its epilogue.
fn finish(
    product: &Product<'_>,
    schedule: &Schedule,
    sum: f32,
    [m, e, n]: [usize; 3],
) -> Result<u16> {
    let (rows, weight) = (product.rows, &product.weights[e]);
    let mut value = sum;
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
