//! A layer of int8 weights and activations.

mod config;
mod stage;
mod walk;

pub use config::Int8LayerConfig;

use stage::Stage;

use crate::Result;
use crate::method::{Activations, Scales};
use crate::moe::layer::{Layer, Routed};
use crate::moe::{Chain, widen};
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Expected, Mistake, known};
use crate::ops::int8_mm::int8_weight;
use crate::ops::layer_rules::Prescale;
use crate::ops::quantized_moe::{
    QUANTIZED, codes, halves, ignore_map, scales_of_first_expert, swap_halves,
};
use crate::quantize::{ActivationRule, StatedActivations};
use crate::weight::{Codes, Weight};

/// k of an int32 sum where the case declares none.
const BLOCK: usize = 128;

/// Whose scale multiplies a row of `gate_up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RowScale {
    Token,
    /// The scale at the index of the slot, as far as there is one.
    Slot,
    First,
}

/// `fused_experts_int8_w8a8`.
#[derive(Debug, Clone)]
struct Int8Moe {
    config: Int8LayerConfig,
    x: Vec<u16>,
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
    map: Option<Vec<i32>>,
    /// A shared expert's output.
    shared: Option<Vec<u16>>,
    weights: [Vec<Weight<'static>>; 2],
    rule: ActivationRule,
    /// k of an int32 sum.
    block: usize,
    row_scale: RowScale,
}

impl Int8Moe {
    fn new(case: &Case<'_>, c: &Int8LayerConfig) -> Result<Self> {
        Self::reading(case, c, Prescale::RoundedWeight)
    }

    /// The layer with this rounding of router weights on x, if they multiply x.
    fn reading(case: &Case<'_>, c: &Int8LayerConfig, prescale: Prescale) -> Result<Self> {
        let stack = |(name, n, k): (&str, usize, usize)| {
            let weight = case.input(&format!("{name}_weight"))?;
            let scales = case.input(&format!("{name}_weight_scale"))?.elements::<f32>();
            let one = |e: usize| int8_weight(&weight.index0(e)?, &scales[e * n..][..n], [n, k]);
            (0..c.num_local_experts).map(one).collect::<Result<Vec<_>>>()
        };
        let [w13, w2] = c.matrices();
        let (x, topk_weights) = c.layer.weighted_x(case, prescale)?;
        Ok(Self {
            x,
            shared: c.layer.shared(case)?,
            topk_ids: case.input("topk_ids")?.elements::<i32>().into_owned(),
            topk_weights,
            map: case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned()),
            weights: [stack(w13)?, stack(w2)?],
            rule: c.rule().unwrap_or(ActivationRule::Product),
            block: c.block_size_k.unwrap_or(BLOCK),
            row_scale: RowScale::Token,
            config: c.clone(),
        })
    }

    fn layer(&self) -> Layer<'_> {
        self.config.of_weights(&self.weights, self.map.as_deref())
    }

    /// This rank's expert of each slot.
    fn local_experts(&self) -> Result<Vec<Option<usize>>> {
        let (topk_ids, topk_weights) = (&self.topk_ids, &self.topk_weights);
        self.layer().local_experts(Routed { top_k: self.config.top_k, topk_ids, topk_weights })
    }

    /// Whether router weights multiply the product with w13 (`which` 0) or w2.
    fn weights_product(&self, which: usize) -> bool {
        let c = &self.config;
        !c.rules.router_weight_on_x && c.apply_router_weight_on_input == (which == 0)
    }

    /// Quantizes rows `[_, cols]` by the layer's rule. A row with an infinity or NaN has the scale NaN.
    fn quantize(&self, rows: &[u16], cols: usize) -> Result<Activations> {
        let x = self.widened(rows);
        // No codes and scales are found yet.
        let (codes, scales) = (vec![0; x.len()], vec![f32::NAN; x.len() / cols]);
        let fit = stated(&self.config, &x, cols, (&codes, &scales)).explain(Some(self.rule))?;
        Ok(activations(cols, &fit.codes, fit.scales))
    }

    fn widened(&self, rows: &[u16]) -> Vec<f32> {
        rows.iter().map(|&bits| widen(self.config.dtype, bits)).collect()
    }

    /// The product of `rows`, a row per slot, with w13 (`which` 0) or w2 (1).
    fn stage(&self, which: usize, rows: Activations) -> Stage {
        let slots = (0..rows.rows()).collect();
        Stage { layer: self.clone(), which, rows, slots }
    }

    fn quantized(&self, which: usize, rows: &Activations) -> [Expected; 2] {
        let codes = codes(which, DType::I8, rows.size_k, &rows.codes);
        [codes, Expected::floats(QUANTIZED[which][1], &[rows.rows(), 1], scales(rows))]
    }

    fn half(&self, name: &str, cols: usize, elements: Vec<u32>) -> Expected {
        halves(name, self.config.dtype, cols, elements)
    }

    /// Replaces the scales of every expert of w13 (`which` 0) or w2 by those of other columns.
    fn move_scales(&mut self, which: usize, from: impl Fn(usize, usize) -> usize) {
        for weight in &mut self.weights[which] {
            let size_n = weight.shape().size_n;
            let columns: Vec<usize> = (0..size_n).map(|n| from(n, size_n)).collect();
            if let Ok(moved) = weight.gather_columns(&columns) {
                weight.scales = moved.scales;
            }
        }
    }
}

