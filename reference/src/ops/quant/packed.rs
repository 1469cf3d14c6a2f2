//! Verdicts on packed matrices: the outputs of `linear` and `moe` in a kernel's layout.

use super::variants::{self, Context};
use crate::judge::compare::{Candidate, Elements, Plain, Rows, Subject};
use crate::judge::{OutputReport, Verdict};
use crate::layouts::Layout;
use crate::layouts::marlin::{InputDtype, Options, Prepared, prepare};
use crate::num::dims::Shape;
use crate::num::tensor::Tensor;
use crate::ops::case::Case;
use crate::ops::quant::QuantConfig;
use crate::ops::quant::source::Source;
use crate::{Result, act_order};

const LAYOUTS: [&str; 8] = [
    "marlin_qweight",
    "marlin_scales",
    "marlin_zeros",
    "marlin_bias",
    "marlin_global_scale",
    "input_global_scale",
    "g_idx_sort_indices",
    "sorted_g_idx",
];

/// Judges the layout outputs of one matrix or stack of experts.
pub(in crate::ops) fn matrices(
    case: &Case<'_>,
    quant: &QuantConfig,
    prefix: &'static str,
    shape: Shape,
    scale_factor: Option<f64>,
    intermediate_size: Option<usize>,
) -> Result<Vec<OutputReport>> {
    let output = |name: &str| case.output(&format!("{prefix}{name}"));
    if LAYOUTS.iter().all(|name| output(name).is_none()) {
        return Ok(Vec::new());
    }
    let source = Source::new(case, quant, prefix, shape);
    let weights = source.weights()?;
    let stated = source.stated_perms()?;
    // A valid order of the case is used, so that only real differences remain.
    let perms = stated.as_ref().filter(|(_, sorts)| *sorts).map(|(perms, _)| perms.as_slice());
    let options = Options {
        input_dtype: InputDtype::from_config(quant.input_dtype)?,
        scale_factor: scale_factor.map(|f| f as f32),
        perms,
        ..Options::new(quant.dtype)
    };
    let prepared = prepare(&weights, options)?;
    let context = Context {
        weights: &weights,
        options,
        prepared: &prepared,
        intermediate_size,
        // Without an up projection, the halves of N are not gate and up.
        is_w13: intermediate_size.is_some_and(|i| shape.size_n == 2 * i),
        is_one_shard: intermediate_size.is_some_and(|i| shape.size_n == i),
        stated: stated.as_ref().map(|(perms, _)| perms.as_slice()),
    };

    let mut reports = Vec::new();
    let stack = Stack { prefix, prepared: &prepared, shape };
    if let Some(found) = output("marlin_qweight") {
        let layout = prepared.weight_layout;
        let subject = Subject {
            rows: Rows::K,
            width: layout.tile_map().bits(),
            ..stack.subject(
                "marlin_qweight",
                found,
                prepared.qweight.clone(),
                Box::new(layout),
                variants::qweight(&context),
            )
        };
        reports.push(subject.judge());
    }
    if let Some(found) = output("marlin_scales") {
        let expected: Elements = prepared.scales.iter_bits().collect();
        let (layout, e8) = (prepared.scale_layout, prepared.scales.ty().storage_bits() == 8);
        let layout =
            if e8 && options.input_dtype != InputDtype::Fp8 { layout.with_quads() } else { layout };
        let candidates = variants::scales(&context);
        reports.push(
            match variants::scales_of_a_rank(&context, quant, &stack.name("marlin_scales"), found) {
                Some(report) => report,
                None => {
                    let layout = Box::new(layout);
                    stack.subject("marlin_scales", found, expected, layout, candidates).judge()
                }
            },
        );
    }
    if let (Some(found), Some((layout, words))) = (output("marlin_zeros"), &prepared.zeros) {
        let subject = Subject {
            width: prepared.weight_layout.tile_map().bits(),
            ..stack.subject(
                "marlin_zeros",
                found,
                words.clone(),
                Box::new(*layout),
                variants::zeros(&context),
            )
        };
        reports.push(subject.judge());
    }
    if let (Some(found), Some(bias)) = (output("marlin_bias"), &prepared.bias) {
        let layout = crate::layouts::marlin::ScaleLayout::bias(shape.size_n, quant.dtype)?;
        let candidates = variants::bias(&context);
        let subject = Subject {
            shape: [1, shape.size_n],
            ..stack.subject(
                "marlin_bias",
                found,
                bias.iter_bits().collect(),
                Box::new(layout),
                candidates,
            )
        };
        reports.push(subject.judge());
    }
    let bits = |x: f32| x.to_bits();
    if let (Some(found), Some(scales)) = (output("marlin_global_scale"), &prepared.global_scale) {
        let expected = scales.iter().copied().map(bits).collect();
        let candidates = variants::global_scale(&context);
        reports.push(stack.list("marlin_global_scale", found, expected, candidates).judge());
    }
    if let (Some(found), Some(scale)) = (output("input_global_scale"), prepared.input_global_scale)
    {
        let expected = vec![bits(scale); found.len()];
        let candidates = variants::input_global_scale(&context);
        reports.push(stack.list("input_global_scale", found, expected, candidates).judge());
    }
    if let Some(sorted) = &prepared.sorted {
        if let Some(found) = output("g_idx_sort_indices") {
            let mut expected = Elements::new();
            let mut note = None;
            for (w, s) in weights.iter().zip(sorted) {
                let crate::weight::Groups::Indexed { g_idx, .. } = &w.groups else { continue };
                let stable = act_order::sort(g_idx).perm;
                if stable != s.perm {
                    note = Some("sorts g_idx, in another order than the stable one".to_owned());
                }
                expected.extend(&s.perm);
            }
            let candidates = variants::sort_indices(&context);
            let mut report = stack.list("g_idx_sort_indices", found, expected, candidates).judge();
            debug_assert!(note.is_none() || report.verdict == Verdict::Pass);
            report.note = note;
            reports.push(report);
        }
        if let Some(found) = output("sorted_g_idx") {
            let expected = sorted.iter().flat_map(|s| s.g_idx.iter().copied()).collect();
            let candidates = variants::sorted_g_idx(&context);
            reports.push(stack.list("sorted_g_idx", found, expected, candidates).judge());
        }
    }
    Ok(reports)
}

