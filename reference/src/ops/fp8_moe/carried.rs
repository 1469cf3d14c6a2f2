//! Stages that are judged by bounds, since the case lacks a stage before them: only `y`, or kernels that
//! activate and quantize at once.

use super::walk::{Quantized, Walk};
use super::{Fp8Moe, scales};
use crate::Result;
use crate::judge::compare::elements;
use crate::method::{Activations, Quantizer, Scales};
use crate::moe::layer::bounds::ExpertProduct;
use crate::moe::layer::carried::{Carried, Carrier, CodeRanges, carried};
use crate::num::interval::Bound;
use crate::ops::layer::carried::{self as verdict, Origin, REMEDY, Values, activated_bounds};
use crate::ops::layer::{activated, summed};
use crate::ops::quantized_moe::QUANTIZED;
use crate::ops::w8a8_fp8::E4M3_TYPE;
use crate::products::{Convention, Rows};
use crate::quantize::{ActivationRule, RowRule};

impl Fp8Moe {
    /// How rows of `activated` become e4m3fn.
    fn carrier(&self) -> Carrier {
        match &self.quantizers[1] {
            Quantizer::Fp8Tensor(Some(scale)) => Carrier::Static(*scale),
            Quantizer::Fp8GroupBy { size, rule, ue8m0 } => {
                Carrier::Groups { size: *size, rule: *rule, ue8m0: *ue8m0 }
            }
            _ => {
                let (rule, dtype) = (ActivationRule::QuotientExact, self.config.dtype);
                Carrier::Rows { rule: RowRule { rule, ty: E4M3_TYPE, dtype }, factor: 1.0 }
            }
        }
    }
}

