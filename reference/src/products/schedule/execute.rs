//! Executes a schedule. Outputs are independent of each other, so neither the number of threads nor
//! other rows of x change a bit.

use std::ops::Range;

use rayon::prelude::*;

use super::operand::{Columns, Line, Plan};
use super::steps::{Operands, apply, round_bits};
use super::{MultiplyAdd, RowScale, Schedule, Step};
use crate::num::scalar;
use crate::products::tensor_core::{Accumulator, LANES, Lanes, Row};
use crate::weight::Weight;
use crate::{Error, Result};

/// The operands of a product besides x and the weight.
#[derive(Debug, Clone, Copy, Default)]
pub struct Extras<'a> {
    /// `[M]`: the scale of each row of x, for the step `activation_scale`; `[M, groups]` for
    /// [`GroupSum::row_scale`](super::GroupSum::row_scale).
    pub activation_scales: Option<&'a [f32]>,
    /// `[M]`: for the steps that apply a router weight.
    pub router_weights: Option<&'a [f32]>,
    /// `[K]`: a permutation that sorts `g_idx`, for [`Rows::ByGroup`](super::Rows::ByGroup); `None`
    /// uses the stable one.
    pub order: Option<&'a [u32]>,
}

/// The matrices of a stack of experts, and the expert of each row of x.
#[derive(Debug, Clone, Copy)]
pub struct Stack<'a> {
    /// This rank's experts.
    pub weights: &'a [Weight<'a>],
    /// `[M]`: the expert of each row; `None` gives a row of zeros.
    pub expert_of: &'a [Option<usize>],
    /// For each expert the permutation that sorts its `g_idx`; `None` uses stable ones.
    pub orders: Option<&'a [Vec<u32>]>,
    /// `[M]`: position of each row in the aligned tokens, which
    /// [`Striped::rows`](super::Striped::rows) counts; `None` uses the row itself.
    pub places: Option<&'a [usize]>,
}

impl<'a> Extras<'a> {
    /// The activation scales of row `m` among `size_m`.
    fn scales_of(self, m: usize, size_m: usize) -> &'a [f32] {
        let all = self.activation_scales.unwrap_or_default();
        let per = all.len() / size_m.max(1);
        &all[m * per..][..per]
    }
}

/// Largest number of decoded values of x that are kept at a time.
const ROW_VALUES: usize = 1 << 22;

impl Schedule {
    /// [`Schedule::execute`] of codes in row-major order.
    pub(crate) fn execute_rows(
        &self,
        x: &[u32],
        weight: &Weight<'_>,
        extras: Extras<'_>,
    ) -> Result<Vec<u32>> {
        let plan = Plan::new(self, weight, extras.order, f32::NEG_INFINITY)?;
        let (size_k, size_n) = (weight.shape().size_k, weight.shape().size_n);
        if !x.len().is_multiple_of(size_k) {
            return Err(Error::shape("x", &[x.len()], format!("rows of {size_k}")));
        }
        let rows: Vec<usize> = (0..x.len() / size_k).collect();
        self.expect_extras([rows.len(), weight.scales.rows()], extras)?;
        let mut out = vec![0; rows.len() * size_n];
        run(&plan, x, &rows, extras, |m| m, |_| true, &mut out)?;
        Ok(out)
    }

    /// [`Schedule::execute_stack`] of codes in row-major order.
    pub(crate) fn execute_stack_rows(
        &self,
        x: &[u32],
        stack: Stack<'_>,
        extras: Extras<'_>,
    ) -> Result<Vec<u32>> {
        self.execute_columns(x, stack, extras, |_| true)
    }

