//! Expected outputs of `linear`, `moe` and `int4_fp8_preprocess`, as far as they are layouts.

use super::compare::{Candidate, Elements, Plain, Rows, Subject};
use super::variants::{self, Context};
use super::weights::Source;
use super::{OutputReport, Verdict};
use crate::case::{Case, CheckpointFormat, LinearConfig, MoeConfig, PreprocessConfig, QuantConfig};
use crate::dims::Shape;
use crate::layout::Layout;
use crate::layout::marlin::{
    InputDtype, Options, Prepared, int4_to_fp8_asymmetric, int4_to_fp8_symmetric, prepare,
};
use crate::tensor::Tensor;
use crate::{Result, act_order};

pub(crate) fn linear(case: &Case<'_>, c: &LinearConfig) -> Result<Vec<OutputReport>> {
    let shape = Shape::new(c.size_k, c.size_n);
    matrices(case, &c.quant, "", shape, c.scale_factor, None)
}

pub(crate) fn moe(case: &Case<'_>, c: &MoeConfig) -> Result<Vec<OutputReport>> {
    let (h, i) = (c.hidden_size, c.intermediate_size);
    let w13 = Shape::new(h, c.w13_size_n());
    let mut reports = matrices(case, &c.quant, "w13_", w13, c.scale_factor_w13, Some(i))?;
    reports.extend(matrices(case, &c.quant, "w2_", Shape::new(i, h), c.scale_factor_w2, None)?);
    Ok(reports)
}

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
fn matrices(
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
    // A valid order of the case's own is followed, so that only real differences are left.
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
        // Without an up projection, halves of N have no names.
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
        let layout = crate::layout::marlin::ScaleLayout::bias(shape.size_n, quant.dtype)?;
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

/// What the outputs of one stack have in common.
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

    /// An output of scales' shape; the caller overrides what differs.
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

/// `int4_fp8_preprocess`: codes rewritten for fp8 activations, in the packing of the input.
pub(crate) fn preprocess(case: &Case<'_>, c: &PreprocessConfig) -> Result<Vec<OutputReport>> {
    let Some(found) = case.output("qweight") else { return Ok(Vec::new()) };
    let input = case.input("qweight")?.elements::<u32>().into_owned();
    let symmetric = int4_to_fp8_symmetric(&input);
    let expected = match c.checkpoint_format {
        CheckpointFormat::Awq => {
            let zeros = case.input("qzeros")?.elements::<u32>();
            int4_to_fp8_asymmetric(&input, &zeros, c.size_n / 8)?
        }
        _ => symmetric.clone(),
    };
    let candidate =
        |id, text: &str, made: Elements| Candidate::new(id, text, move |()| Some(made.clone()));
    let candidates = vec![
        candidate("preprocess-missing", "the codes were not rewritten", input.clone()),
        candidate(
            "preprocess-twice",
            "the codes were rewritten twice",
            int4_to_fp8_symmetric(&expected),
        ),
        candidate("preprocess-symmetric", "the zero points were ignored: 8 was used", symmetric),
    ];
    let layout = Plain { len: expected.len(), width: 4 };
    let subject = Subject {
        name: "qweight".to_owned(),
        found,
        shape: [1, expected.len()],
        expected,
        layout: Box::new(layout),
        rows: Rows::List,
        width: 4,
        experts: 1,
        stacked: false,
        candidates,
    };
    Ok(vec![subject.judge()])
}