impl Walk<'_> {
    pub(super) fn own(&self, name: &str) -> Option<Vec<u16>> {
        self.case.output(name).map(|t| t.elements::<u16>().into_owned())
    }

    /// `gate_up` of the case, or by its schedule, or its bounds.
    pub(super) fn gate_up(&mut self, a1q: &Activations) -> Result<Values<'static>> {
        if let Some(own) = self.own("gate_up") {
            self.from = "gate_up";
            return Ok(Values::Bits(own.into()));
        }
        let layer = self.layer;
        if layer.config.schedule_w13.is_none() {
            return Ok(Values::Bounds(self.product_bounds(0, Some(a1q), &[])?));
        }
        let engine = layer.layer();
        let experts = engine.layer.local_experts(layer.routed())?;
        let product = layer.product(&engine, (0, a1q), &experts);
        Ok(Values::Bits(product.execute_bits(&layer.schedules[0])?.into()))
    }

    /// Judges `activated`, and its codes and scales; returns the rows that enter the product with w2.
    pub(super) fn activated(&mut self, gate_up: &Values<'_>) -> Result<Quantized> {
        let (case, layer, size_i) = (self.case, self.layer, self.layer.config.intermediate_size);
        let stages = layer.config.stages();
        if let Some(found) = self.own("activated") {
            if let Values::Bits(gate_up) = gate_up {
                self.reports.push(activated::judge(case, &stages, gate_up, &found)?);
            } else {
                let bounds = activated_bounds(&stages, gate_up, false)?;
                self.carried(("activated", size_i), &found, &bounds);
                let of = (&found[..], &bounds[..], size_i);
                let report = self.reports.pop();
                self.reports.extend(report.map(|r| verdict::as_stated(case, r, of, stages.dtype)));
            }
            self.from = "activated";
            let expected = layer.quantize(1, &found)?;
            self.exact(layer.quantized(1, &expected));
            return Ok(Quantized::Known(self.rows(1, expected)));
        }
        let found = QUANTIZED[1].map(|name| case.output(name));
        let bounds = activated_bounds(&stages, gate_up, true)?;
        if found.iter().any(Option::is_some) {
            let ranges = CodeRanges::new(&bounds, size_i, layer.config.dtype, layer.carrier());
            let reports = verdict::quantized(found, QUANTIZED[1], E4M3_TYPE, &ranges, REMEDY);
            self.reports.extend(reports);
        }
        let [Some(codes), Some(scales)] = found else { return Ok(Quantized::Bounds(bounds)) };
        self.from = "a2q";
        let (ty, codes) = (E4M3_TYPE, elements(codes));
        let scales = self.row_scales(scales, layer.config.rows());
        let rows = Activations { ty, size_k: size_i, codes, scales, zeros: None, globals: None };
        Ok(Quantized::Known(rows))
    }

    /// The bounds of the product with w2.
    pub(super) fn carried_product(&self, which: usize, rows: &Quantized) -> Result<Vec<Bound>> {
        match rows {
            Quantized::Known(rows) => self.product_bounds(which, Some(rows), &[]),
            Quantized::Bounds(bounds) => self.product_bounds(which, None, bounds),
        }
    }

    /// The bounds of the product of known rows, or of the quantized rows of `bounds`.
    fn product_bounds(
        &self,
        which: usize,
        known: Option<&Activations>,
        bounds: &[Bound],
    ) -> Result<Vec<Bound>> {
        let (layer, dtype) = (self.layer, self.layer.config.dtype);
        let engine = layer.layer();
        let experts = engine.layer.local_experts(layer.routed())?;
        let on_gate_up = layer.config.apply_router_weight_on_input;
        let is_weighted = !layer.config.rules.router_weight_on_x && on_gate_up == (which == 0);
        let product = ExpertProduct {
            weights: &layer.weights[which],
            orders: None,
            experts: &experts,
            router: is_weighted.then_some(&layer.topk_weights[..]),
            dtype,
            convention: Convention::W8a8,
        };
        let k = layer.size_k(which);
        let carrier = layer.carrier();
        let inputs = |rows: &[usize]| match known {
            Some(known) => known_rows(known, rows, &layer.weights[which][0].scales.rows()),
            None => carried(rows.iter().flat_map(|&r| &bounds[r * k..][..k]), k, dtype, carrier),
        };
        let of_groups = matches!(carrier, Carrier::Groups { .. });
        let declared = crate::judge::Declared {
            power_of_two_scales: of_groups && layer.config.use_ue8m0,
            ..self.declared.clone()
        };
        product.bounds(inputs, |weight| declared.class_for(weight, Some(E4M3_TYPE)))
    }

    /// Judges a stage by carried bounds.
    pub(super) fn carried(
        &mut self,
        stage: (&'static str, usize),
        found: &[u16],
        bounds: &[Bound],
    ) {
        let stages = self.layer.config.stages();
        let class = self.class();
        let origin = Origin { class: &class, from: self.from, remedy: REMEDY };
        let report = verdict::judge(self.case, &stages, stage, found, (bounds, origin));
        self.reports.push(report);
    }

    /// The class of carried products.
    fn class(&self) -> String {
        match self.class_declared {
            true => self.declared.class.name.clone(),
            false => crate::products::Class::fp8_any_order().name,
        }
    }

    /// Judges `y` by the bounds of `down`.
    pub(super) fn carried_sum(&mut self, down: &[Bound], found: &[u16]) -> Result<()> {
        let class = self.class();
        let origin = Origin { class: &class, from: self.from, remedy: REMEDY };
        let stages = self.layer.config.stages();
        self.reports.push(summed::carried(self.case, &stages, down, found, origin)?);
        Ok(())
    }
}

/// Rows of known codes and scales as they enter the product with weights of this many groups of scales.
fn known_rows(known: &Activations, rows: &[usize], groups: &usize) -> Result<Carried> {
    let k = known.size_k;
    let codes = rows.iter().flat_map(|&row| known.row(row)).copied();
    let values = Rows::decode(known.ty, k, codes)?;
    let of_rows = |all: &[f32]| -> Vec<f32> {
        let per = all.len() / known.rows().max(1);
        rows.iter().flat_map(|&row| &all[row * per..][..per]).copied().collect()
    };
    match &known.scales {
        Scales::Group { size, values: all } if *groups > 1 => {
            Ok(Carried::known(values.scaled(*size, &of_rows(all))?, None))
        }
        _ => Ok(Carried::known(values, Some(of_rows(scales(known))))),
    }
}
