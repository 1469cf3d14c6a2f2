//! Judges stage by stage, each from the previous stage of the case. A stage that the case lacks is
//! recomputed by its schedule.

use super::{Fp8Moe, scales};
use crate::Result;
use crate::judge::compare::elements;
use crate::judge::product::{Hints, Mistaken, Part, Stage, known};
use crate::judge::scheduled::{self, Product};
use crate::judge::{Declared, OutputReport, Verdict};
use crate::method::{Activations, Scales};
use crate::num::interval::Bound;
use crate::num::tensor::Tensor;
use crate::ops::case::Case;
use crate::ops::computation::{Expected, judge_some};
use crate::ops::fp8_blocks::are_powers;
use crate::ops::layer::{name_both_sides, summed};
use crate::ops::quantized_moe::QUANTIZED;
use crate::ops::w8a8_fp8::{
    E4M3_TYPE, better_diagnosis, declared_as, is_declared, mistaken_weights,
};
use crate::products::{self, Extras};
use crate::weight::Weight;

impl Fp8Moe {
    /// The global id of local expert `e`.
    fn global(&self, e: usize) -> usize {
        let map = self.map.iter().flatten();
        map.clone().position(|&local| usize::try_from(local) == Ok(e)).unwrap_or(e)
    }

    /// The known mistakes with the scales of blocks of a product's weights.
    fn mistaken(&self, which: usize) -> Vec<Mistaken> {
        match self.config.block {
            Some(_) => mistaken_weights(self, |layer| &layer.weights[which]),
            None => Vec::new(),
        }
    }

    fn hints<'c>(&'c self, mistaken: &'c dyn Fn() -> Vec<Mistaken>) -> Hints<'c> {
        Hints {
            router_weights: Some(&self.topk_weights),
            is_gated: self.config.activation.is_gated(),
            mistaken: Some(mistaken),
            is_unpermuted: true,
            ..Hints::default()
        }
    }
}

/// The rows that enter the product with w2.
pub(super) enum Quantized {
    Known(Activations),
    /// Bounds on `activated`.
    Bounds(Vec<Bound>),
}

/// A judgement in progress.
pub(super) struct Walk<'c> {
    pub(super) case: &'c Case<'c>,
    pub(super) layer: &'c Fp8Moe,
    pub(super) declared: Declared,
    /// Whether the class of `declared` was given.
    pub(super) class_declared: bool,
    /// The last stage that the case has.
    pub(super) from: &'static str,
    pub(super) reports: Vec<OutputReport>,
}

