//! Whether a schedule applies every operand that a product has.
//!
//! A step without its operand leaves the value as it is ([`StepOp`]), but an operand without a step
//! would be dropped: the outputs of a kernel that forgot it would equal the schedule's bits.

use super::{Extras, GroupScale, Schedule, ScheduleError, StepOp, WeightForm};
use crate::weight::{Table, Weight};

impl Schedule {
    /// # Errors
    /// [`ScheduleError::Value`] for the first operand of the product that no step applies: a bias,
    /// router weights, scales of rows of x, the scale of a weight with one group, a global scale.
    pub(crate) fn expect_applied(
        &self,
        weight: &Weight<'_>,
        extras: Extras<'_>,
    ) -> Result<(), ScheduleError> {
        let any = |ops: &[StepOp]| self.steps().any(|s| ops.contains(&s.op));
        let router = extras.router_weights.is_some();
        let by_group = self.group_sum.is_some_and(|g| g.scale != GroupScale::One);
        let is_one = |t: &Table| t.iter_bits().all(|bits| t.ty().to_f64(bits) == 1.0);
        let unscaled = self.weights.form == WeightForm::Unscaled
            && weight.scales.rows() == 1
            && !by_group
            && !is_one(&weight.scales);
        let global = match router {
            true => any(&[StepOp::GlobalScale, StepOp::RouterWeightGlobal]),
            false => any(&[StepOp::GlobalScale]),
        };
        let operands = [
            (
                "bias",
                "the bias",
                weight.bias.is_none()
                    || any(&[
                        StepOp::Bias,
                        StepOp::ChannelScaleBias,
                        StepOp::ChannelScaleBiasMarlin,
                        StepOp::ActivationScaleBias,
                    ]),
            ),
            (
                "router_weight",
                "the router weights",
                !router || any(&[StepOp::RouterWeight, StepOp::RouterWeightGlobal]),
            ),
            (
                "activation_scale",
                "the scales of the rows of x",
                extras.activation_scales.is_none()
                    || self.group_sum.is_some_and(|g| g.row_scale.is_some())
                    || self.steps().any(|s| s.op.scales_rows()),
            ),
            (
                "channel_scale",
                "the scales of the weight's columns",
                !unscaled || self.scales_channels(),
            ),
            ("global_scale", "the weight's global scale", weight.global_scale.is_none() || global),
        ];
        match operands.into_iter().find(|(_, _, applied)| !applied) {
            None => Ok(()),
            Some((step, operand, _)) => {
                let found = format!("no step that applies {operand}");
                Err(ScheduleError::value("epilogue", found, format!("a step like `{step}`")))
            }
        }
    }
}