/// Rows of a case next to their source.
fn stated<'a>(
    c: &Int8LayerConfig,
    x: &'a [f32],
    cols: usize,
    (codes, scales): (&'a [u8], &'a [f32]),
) -> StatedActivations<'a> {
    let ty = ScalarType::INT8;
    StatedActivations { x, cols, dtype: c.dtype, ty, factor: 1.0, codes, scales }
}

/// Rows of int8 codes with a scale each.
fn activations(size_k: usize, codes: &[u8], scales: Vec<f32>) -> Activations {
    Activations {
        ty: ScalarType::INT8,
        size_k,
        codes: codes.iter().map(|&code| code.into()).collect(),
        scales: Scales::Row(scales),
        zeros: None,
        globals: None,
    }
}

/// The scale of each row.
fn scales(rows: &Activations) -> &[f32] {
    match &rows.scales {
        Scales::Row(values) => values,
        _ => &[],
    }
}

fn narrow_bits(elements: &[u32]) -> Vec<u16> {
    elements.iter().map(|&bits| bits as u16).collect()
}

fn wide_bits(elements: &[u16]) -> Vec<u32> {
    elements.iter().map(|&bits| bits.into()).collect()
}

impl Computation for Int8Moe {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        let (h, i) = (c.hidden_size, c.intermediate_size);
        let [(_, w13_size_n, _), _] = c.matrices();
        let a1q = self.quantize(&self.x, h)?;
        let gate_up = self.stage(0, a1q.to_slots(c.slots_of_x())).bits()?;
        let activated = self.layer().activate_bits(&narrow_bits(&gate_up), Chain::Canonical)?;
        let a2q = self.quantize(&activated, i)?;
        let mut all: Vec<Expected> = self.quantized(0, &a1q).into();
        all.push(self.half("gate_up", w13_size_n, gate_up));
        all.push(self.half("activated", i, wide_bits(&activated)));
        all.extend(self.quantized(1, &a2q));
        let down = self.stage(1, a2q).bits()?;
        let y = c.layer.sum(&narrow_bits(&down), self.shared.as_deref())?;
        all.push(self.half("down", h, down));
        all.push(self.half("y", h, wide_bits(&y)));
        Ok(all)
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "halves-to-even", "halves were rounded to even codes, not away from zero" =>
                |c| if c.rule == ActivationRule::Product {
                    c.rule = ActivationRule::ProductEven;
                };
            "activation-scale-of-slot", "the scales of tokens were read at the index of the slot" =>
                |c| c.row_scale = RowScale::Slot;
            "activation-scale-of-first-row", "the first row's scale was taken for all rows" =>
                |c| c.row_scale = RowScale::First;
            "weight-scale-of-first-expert", "the first expert's scales were taken for all" => |c| scales_of_first_expert(&mut c.weights);
            "weight-scale-of-first-column", "the first column's scale was taken for all columns" =>
                |c| for which in [0, 1] {
                    c.move_scales(which, |_, _| 0);
                };
            "scales-of-gate-up-swapped", "gate was multiplied by the scales of up, and up by gate's" =>
                |c| c.move_scales(0, |n, size_n| (n + size_n / 2) % size_n);
            "gate-up-swapped", "gate and up halves of w13 are exchanged" => |c| swap_halves(&mut c.weights[0]);
            "codes-plus-128", "the weights' codes were read as stored plus 128" => |c| {
                for weight in c.weights.iter_mut().flatten() {
                    let own = &weight.codes;
                    let code = |k, n| own.get(k, n) ^ 0x80;
                    if let Ok(codes) = Codes::from_fn(8, weight.shape(), code) {
                        weight.codes = codes;
                    }
                }
            };
            "router-weight-missing", "router weights were not applied" =>
                |c| c.topk_weights.fill(1.0);
            "router-weight-on-the-other-side",
            "router weights multiply the other product than the config says" =>
                |c| c.config.layer.apply_router_weight_on_input ^= true;
            "expert-map-ignored", "global expert ids were used as this rank's" => |c| {
                let local = c.config.num_local_experts;
                if ignore_map(&mut c.map, &mut c.topk_ids, local) {
                    c.config.layer.num_experts = local;
                }
            };
        }
    }
}