/// Parameters that all outputs of a stack share.
struct Stack<'p> {
    prefix: &'static str,
    prepared: &'p Prepared,
    shape: Shape,
}

impl<'p> Stack<'p> {
    /// An output's name in the case.
    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// An output with the shape of scales; the caller overrides differing fields.
    fn subject<'c>(
        &self,
        name: &str,
        found: &'c Tensor<'c>,
        expected: Elements,
        layout: Box<dyn Layout + 'c>,
        candidates: Vec<Candidate<'c>>,
    ) -> Subject<'c> {
        let rows = match name {
            "marlin_qweight" => self.shape.size_k,
            _ => self.prepared.groups(),
        };
        Subject {
            name: self.name(name),
            width: found.dtype().bits() as u32,
            found,
            expected,
            layout,
            shape: [rows, self.shape.size_n],
            rows: Rows::Group,
            experts: self.prepared.experts,
            stacked: !self.prefix.is_empty(),
            candidates,
        }
    }

    /// An output without a matrix structure.
    fn list<'c>(
        &self,
        name: &str,
        found: &'c Tensor<'c>,
        expected: Elements,
        candidates: Vec<Candidate<'c>>,
    ) -> Subject<'c> {
        let plain = Plain { len: expected.len(), width: 32 };
        Subject {
            rows: Rows::List,
            shape: [1, expected.len()],
            experts: 1,
            stacked: false,
            ..self.subject(name, found, expected, Box::new(plain), candidates)
        }
    }
}
