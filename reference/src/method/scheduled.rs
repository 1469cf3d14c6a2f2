//! Products by a stated order of additions on an emulated matrix unit.

use rayon::prelude::*;

use super::activations::{Activations, Scales};
use super::block_scaled;
use super::product::{Arithmetic, Product, Promotion, half_bits};
use crate::moe::narrow;
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::products::schedule::{
    Extras, FP8_PROMOTION, FP8_UNIT, Fp8BlockKernel, Fp8Kernel, Schedule, Stack,
};
use crate::products::tensor_core::{LANES, Panel, Row};
use crate::products::{self, Bounded, Class, Int8Epilogue, Int8Product, Judge, Recipe};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const INT8: ScalarType = ScalarType::INT8;

/// The plan of a product.
pub(super) enum Plan {
    /// Row scales or none: a schedule defines everything.
    Schedule(Box<Schedule>),
    /// Scales of both operands for each group of [`FP8_PROMOTION`] k, on [`FP8_UNIT`].
    Groups,
    /// Sums of int8 codes, and the epilogue of [`Int8Epilogue::Cutlass`].
    Integers,
    /// MXFP8 operands on a block-scaled instruction.
    BlockScaled,
}

/// Returns an error if gate and up have other global scales than their matrix, since a schedule
/// only applies that one.
fn expect_own_scales(product: &Product<'_>) -> Result<()> {
    let Some(halves) = product.halves else { return Ok(()) };
    for (weight, halves) in product.weights.iter().zip(halves) {
        let own = weight.global_scale;
        if halves.iter().any(|&scale| Some(scale) != own) {
            let what = format!("{}: a schedule with multipliers {halves:?} of halves", weight.name);
            let own = own.map_or_else(|| "none".to_owned(), |scale| scale.to_string());
            return Err(Error::unsupported(what, format!("the matrix has one, {own}")));
        }
    }
    Ok(())
}

/// The plan of `product` with expert `weight`.
///
/// # Errors
/// [`Error::Unsupported`] for rows, weights or multipliers that the arithmetic does not take.
pub(super) fn plan(
    product: &Product<'_>,
    weight: &Weight<'_>,
    arithmetic: Arithmetic,
) -> Result<Plan> {
    let refuse = |reason: String| {
        let what = format!("{}: {}", weight.name, arithmetic.name());
        Err(Error::unsupported(what, reason))
    };
    expect_own_scales(product)?;
    let (rows, dtype) = (product.rows, product.dtype);
    match (arithmetic, &rows.scales) {
        (Arithmetic::Cutlass, Scales::Row(_))
            if (rows.ty, weight.ty) == (INT8, INT8) && weight.scales.rows() == 1 =>
        {
            Ok(Plan::Integers)
        }
        (Arithmetic::Tcgen05, _) if block_scaled::takes(product, weight) => Ok(Plan::BlockScaled),
        (Arithmetic::Tcgen05, _) => {
            let (rows, weights) = (rows.ty, weight.ty);
            let expected = "e4m3 by e4m3 with powers of two for each 32 k";
            refuse(format!("found {rows} by {weights}, expected {expected}"))
        }
        (Arithmetic::Cutlass, _) => {
            refuse(format!("found {} by {}, expected {INT8} by {INT8}", rows.ty, weight.ty))
        }
        (Arithmetic::Canonical, _) if rows.ty == INT8 => {
            let known = if weight.ty == INT8 { "exact and cutlass" } else { "exact" };
            refuse(format!("int8 activations of {} weights: expected {known}", weight.ty))
        }
        (Arithmetic::Canonical, Scales::None | Scales::Row(_)) => {
            Ok(Plan::Schedule(Box::new(Schedule::canonical(weight, dtype, rows.ty)?)))
        }
        (Arithmetic::Canonical, Scales::Group { size, .. }) => {
            refuse(format!("rows have scales for groups of {size} k, expected one for a row"))
        }
        (Arithmetic::Wgmma(_), _) if (rows.ty, weight.ty) != (E4M3, E4M3) => {
            refuse(format!("found {} by {}, expected {E4M3} by {E4M3}", rows.ty, weight.ty))
        }
        (Arithmetic::Wgmma(promotion), Scales::Row(_)) if weight.scales.rows() == 1 => {
            let promoted = promotion == Promotion::Every128;
            let schedule = Schedule::w8a8_fp8(Fp8Kernel::Triton, dtype, promoted)?;
            Ok(Plan::Schedule(Box::new(schedule)))
        }
        (Arithmetic::Wgmma(Promotion::Every128), Scales::Group { size: FP8_PROMOTION, .. })
            if weight.groups == Groups::Uniform(GroupSize::Of(FP8_PROMOTION)) =>
        {
            Ok(Plan::Groups)
        }
        (Arithmetic::Wgmma(Promotion::Never), Scales::Group { .. }) => {
            refuse("scales in groups are applied at a promotion: wgmma-promoted".to_owned())
        }
        (Arithmetic::Wgmma(_), _) => {
            let group = weight.groups.group_size();
            refuse(format!("weights in groups of {group}, expected those of the activations"))
        }
        (Arithmetic::Exact, _) => refuse("it has no order".to_owned()),
    }
}