impl Walk<'_> {
    /// Judges a stage that the previous stage defines bit for bit.
    pub(super) fn exact(&mut self, expected: [Expected; 2]) {
        self.reports.extend(judge_some(self.case, self.layer, expected));
    }

    /// The quantized rows of the case, or the expected ones.
    pub(super) fn rows(&self, which: usize, mut rows: Activations) -> Activations {
        let [codes, scales] = QUANTIZED[which].map(|name| self.case.output(name));
        if let Some(codes) = codes {
            rows.codes = elements(codes);
        }
        if let Some(scales) = scales {
            rows.scales = self.row_scales(scales, rows.rows());
        }
        rows
    }

    /// The scales of a case as scales of `count` rows: one per row, one for all, or one per group.
    pub(super) fn row_scales(&self, scales: &Tensor<'_>, count: usize) -> Scales {
        let values = scales.elements::<f32>();
        match self.layer.config.block {
            Some(block) => Scales::Group { size: block.k, values: values.into_owned() },
            None => Scales::Row(values.iter().copied().cycle().take(count).collect()),
        }
    }

    /// Judges one product of `rows`, a row per slot.
    fn product(&mut self, which: usize, rows: &Activations) -> Result<()> {
        let name = ["gate_up", "down"][which];
        let Some(found) = self.case.output(name) else { return Ok(()) };
        let (c, layer) = (&self.layer.config, self.layer);
        let choice = [&c.schedule_w13, &c.schedule_w2][which];
        let engine = layer.layer();
        let experts = engine.layer.local_experts(layer.routed())?;
        let product = layer.product(&engine, (which, rows), &experts);
        let (weights, router_weights) = (product.weights, product.router_weights);
        let activation_scales = Some(scales(rows));
        let mut values =
            products::Rows::decode(E4M3_TYPE, rows.size_k, rows.codes.iter().copied())?;
        let mut of_rows = activation_scales;
        let grouped = weights.first().is_some_and(|w| w.scales.rows() > 1);
        if let Some(block) = c.block.filter(|_| grouped) {
            let valid = |s: &f32| s.is_nan() || *s > 0.0 && s.is_finite();
            if let Some(i) = scales(rows).iter().position(|s| !valid(s)) {
                let found = format!("a scale of {} at {i}", scales(rows)[i]);
                let note = format!("`{name}` is judged with `{}`: {found}", QUANTIZED[which][1]);
                self.reports.push(OutputReport::unchecked(name, found.len(), &note));
                return Ok(());
            }
            values = values.scaled(block.k, scales(rows))?;
            of_rows = None;
        }
        let product = Product {
            x: &rows.codes,
            input: E4M3_TYPE,
            dtype: c.dtype,
            weights,
            expert_of: Some(&experts),
            orders: None,
            activation_scales,
            router_weights,
        };
        let powers = |w: &Weight<'_>| w.scales.iter_bits().all(|b| b & 0x7f_ffff == 0);
        let declared = Declared {
            power_of_two_scales: are_powers(scales(rows)) && weights.iter().all(powers),
            ..self.declared.clone()
        };
        let mistaken = || layer.mistaken(which);
        let bounded = || {
            let part = |(e, weight)| {
                let mine = |row: &usize| experts[*row] == Some(e);
                let rows = (0..experts.len()).filter(mine).collect();
                Part { weight, rows, expert: Some(e), global: layer.global(e) }
            };
            let parts: Vec<Part<'_>> = weights.iter().enumerate().map(part).collect();
            let stage = Stage {
                name,
                found,
                rows: values,
                radius: None,
                parts: &parts,
                orders: None,
                extras: Extras { activation_scales: of_rows, router_weights },
                dtype: c.dtype,
                input_dtype: Some(E4M3_TYPE),
                declared: &declared,
                top_k: Some(c.top_k),
                hints: layer.hints(&mistaken),
            };
            match choice.is_some() || self.class_declared {
                true => stage.judge(),
                false => known::judge(stage, &product),
            }
        };
        let mut report = match choice {
            Some(choice) => scheduled::judge(name, found, product, choice, || bounded().map(Some))?,
            None => bounded()?,
        };
        if report.verdict == Verdict::Fail {
            better_diagnosis(&mut report, &elements(found), layer);
        }
        self.reports.push(report);
        Ok(())
    }
}

/// Every stage that the case has.
pub(super) fn judge(
    case: &Case<'_>,
    layer: &Fp8Moe,
    given: &Declared,
) -> Result<Vec<OutputReport>> {
    let c = &layer.config;
    layer.layer().layer.validate()?;
    let declared = declared_as(given);
    let class_declared = is_declared(given);
    let mut walk = Walk { case, layer, declared, class_declared, from: "x", reports: Vec::new() };
    let expected = layer.quantize(0, &layer.x)?;
    walk.exact(layer.quantized(0, &expected));
    let a1q = walk.rows(0, expected).to_slots(c.slots_of_x());
    walk.product(0, &a1q)?;
    if case.output("a1q").is_some() {
        walk.from = "a1q";
    }
    let gate_up = walk.gate_up(&a1q)?;
    let a2q = walk.activated(&gate_up)?;
    let is_known = matches!(a2q, Quantized::Known(_));
    if let Quantized::Known(rows) = &a2q {
        walk.product(1, rows)?;
    }
    let (down, y) = (walk.own("down"), walk.own("y"));
    let carried = match (&down, &y) {
        (Some(_), _) if is_known => None,
        (None, None) => None,
        _ => Some(walk.carried_product(1, &a2q)?),
    };
    if let (Some(found), Some(bounds)) = (&down, &carried) {
        walk.carried(("down", c.hidden_size), found, bounds);
        walk.from = "down";
    }
    match (down, y) {
        (Some(down), Some(found)) => {
            walk.reports.push(summed::judge(case, &c.stages(), &down, &found)?);
        }
        (None, Some(found)) => walk.carried_sum(&carried.unwrap_or_default(), &found)?,
        _ => {}
    }
    name_both_sides(&mut walk.reports);
    Ok(walk.reports)
}