    /// [`Schedule::execute_stack`] for the runs of [`LANES`] columns that `wanted` selects by their
    /// first column; other outputs stay 0.
    pub(crate) fn execute_columns(
        &self,
        x: &[u32],
        stack: Stack<'_>,
        extras: Extras<'_>,
        wanted: impl Fn(usize) -> bool,
    ) -> Result<Vec<u32>> {
        let Some(first) = stack.weights.first() else {
            return Err(Error::size("experts", 0, "1 or more"));
        };
        let shape = first.shape();
        if let Some(other) = stack.weights.iter().find(|w| w.shape() != shape) {
            let found = [other.shape().size_k, other.shape().size_n];
            return Err(Error::shape(&other.name, &found, shape.to_string()));
        }
        let size_m = stack.expert_of.len();
        if size_m.checked_mul(shape.size_k) != Some(x.len()) {
            let expected = format!("[{size_m}, {}]", shape.size_k);
            return Err(Error::shape("x", &[x.len()], expected));
        }
        let lengths = [("places", stack.places.map(<[usize]>::len), size_m)];
        let orders = [("orders", stack.orders.map(<[Vec<u32>]>::len), stack.weights.len())];
        for (name, found, expected) in lengths.into_iter().chain(orders) {
            if let Some(found) = found.filter(|&f| f != expected) {
                return Err(Error::shape(name, &[found], format!("[{expected}]")));
            }
        }
        for weight in stack.weights {
            self.expect_extras([size_m, weight.scales.rows()], extras)?;
        }
        let experts = stack.weights.len();
        let outside = |e: &Option<usize>| e.is_some_and(|e| e >= experts);
        if let Some(m) = stack.expert_of.iter().position(outside) {
            let found = stack.expert_of[m].unwrap_or_default();
            return Err(Error::value("expert_of", &[m], found, format!("below {experts}")));
        }
        let scales = stack.weights.iter().map(|w| &w.scales);
        let scale_max = scales
            .flat_map(|s| s.iter_bits().map(|b| s.ty().to_f64(b) as f32))
            .fold(f32::NEG_INFINITY, f32::max);
        let mut out = vec![0; size_m * shape.size_n];
        for (expert, weight) in stack.weights.iter().enumerate() {
            let mine = |m: &usize| stack.expert_of[*m] == Some(expert);
            let rows: Vec<usize> = (0..size_m).filter(mine).collect();
            let order = stack.orders.map(|o| o[expert].as_slice());
            let plan = Plan::new(self, weight, order, scale_max)?;
            let place = |m: usize| stack.places.map_or(m, |p| p[m]);
            run(&plan, x, &rows, extras, place, &wanted, &mut out)?;
        }
        Ok(out)
    }

    /// Checks the operands of `size_m` rows and a weight of `groups` groups.
    pub(super) fn expect_extras(
        &self,
        [size_m, groups]: [usize; 2],
        extras: Extras<'_>,
    ) -> Result<()> {
        let by_group = self.group_sum.is_some_and(|g| g.row_scale.is_some());
        let per = if by_group { groups } else { 1 };
        let all = [
            ("activation_scales", extras.activation_scales, per),
            ("router_weights", extras.router_weights, 1),
        ];
        for (name, given, per) in all {
            if let Some(given) = given.filter(|g| g.len() != size_m * per) {
                let expected = match per {
                    1 => format!("[{size_m}]"),
                    _ => format!("[{size_m}, {per}]"),
                };
                return Err(Error::shape(name, &[given.len()], expected));
            }
        }
        let needs = by_group || self.steps().any(|s| s.op.scales_rows());
        if needs && extras.activation_scales.is_none() {
            let what = if by_group { "group_sum.row_scale" } else { "the step activation_scale" };
            return Err(Error::missing("activation_scales", what));
        }
        Ok(())
    }
}