/// The outputs, rows of no expert zero.
pub(super) fn compute(product: &Product<'_>, arithmetic: Arithmetic) -> Result<Vec<u16>> {
    let weights = product.weights;
    match plan(product, &weights[0], arithmetic)? {
        Plan::Schedule(schedule) => execute(product, &schedule),
        Plan::BlockScaled => {
            for weight in weights {
                plan(product, weight, arithmetic)?;
            }
            block_scaled::compute(product)
        }
        Plan::Integers => {
            let outputs = |part: &Int8Product<'_>, sums: &[i32]| -> Vec<u16> {
                let bits = part.outputs(sums, Int8Epilogue::Cutlass);
                bits.into_iter().map(|b| half_bits(product.dtype, b)).collect()
            };
            integers(product, arithmetic, 0, outputs)
        }
        Plan::Groups => {
            // Every expert must have the same kind of plan as the first one.
            for weight in weights {
                plan(product, weight, arithmetic)?;
            }
            groups(product)
        }
    }
}

/// The outputs under one schedule, rows of no expert zero.
pub(super) fn execute(product: &Product<'_>, schedule: &Schedule) -> Result<Vec<u16>> {
    expect_own_scales(product)?;
    let activation_scales = match &product.rows.scales {
        Scales::None => None,
        Scales::Row(values) => Some(values.as_slice()),
        Scales::Group { values, .. }
            if schedule.group_sum.is_some_and(|g| g.row_scale.is_some()) =>
        {
            Some(values.as_slice())
        }
        Scales::Group { size, .. } => {
            let reason = format!("found rows with scales for groups of {size} k");
            return Err(Error::unsupported("a schedule", reason));
        }
    };
    let extras = Extras { activation_scales, router_weights: product.router_weights, order: None };
    let (weights, expert_of) = (product.weights, product.expert_of);
    let stack = Stack { weights, expert_of, orders: None, places: None };
    let bits = schedule.execute_stack_rows(&product.rows.codes, stack, extras)?;
    Ok(bits.into_iter().map(|b| b as u16).collect())
}

