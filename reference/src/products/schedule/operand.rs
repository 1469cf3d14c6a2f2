//! The columns of a weight as operands of the unit, with the operands of the steps.

use super::steps::Operands;
use super::{GroupScale, Rows, Schedule, ScheduleError, WeightForm};
use crate::layouts::marlin::process_int8_scales_with;
use crate::num::scalar::ScalarType;
use crate::products::rows::two_to;
use crate::products::tensor_core::{LANES, Panel, Row, Unit};
use crate::weight::{Groups, Table, Weight};
use crate::{Error, Result, act_order};

/// A validated weight under a schedule, with the values that all columns share.
pub(super) struct Plan<'p> {
    pub(super) schedule: &'p Schedule,
    pub(super) unit: &'static Unit,
    pub(super) weight: &'p Weight<'p>,
    /// Row k of the product is row `order[k]` of the weight and of x.
    pub(super) order: Option<Vec<u32>>,
    /// With `group_sum`: the group of each instruction, and its part of the group.
    groups: Vec<(usize, usize)>,
    /// The values of the int16 scales.
    int16: Option<Table>,
    /// The value of each code.
    values: Vec<f64>,
}

/// One row of x.
#[derive(Clone, Copy)]
pub(super) struct Line<'r> {
    pub(super) row: &'r Row,
    /// Its scales: one, one for each group, or none.
    pub(super) scales: &'r [f32],
}

/// [`LANES`] columns.
pub(super) struct Columns {
    pub(super) panel: Panel,
    /// Operands of the steps, except those of the row.
    pub(super) operands: [Operands; LANES],
    /// With `group_sum`: each group's scales.
    scales: Vec<[f32; LANES]>,
}

impl<'p> Plan<'p> {
    /// Prepares `weight`; `scale_max` is the largest scale of its stack.
    pub(super) fn new(
        schedule: &'p Schedule,
        weight: &'p Weight<'p>,
        order: Option<&[u32]>,
        scale_max: f32,
    ) -> Result<Self> {
        let unit = schedule.validate()?;
        weight.validate()?;
        let size_k = weight.shape().size_k;
        if size_k == 0 || !size_k.is_multiple_of(unit.size_k) {
            return Err(ScheduleError::UnitK { found: unit.size_k, size_k }.into());
        }
        schedule.chunks.fit(size_k)?;
        let grouped = schedule.group_sum.is_some();
        let several = weight.scales.rows() > 1;
        if schedule.scales_channels() && several {
            let (found, expected) = ("channel_scale", "a weight with one group of k");
            return Err(ScheduleError::value("epilogue", found, expected).into());
        }
        if schedule.weights.form == WeightForm::Unscaled
            && several
            && schedule.group_sum.is_none_or(|g| g.scale == GroupScale::One)
        {
            let expected = "scaled, for nothing else applies the scales of several groups";
            return Err(ScheduleError::value("weights.form", "unscaled", expected).into());
        }
        let order = match (schedule.rows, &weight.groups) {
            (Rows::ByGroup, Groups::Indexed { g_idx, .. }) => match order {
                Some(order) => {
                    act_order::expect_sorting(g_idx, order)?;
                    Some(order.to_vec())
                }
                None => Some(act_order::sort(g_idx).perm),
            },
            _ => None,
        };
        let mut plan = Self {
            schedule,
            unit,
            weight,
            order,
            groups: Vec::new(),
            int16: None,
            values: (0..1 << weight.codes.bits()).map(|c| weight.ty.to_f64(c)).collect(),
        };
        if grouped {
            plan.groups = plan.instruction_groups()?;
        }
        if schedule.group_sum.is_some_and(|g| g.scale == GroupScale::Int16) && several {
            plan.int16 = Some(process_int8_scales_with(&weight.scales, scale_max)?.scales);
        }
        Ok(plan)
    }

    /// The row of the weight at position `k` of the product.
    fn row(&self, k: usize) -> usize {
        self.order.as_ref().map_or(k, |o| o[k] as usize)
    }

    fn group(&self, k: usize) -> usize {
        self.weight.groups.group_of(self.row(k))
    }

    /// The group of the instruction that holds `k`, and its part of the group.
    pub(super) fn group_at(&self, k: usize) -> (usize, usize) {
        self.groups[k / self.unit.size_k]
    }

    fn instruction_groups(&self) -> Result<Vec<(usize, usize)>> {
        let step = self.unit.size_k;
        let every = self.schedule.group_sum.and_then(|g| g.every);
        let starts = (0..self.weight.shape().size_k).step_by(step);
        starts
            .map(|start| {
                let group = self.group(start);
                match (start..start + step).find(|&k| self.group(k) != group) {
                    None => Ok((group, every.map_or(0, |every| start / every))),
                    Some(k) => {
                        let found = format!("another group at k {k} than at {start}");
                        let expected = format!("groups that fill instructions of {step} k");
                        Err(ScheduleError::value("group_sum", found, expected).into())
                    }
                }
            })
            .collect()
    }