/// Writes the outputs of `rows` to `out`.
fn run(
    plan: &Plan<'_>,
    x: &[u32],
    rows: &[usize],
    extras: Extras<'_>,
    place: impl Fn(usize) -> usize + Sync,
    wanted: impl Fn(usize) -> bool,
    out: &mut [u32],
) -> Result<()> {
    let shape = plan.weight.shape();
    let size_m = out.len() / shape.size_n.max(1);
    let starts: Vec<usize> = (0..shape.size_n).step_by(LANES).filter(|&n| wanted(n)).collect();
    let at_a_time = (ROW_VALUES / shape.size_k).max(1);
    for rows in rows.chunks(at_a_time) {
        let decoded = rows
            .par_iter()
            .map(|&m| {
                let codes = &x[m * shape.size_k..][..shape.size_k];
                match &plan.order {
                    None => Row::new(plan.unit, codes),
                    Some(o) => {
                        let sorted: Vec<u32> = o.iter().map(|&k| codes[k as usize]).collect();
                        Row::new(plan.unit, &sorted)
                    }
                }
            })
            .collect::<Result<Vec<Row>>>()?;
        let made = starts
            .par_iter()
            .map(|&first| {
                let columns = plan.columns(first)?;
                let one = |(&m, row): (&usize, &Row)| {
                    let scales = extras.scales_of(m, size_m);
                    let operands = columns.operands.map(|o| Operands {
                        activation_scale: scales.first().copied(),
                        router_weight: extras.router_weights.map(|r| r[m]),
                        ..o
                    });
                    plan.outputs(Line { row, scales }, &columns, place(m), first, &operands)
                };
                Ok(rows.par_iter().zip(&decoded).with_min_len(4).map(one).collect())
            })
            .collect::<Result<Vec<Vec<Lanes>>>>()?;
        for (&first, lanes) in starts.iter().zip(made) {
            let width = (shape.size_n - first).min(LANES);
            for (&m, lanes) in rows.iter().zip(&lanes) {
                out[m * shape.size_n + first..][..width].copy_from_slice(&lanes[..width]);
            }
        }
    }
    Ok(())
}

/// Applies `steps` to each lane of a sum, f32 bits.
fn step(steps: &[Step], sum: &mut Lanes, operands: &[Operands; LANES]) {
    if !steps.is_empty() {
        for (bits, o) in sum.iter_mut().zip(operands) {
            *bits = apply(steps, f32::from_bits(*bits), o).to_bits();
        }
    }
}

/// The partial sum of one warp.
#[derive(Clone)]
struct Warp {
    /// The sum in the unit's type.
    part: Lanes,
    /// With group sums: the group of `part` and its part of the group, and the f32 sum.
    group: Option<(usize, usize)>,
    sum: [f32; LANES],
    /// With integer group sums: the sum, modulo 2^32.
    total: [i32; LANES],
}

