//! A few outputs under many schedules: what the schedules share is decoded once.

use super::execute::Extras;
use super::operand::{Columns, Line, Plan};
use super::steps::Operands;
use super::{GroupScale, Rows, Schedule, Sum, UnitName, Weights};
use crate::Result;
use crate::products::tensor_core::{LANES, Lanes, Row};
use crate::weight::Weight;

/// One row of x and up to [`LANES`] columns of one matrix.
pub(crate) struct Sample<'s> {
    /// `[K]` codes of the row.
    pub(crate) x: &'s [u32],
    pub(crate) weight: &'s Weight<'s>,
    /// The largest scale of the stack that the matrix belongs to.
    pub(crate) scale_max: f32,
    /// Scale and router weight of the row, one each; order of the matrix's k.
    pub(crate) extras: Extras<'s>,
    /// The row's place among all.
    pub(crate) place: usize,
    /// The first column.
    pub(crate) first: usize,
    decoded: Vec<(Key, Row, Columns)>,
    /// The sums of the last schedule's chunks, and the schedule without what follows them.
    sums: Option<(Key, Schedule, Vec<Lanes>)>,
}

/// What the operands depend on.
type Key = (UnitName, Weights, Rows, Option<GroupScale>, bool);

impl<'s> Sample<'s> {
    pub(crate) fn new(
        x: &'s [u32],
        weight: &'s Weight<'s>,
        scale_max: f32,
        extras: Extras<'s>,
        [place, first]: [usize; 2],
    ) -> Self {
        Self { x, weight, scale_max, extras, place, first, decoded: Vec::new(), sums: None }
    }

    /// The outputs' bits, as the whole product has them.
    ///
    /// # Errors
    /// As [`Schedule::execute`].
    pub(crate) fn outputs(&mut self, schedule: &Schedule) -> Result<Vec<u32>> {
        let plan = Plan::new(schedule, self.weight, self.extras.order, self.scale_max)?;
        schedule.expect_extras([1, self.weight.scales.rows()], self.extras)?;
        let scale = schedule.group_sum.map(|g| g.scale);
        let key =
            (schedule.unit, schedule.weights, schedule.rows, scale, schedule.scales_channels());
        let at = match self.decoded.iter().position(|(of, ..)| *of == key) {
            Some(at) => at,
            None => {
                let row = match &plan.order {
                    None => Row::new(plan.unit, self.x)?,
                    Some(order) => {
                        let sorted: Vec<u32> = order.iter().map(|&k| self.x[k as usize]).collect();
                        Row::new(plan.unit, &sorted)?
                    }
                };
                self.decoded.push((key, row, plan.columns(self.first)?));
                self.decoded.len() - 1
            }
        };
        let (_, row, columns) = &self.decoded[at];
        let scales = self.extras.activation_scales.unwrap_or_default();
        let operands = columns.operands.map(|o| Operands {
            activation_scale: scales.first().copied(),
            router_weight: self.extras.router_weights.map(|r| r[0]),
            ..o
        });
        let width = LANES.min(self.weight.shape().size_n - self.first);
        // Schedules of one order differ in what follows: they come one after another.
        let (chunk_sum, epilogue) = (Sum::default(), Vec::new());
        let before = Schedule { leaf_chunks: None, chunk_sum, epilogue, ..schedule.clone() };
        let same = self.sums.as_ref().is_some_and(|(k, s, _)| (k, s) == (&key, &before));
        if !same {
            let sums =
                plan.chunk_sums(Line { row, scales }, columns, self.place, self.first, &operands);
            self.sums = Some((key, before, sums));
        }
        let mut sums = self.sums.as_ref().map_or_else(Vec::new, |(.., sums)| sums.clone());
        let lanes = plan.finish_chunks(&mut sums, self.place, self.first, &operands);
        Ok(lanes[..width].to_vec())
    }
}