    /// The columns from `first`; zeros beyond the last column.
    pub(super) fn columns(&self, first: usize) -> Result<Columns> {
        let size_n = self.weight.shape().size_n;
        let lanes = (size_n - first).min(LANES);
        let mut refused = None;
        let mut table = CodeTable::new(self);
        let panel = Panel::new(self.unit, self.weight.shape().size_k, |k, l| {
            if l >= lanes {
                return 0;
            }
            if l == 0 {
                table.enter(k, first, lanes);
            }
            let (row, n) = (self.row(k), first + l);
            let made = table.get(l, self.weight.codes.get(row, n));
            made.unwrap_or_else(|| {
                let found = self.weight.dequantize(row, n);
                refused.get_or_insert((row, n, found));
                0
            })
        })?;
        if let Some((k, n, found)) = refused {
            let expected = format!("a value that {} holds", self.unit.inputs.1);
            return Err(Error::value(&self.weight.name, &[k, n], found, expected));
        }
        let mut operands = [Operands::default(); LANES];
        for (l, o) in operands.iter_mut().enumerate().take(lanes) {
            *o = self.operands(first + l);
        }
        let scales = match self.schedule.group_sum.map(|g| g.scale) {
            None | Some(GroupScale::One) => Vec::new(),
            Some(_) => (0..self.weight.scales.rows())
                .map(|g| {
                    std::array::from_fn(|l| if l < lanes { self.scale(g, first + l) } else { 0.0 })
                })
                .collect(),
        };
        Ok(Columns { panel, operands, scales })
    }

    fn scale(&self, group: usize, n: usize) -> f32 {
        match &self.int16 {
            Some(table) => f32::from(table.bits(group, n) as u16 as i16),
            None => (self.weight.scales.value(group, n) * self.undo()) as f32,
        }
    }

    /// 2^−exponent; at most 126 either way: exact.
    fn undo(&self) -> f64 {
        two_to(-self.schedule.weights.exponent)
    }

    fn operands(&self, n: usize) -> Operands {
        let (w, undo) = (self.weight, self.undo());
        let by_channel = self.schedule.scales_channels();
        let channel = by_channel.then(|| (w.scales.value(0, n) * undo) as f32);
        let by_group = self.schedule.group_sum.is_some_and(|g| g.scale == GroupScale::Stored);
        let global = w.global_scale.map(|g| match by_channel || by_group {
            true => g,
            false => (f64::from(g) * undo) as f32,
        });
        Operands {
            channel_scale: channel,
            global_scale: global,
            bias: w.bias.as_ref().map(|b| b.value(0, n) as f32),
            ..Operands::default()
        }
    }

    /// The unit's code for code `code` in `group`, column `n`; `None` if there is none.
    fn encode(&self, code: u8, group: usize, n: usize) -> Option<u32> {
        let w = self.weight;
        let zero = w.zeros.as_ref().map_or(0.0, |z| f64::from(z.bits(group, n)));
        let plain = self.values[usize::from(code)] - zero;
        let form = self.schedule.weights.form;
        let value = match form {
            WeightForm::Unscaled => plain,
            WeightForm::Rounded | WeightForm::Exact => plain * w.scales.value(group, n),
        };
        let value = value * two_to(self.schedule.weights.exponent);
        let ty = self.unit.inputs.1;
        let bits = ty.encode_rne(value);
        let kept = form == WeightForm::Rounded || value.is_nan() || ty.to_f64(bits) == value;
        (kept || ty == ScalarType::FLOAT32).then_some(bits)
    }
}

/// The unit's codes of one row k; for 4-bit weights, all sixteen, reused within a group.
struct CodeTable<'p> {
    plan: &'p Plan<'p>,
    /// The contents of the table: a group of the columns from `first`.
    group: usize,
    first: usize,
    codes: Option<Vec<[Option<u32>; 16]>>,
    /// Whether rows of one group follow each other.
    in_runs: bool,
    /// The codes if they have the same value in every group and column.
    plain: Option<Vec<Option<u32>>>,
}

impl<'p> CodeTable<'p> {
    fn new(plan: &'p Plan<'p>) -> Self {
        let runs = matches!(plan.weight.groups, Groups::Uniform(_)) || plan.order.is_some();
        let in_runs = runs && plan.weight.codes.bits() == 4;
        let form = plan.schedule.weights.form;
        let is_plain = form == WeightForm::Unscaled && plan.weight.zeros.is_none();
        let all = || (0..plan.values.len()).map(|code| plan.encode(code as u8, 0, 0)).collect();
        let plain = (is_plain && !in_runs).then(all);
        Self { plan, group: usize::MAX, first: 0, codes: None, in_runs, plain }
    }

    fn enter(&mut self, k: usize, first: usize, lanes: usize) {
        if self.plain.is_some() {
            return;
        }
        let group = self.plan.group(k);
        if self.in_runs && (self.group != group || self.codes.is_none()) {
            let column = |l| std::array::from_fn(|c| self.plan.encode(c as u8, group, first + l));
            self.codes = Some((0..lanes).map(column).collect());
        }
        (self.group, self.first) = (group, first);
    }

    fn get(&self, lane: usize, code: u8) -> Option<u32> {
        match (&self.plain, &self.codes) {
            (Some(plain), _) => plain[usize::from(code)],
            (None, Some(codes)) => codes[lane][usize::from(code)],
            (None, None) => self.plan.encode(code, self.group, self.first + lane),
        }
    }
}

impl Columns {
    /// The scales of a group; 1 if the group's sum is only added.
    pub(super) fn group_scales(&self, group: usize) -> [f32; LANES] {
        self.scales.get(group).copied().unwrap_or([1.0; LANES])
    }
}
