//! What a case of a quantized layer leaves open: a reading is one choice for all of its stages.

use super::layer_rules::{Prescale, note_layout, wrong_values};
use super::quantized_moe::QuantizedLayer;
use crate::Result;
use crate::judge::OutputReport;
use crate::moe::activation::Columns;
use crate::ops::case::Case;

impl QuantizedLayer {
    /// x as it is quantized, bits of `dtype`, and the router weights that are left for the products: ones
    /// if they multiply x, which then has a row for each slot.
    ///
    /// # Errors
    /// Without `in.x` or `in.topk_weights`.
    pub(super) fn weighted_x(
        &self,
        case: &Case<'_>,
        prescale: Prescale,
    ) -> Result<(Vec<u16>, Vec<f32>)> {
        let x = case.input("x")?.elements::<u16>().into_owned();
        let weights = case.input("topk_weights")?.elements::<f32>().into_owned();
        if !self.rules.router_weight_on_x {
            return Ok((x, weights));
        }
        let rows = prescale.apply(&x, &weights, [self.top_k, self.hidden_size], self.dtype);
        Ok((rows, vec![1.0; weights.len()]))
    }

    /// What the case leaves open: a layout of gate and up with a rounding of router weights on x. The
    /// first is the operation's default.
    pub(super) fn readings(&self) -> Vec<(Columns, Prescale)> {
        let prescales = if self.rules.router_weight_on_x { 2 } else { 1 };
        let layouts = self.layouts();
        let all = Prescale::ALL.iter().take(prescales);
        all.flat_map(|&prescale| layouts.iter().map(move |&columns| (columns, prescale))).collect()
    }

    /// The layer with gate and up in these columns.
    #[must_use]
    pub(super) fn with_layout(&self, columns: Columns) -> Self {
        let mut layer = self.clone();
        if layer.activation.is_gated() {
            layer.rules.gate_up_layout = Some(columns);
        }
        layer
    }

    /// Judges under each reading until one explains the case; if none does, under the one that leaves the
    /// fewest values wrong.
    ///
    /// # Errors
    /// As `judge`.
    pub(super) fn each_reading(
        &self,
        judge: impl Fn(Self, Prescale) -> Result<Vec<OutputReport>>,
    ) -> Result<Vec<OutputReport>> {
        let is_open = self.layouts().len() > 1;
        let mut best: Option<(usize, Vec<OutputReport>)> = None;
        for (columns, prescale) in self.readings() {
            let mut reports = judge(self.with_layout(columns), prescale)?;
            if is_open {
                note_layout(&mut reports, columns);
            }
            let wrong = wrong_values(&reports);
            if best.as_ref().is_none_or(|(least, _)| wrong < *least) {
                best = Some((wrong, reports));
            }
            if wrong == 0 {
                break;
            }
        }
        Ok(best.map(|(_, reports)| reports).unwrap_or_default())
    }
}
