//! Verdicts on packed matrices: the outputs of `linear` and `moe` in a kernel's layout.

use super::variants::{self, Context};
use crate::judge::compare::{Candidate, Elements, Plain, Rows, Subject};
use crate::judge::{OutputReport, Verdict};
use crate::layouts::Layout;
use crate::layouts::marlin::{InputDtype, Options, Prepared, ScaleLayout, prepare};
use crate::num::dims::Shape;
use crate::num::tensor::Tensor;
use crate::ops::case::Case;
use crate::ops::quant::QuantConfig;
use crate::ops::quant::source::Source;
use crate::weight::Groups;
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

    let stack = Stack { prefix, prepared: &prepared, shape };
    let outputs = Outputs { case, quant, stack, context: &context };
    let reports = [
        outputs.qweight(),
        outputs.scales(),
        outputs.zeros(),
        outputs.bias()?,
        outputs.global_scale(),
        outputs.input_global_scale(),
        outputs.sort_indices(),
        outputs.sorted_g_idx(),
    ];
    Ok(reports.into_iter().flatten().collect())
}

/// The outputs of one matrix or stack of experts. Each method judges one; `None` where the case has no
/// such output.
struct Outputs<'o, 'c> {
    case: &'o Case<'c>,
    quant: &'o QuantConfig,
    stack: Stack<'o>,
    context: &'o Context<'o>,
}

impl<'o, 'c: 'o> Outputs<'o, 'c> {
    fn found(&self, name: &str) -> Option<&'o Tensor<'c>> {
        self.case.output(&self.stack.name(name))
    }

    fn qweight(&self) -> Option<OutputReport> {
        let name = "marlin_qweight";
        let (found, prepared) = (self.found(name)?, self.context.prepared);
        let (layout, expected) = (prepared.weight_layout, prepared.qweight_words().into_owned());
        let candidates = variants::qweight(self.context);
        let subject = Subject {
            rows: Rows::K,
            width: layout.tile_map().bits(),
            ..self.stack.subject(name, found, expected, Box::new(layout), candidates)
        };
        Some(subject.judge())
    }

    fn scales(&self) -> Option<OutputReport> {
        let name = "marlin_scales";
        let (found, prepared) = (self.found(name)?, self.context.prepared);
        let full_name = self.stack.name(name);
        let of_rank = variants::scales_of_a_rank(self.context, self.quant, &full_name, found);
        Some(of_rank.unwrap_or_else(|| {
            let expected: Elements = prepared.scales.iter_bits().collect();
            let layout = variants::scale_layout(self.context);
            let candidates = variants::scales(self.context);
            self.stack.subject(name, found, expected, Box::new(layout), candidates).judge()
        }))
    }

    fn zeros(&self) -> Option<OutputReport> {
        let name = "marlin_zeros";
        let (found, prepared) = (self.found(name)?, self.context.prepared);
        let (layout, words) = prepared.zeros.as_ref()?;
        let candidates = variants::zeros(self.context);
        let subject = Subject {
            width: prepared.weight_layout.tile_map().bits(),
            ..self.stack.subject(
                name,
                found,
                words.iter().copied().collect(),
                Box::new(*layout),
                candidates,
            )
        };
        Some(subject.judge())
    }

    fn bias(&self) -> Result<Option<OutputReport>> {
        let (name, size_n) = ("marlin_bias", self.stack.shape.size_n);
        let Some((found, bias)) = self.found(name).zip(self.context.prepared.bias.as_ref()) else {
            return Ok(None);
        };
        let layout = ScaleLayout::bias(size_n, self.quant.dtype)?;
        let (expected, candidates) = (bias.iter_bits().collect(), variants::bias(self.context));
        let subject = Subject {
            shape: [1, size_n],
            ..self.stack.subject(name, found, expected, Box::new(layout), candidates)
        };
        Ok(Some(subject.judge()))
    }

    fn global_scale(&self) -> Option<OutputReport> {
        let name = "marlin_global_scale";
        let (found, scales) = (self.found(name)?, self.context.prepared.global_scale.as_ref()?);
        let expected = scales.iter().map(|scale| scale.to_bits()).collect();
        let candidates = variants::global_scale(self.context);
        Some(self.stack.list(name, found, expected, candidates).judge())
    }

    fn input_global_scale(&self) -> Option<OutputReport> {
        let name = "input_global_scale";
        let (found, scale) = (self.found(name)?, self.context.prepared.input_global_scale?);
        let expected = vec![scale.to_bits(); found.len()];
        let candidates = variants::input_global_scale(self.context);
        Some(self.stack.list(name, found, expected, candidates).judge())
    }

    fn sort_indices(&self) -> Option<OutputReport> {
        let name = "g_idx_sort_indices";
        let (sorted, found) = (self.context.prepared.sorted.as_ref()?, self.found(name)?);
        let mut expected = Elements::new();
        let mut note = None;
        for (weight, sorted) in self.context.weights.iter().zip(sorted) {
            let Groups::Indexed { g_idx, .. } = &weight.groups else { continue };
            if act_order::sort(g_idx).perm != sorted.perm {
                note = Some("sorts g_idx, in another order than the stable one".to_owned());
            }
            expected.extend(&sorted.perm);
        }
        let candidates = variants::sort_indices(self.context);
        let mut report = self.stack.list(name, found, expected, candidates).judge();
        debug_assert!(note.is_none() || report.verdict == Verdict::Pass);
        report.note = note;
        Some(report)
    }

    fn sorted_g_idx(&self) -> Option<OutputReport> {
        let name = "sorted_g_idx";
        let (sorted, found) = (self.context.prepared.sorted.as_ref()?, self.found(name)?);
        let expected = sorted.iter().flat_map(|s| s.g_idx.iter().copied()).collect();
        let candidates = variants::sorted_g_idx(self.context);
        Some(self.stack.list(name, found, expected, candidates).judge())
    }
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