impl Plan<'_> {
    /// Sixteen outputs of one row.
    pub(super) fn outputs(
        &self,
        line: Line<'_>,
        columns: &Columns,
        place: usize,
        first: usize,
        operands: &[Operands; LANES],
    ) -> Lanes {
        let mut sums = self.chunk_sums(line, columns, place, first, operands);
        self.finish_chunks(&mut sums, place, first, operands)
    }

    /// The sums of the chunks, f32 bits.
    pub(super) fn chunk_sums(
        &self,
        line: Line<'_>,
        columns: &Columns,
        place: usize,
        first: usize,
        operands: &[Operands; LANES],
    ) -> Vec<Lanes> {
        let (s, shape) = (self.schedule, self.weight.shape());
        let chunks = s.chunks.of(place, first, shape.size_n, shape.size_k);
        let sum = |chunk| {
            let mut sum = self.chunk(line, columns, chunk, operands);
            step(&s.chunk_steps, &mut sum, operands);
            sum
        };
        chunks.into_iter().map(sum).collect()
    }

    /// Computes the outputs from the sums of the chunks.
    pub(super) fn finish_chunks(
        &self,
        sums: &mut [Lanes],
        place: usize,
        first: usize,
        operands: &[Operands; LANES],
    ) -> Lanes {
        let s = self.schedule;
        let sum = s.add_chunks(sums);
        let ty = s.output_type();
        let row = s.chunks.row_of_block(place);
        std::array::from_fn(|l| {
            let corner = row < 8 && (first + l) % 64 < 8;
            let operands = Operands { corner, ..operands[l] };
            round_bits(apply(&s.epilogue, f32::from_bits(sum[l]), &operands), ty)
        })
    }

    /// One chunk's sum, f32 bits.
    fn chunk(
        &self,
        line: Line<'_>,
        columns: &Columns,
        chunk: Range<usize>,
        operands: &[Operands; LANES],
    ) -> Lanes {
        let finish = |warp: &mut Warp| {
            let mut sum = self.finish(warp, line, columns);
            step(&self.schedule.warp_steps, &mut sum, operands);
            sum
        };
        let Some(stripes) = self.schedule.stripes else {
            let mut warp = Warp::new();
            self.advance(&mut warp, line, columns, chunk);
            return finish(&mut warp);
        };
        let mut warps = vec![Warp::new(); stripes.warps];
        let len = stripes.tile / stripes.warps;
        for tile in chunk.clone().step_by(stripes.tile) {
            for (w, warp) in warps.iter_mut().enumerate() {
                let start = (tile + w * len).min(chunk.end);
                let end = (start + len).min(chunk.end);
                self.advance(warp, line, columns, start..end);
            }
        }
        let mut sums: Vec<Lanes> = warps.iter_mut().map(finish).collect();
        stripes.sum.reduce(&mut sums)
    }

    /// Adds the products of `range` to a warp's sum.
    fn advance(&self, warp: &mut Warp, line: Line<'_>, columns: &Columns, range: Range<usize>) {
        if self.schedule.group_sum.is_none() {
            return self.unit.accumulate_panel(line.row, &columns.panel, range, &mut warp.part);
        }
        let mut start = range.start;
        while start < range.end {
            let group = self.group_at(start);
            let mut end = start + self.unit.size_k;
            while end < range.end && self.group_at(end) == group {
                end += self.unit.size_k;
            }
            if warp.group != Some(group) {
                self.end_group(warp, line, columns);
                warp.group = Some(group);
            }
            self.unit.accumulate_panel(line.row, &columns.panel, start..end, &mut warp.part);
            start = end;
        }
    }

    /// Adds a group's sum, times its scale, to the f32 sum.
    fn end_group(&self, warp: &mut Warp, line: Line<'_>, columns: &Columns) {
        let (Some((group, _)), Some(rule)) = (warp.group, self.schedule.group_sum) else { return };
        let scales = columns.group_scales(group);
        if rule.multiply_add == MultiplyAdd::Integer {
            for ((total, &part), scale) in warp.total.iter_mut().zip(&warp.part).zip(scales) {
                let product = part.cast_signed().wrapping_mul(scale as i32);
                *total = total.wrapping_add(product);
            }
            warp.part = [0; LANES];
            return;
        }
        for ((sum, &part), scale) in warp.sum.iter_mut().zip(&warp.part).zip(scales) {
            let part = self.part_value(part);
            let (part, scale) = match rule.row_scale {
                None => (part, scale),
                Some(RowScale::Product) => (part, line.scales[group] * scale),
                Some(RowScale::First) => (part * line.scales[group], scale),
            };
            *sum = match rule.multiply_add {
                MultiplyAdd::Fused => part.mul_add(scale, *sum),
                MultiplyAdd::Separate | MultiplyAdd::Integer => *sum + part * scale,
            };
        }
        warp.part = [0; LANES];
    }

    /// The unit's accumulator as an f32; an int32 is rounded to nearest even.
    fn part_value(&self, bits: u32) -> f32 {
        match self.unit.accumulator {
            Accumulator::F32 { .. } => f32::from_bits(bits),
            Accumulator::F16 => scalar::f16_to_f32(bits as u16),
            Accumulator::S32 => bits.cast_signed() as f32,
        }
    }

    fn finish(&self, warp: &mut Warp, line: Line<'_>, columns: &Columns) -> Lanes {
        if let Some(rule) = self.schedule.group_sum {
            self.end_group(warp, line, columns);
            return match rule.multiply_add {
                MultiplyAdd::Integer => warp.total.map(|t| (t as f32).to_bits()),
                MultiplyAdd::Fused | MultiplyAdd::Separate => warp.sum.map(f32::to_bits),
            };
        }
        warp.part.map(|bits| self.part_value(bits).to_bits())
    }
}

impl Warp {
    fn new() -> Self {
        Self { part: [0; LANES], group: None, sum: [0.0; LANES], total: [0; LANES] }
    }
}