/// What `make` makes of the int32 sums of each expert's rows, `[M, N]`; `none` in rows of no expert.
fn integers<T: Copy>(
    product: &Product<'_>,
    arithmetic: Arithmetic,
    none: T,
    make: impl Fn(&Int8Product<'_>, &[i32]) -> Vec<T>,
) -> Result<Vec<T>> {
    let (rows, size_n) = (product.rows, product.size_n());
    let mut out = vec![none; product.expert_of.len() * size_n];
    for (e, weight) in product.weights.iter().enumerate() {
        plan(product, weight, arithmetic)?;
        let mine: Vec<usize> =
            (0..product.expert_of.len()).filter(|&m| product.expert_of[m] == Some(e)).collect();
        let a: Vec<i8> = mine.iter().flat_map(|&m| rows.row(m)).map(|&c| c as u8 as i8).collect();
        let a_scales: Vec<f32> = mine.iter().map(|&m| rows.scale(m, 0)).collect();
        let router: Option<Vec<f32>> =
            product.router_weights.map(|r| mine.iter().map(|&m| r[m]).collect());
        let part = Int8Product {
            a: &a,
            a_scales: &a_scales,
            weight,
            router_weights: router.as_deref(),
            dtype: product.dtype,
        };
        let mut sums = part.sums()?;
        if rows.zeros.is_some() {
            let of_columns = Int8Product::column_sums(weight);
            for (sums, &m) in sums.chunks_exact_mut(size_n).zip(&mine) {
                for (sum, column) in sums.iter_mut().zip(&of_columns) {
                    *sum = sum.wrapping_sub(rows.zero(m).wrapping_mul(*column));
                }
            }
        }
        for (&m, row) in mine.iter().zip(make(&part, &sums).chunks_exact(size_n)) {
            out[m * size_n..][..size_n].copy_from_slice(row);
        }
    }
    Ok(out)
}

/// Bounds for every kernel that uses the unit of `arithmetic` in any order.
///
/// # Errors
/// As [`plan`].
pub(super) fn bounds(product: &Product<'_>, arithmetic: Arithmetic) -> Result<Vec<Bounded>> {
    let (rows, size_n) = (product.rows, product.size_n());
    if arithmetic == Arithmetic::Cutlass {
        return integers(product, arithmetic, Bounded::ZERO, |part, sums| part.bounds(sums));
    }
    let mut out = vec![Bounded::ZERO; product.expert_of.len() * size_n];
    for (e, weight) in product.weights.iter().enumerate() {
        let plan = plan(product, weight, arithmetic)?;
        let mine: Vec<usize> =
            (0..product.expert_of.len()).filter(|&m| product.expert_of[m] == Some(e)).collect();
        if mine.is_empty() {
            continue;
        }
        let codes = mine.iter().flat_map(|&m| rows.row(m).iter().copied());
        let mut decoded = products::Rows::decode(rows.ty, rows.size_k, codes)?;
        let of_rows = |values: &[f32], per: usize| {
            mine.iter().flat_map(|&m| &values[m * per..][..per]).copied().collect::<Vec<f32>>()
        };
        let mut scales = match &rows.scales {
            Scales::None => None,
            Scales::Row(values) => Some(of_rows(values, 1)),
            Scales::Group { size, values } => Some(of_rows(values, rows.size_k / size)),
        };
        let (recipe, class) = match &plan {
            Plan::Schedule(schedule) => {
                let class = Class::of_unit(schedule.unit.find()?);
                (Recipe::of_schedule(schedule, product.dtype), class)
            }
            // The arithmetic of integers has its own bounds.
            Plan::Integers | Plan::Groups => {
                if let Some(scales) = scales.take() {
                    decoded = decoded.scaled(FP8_PROMOTION, &scales)?;
                }
                let blocks = Schedule::w8a8_fp8_blocks(Fp8BlockKernel::DeepGemm, product.dtype)?;
                let class = Class::of_unit(blocks.unit.find()?);
                (Recipe::of_schedule(&blocks, product.dtype), class)
            }
            Plan::BlockScaled => {
                if let Some(scales) = scales.take() {
                    decoded = decoded.scaled(block_scaled::BLOCK, &scales)?;
                }
                let blocks = Schedule::w8a8_fp8_blocks(Fp8BlockKernel::DeepGemm, product.dtype)?;
                (Recipe::of_schedule(&blocks, product.dtype), Class::fp8_block_scaled())
            }
        };
        let router = product.router_weights.map(|values| of_rows(values, 1));
        let judge = Judge {
            weight,
            order: None,
            recipe: &recipe,
            class: &class,
            extras: products::Extras {
                activation_scales: scales.as_deref(),
                router_weights: router.as_deref(),
            },
        };
        for (&m, row) in mine.iter().zip(judge.bounds(&decoded, None)?.chunks_exact(size_n)) {
            out[m * size_n..][..size_n].copy_from_slice(row);
        }
    }
    Ok(out)
}

/// Each group's sum on the unit, times both scales, added in f32.
fn groups(product: &Product<'_>) -> Result<Vec<u16>> {
    let unit = FP8_UNIT.find()?;
    let rows: &Activations = product.rows;
    let (size_k, size_n) = (rows.size_k, product.size_n());
    let mut out = vec![0u16; product.expert_of.len() * size_n];
    for (e, weight) in product.weights.iter().enumerate() {
        let mine = (0..product.expert_of.len()).filter(|&m| product.expert_of[m] == Some(e));
        let decoded: Vec<(usize, Row)> =
            mine.map(|m| Ok((m, Row::new(unit, rows.row(m))?))).collect::<Result<_>>()?;
        let starts: Vec<usize> = (0..size_n).step_by(LANES).collect();
        let tile = |&first: &usize| -> Result<Vec<[u16; LANES]>> {
            let column = |l: usize| first + l;
            let panel = Panel::new(unit, size_k, |k, l| match column(l) {
                n if n < size_n => weight.codes.get(k, n).into(),
                _ => 0,
            })?;
            let one = |(m, row): &(usize, Row)| {
                let mut sums = [0f32; LANES];
                for (g, start) in (0..size_k).step_by(FP8_PROMOTION).enumerate() {
                    let mut part = [0; LANES];
                    let end = size_k.min(start + FP8_PROMOTION);
                    unit.accumulate_panel(row, &panel, start..end, &mut part);
                    for (l, sum) in sums.iter_mut().enumerate().filter(|(l, _)| column(*l) < size_n)
                    {
                        let scale =
                            rows.scale(*m, start) * weight.scales.value(g, column(l)) as f32;
                        *sum = f32::from_bits(part[l]).mul_add(scale, *sum);
                    }
                }
                std::array::from_fn(|l| match column(l) {
                    n if n < size_n => {
                        let bias = weight.bias.as_ref().map_or(0.0, |b| b.value(0, n) as f32);
                        let router = product.router_weights.map_or(1.0, |r| r[*m]);
                        narrow(product.dtype, (sums[l] + bias) * router)
                    }
                    _ => 0,
                })
            };
            Ok(decoded.iter().map(one).collect())
        };
        let tiles: Vec<_> = starts.par_iter().map(tile).collect::<Result<_>>()?;
        for (&first, lanes) in starts.iter().zip(tiles) {
            let width = LANES.min(size_n - first);
            for ((m, _), lanes) in decoded.iter().zip(lanes) {
                out[m * size_n + first..][..width].copy_from_slice(&lanes[..width]);
            }
        }
    }
    Ok(out)
}
