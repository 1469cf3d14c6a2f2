//! Stages around the router and the experts, on rows of activations: norms, projections, factors.

use std::collections::BTreeMap;

use marlinspike::moe::activation::Function;
use marlinspike::moe::block::{Near, Stage, apply_stages};
use marlinspike::moe::families::{BlockNumbers, FoundStage};
use marlinspike::num::scalar::ScalarType;
use marlinspike::{Error, Result};

use super::dense::{Dense, Dot, round, values};

/// The stages at one place of a block, with their tensors.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stages {
    steps: Vec<Step>,
    stages: Vec<Stage>,
    tensors: BTreeMap<String, Vec<f64>>,
    /// Features before the first stage.
    before: usize,
    /// Features after the last one.
    after: usize,
}

/// One stage.
#[derive(Debug, Clone)]
enum Step {
    Linear {
        weight: Dense,
        bias: Option<Vec<f32>>,
    },
    /// The weight has the offset of the rule in it.
    Norm {
        eps: f64,
        weight: Option<Vec<f64>>,
        weight_first: bool,
    },
    Scale(Vec<f64>),
    Multiply(f64),
    Gelu,
}

impl Stages {
    /// The stages `found` of a block of `hidden` features, after `before` features.
    ///
    /// # Errors
    /// As [`values`], for each tensor; [`Error::Unsupported`] for a stage that is not known.
    pub(crate) fn new(
        found: &[FoundStage],
        numbers: &BlockNumbers,
        hidden: usize,
        before: usize,
    ) -> Result<Self> {
        let mut all = Self { before, after: before, ..Self::default() };
        for found in found {
            let mut own = Vec::with_capacity(found.tensors.len());
            for (name, tensor) in &found.tensors {
                let numbers = values(tensor)?;
                all.tensors.insert(name.clone(), widened(&numbers));
                own.push(numbers);
            }
            let stage = Stage::of(found, numbers, hidden);
            all.steps.push(Step::new(&stage, own, all.after)?);
            all.stages.push(stage);
            all.after = found.width;
        }
        Ok(all)
    }

    /// Whether there is no stage.
    pub(crate) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Features after the last stage.
    pub(crate) fn width(&self) -> usize {
        self.after
    }

    /// Rows `x`, every stage rounded to `ty`.
    pub(crate) fn rows(&self, x: &[f32], ty: ScalarType, dot: Dot) -> Vec<f32> {
        if self.is_empty() {
            return x.to_vec();
        }
        x.chunks_exact(self.before).flat_map(|x| self.row(x.to_vec(), ty, dot)).collect()
    }

    /// One row, every stage rounded to `ty`.
    pub(crate) fn row(&self, x: Vec<f32>, ty: ScalarType, dot: Dot) -> Vec<f32> {
        self.steps.iter().fold(x, |x, step| step.row(&x, ty, dot))
    }

    /// One row, with the largest error of an implementation whose stages have type `ty`.
    pub(crate) fn near(&self, x: Vec<Near>, ty: ScalarType) -> Vec<Near> {
        apply_stages(&self.stages, x, &|name| self.tensors.get(name).cloned(), ty)
    }
}

impl Step {
    /// The step of a stage after `width` features, with its tensors in the order of the rule.
    fn new(stage: &Stage, tensors: Vec<Vec<f32>>, width: usize) -> Result<Self> {
        let mut tensors = tensors.into_iter();
        let first = tensors.next();
        Ok(match stage {
            Stage::Linear { .. } => Self::Linear {
                weight: Dense { values: first.unwrap_or_default(), size_k: width },
                bias: tensors.next(),
            },
            Stage::RmsNorm { eps, weight_offset, weight_first, .. } => Self::Norm {
                eps: f64::from(*eps),
                weight: first.map(|w| {
                    w.into_iter().map(|w| f64::from(w) + f64::from(*weight_offset)).collect()
                }),
                weight_first: *weight_first,
            },
            Stage::Scale { .. } => Self::Scale(widened(&first.unwrap_or_default())),
            Stage::Multiply { factor } => Self::Multiply(f64::from(*factor)),
            Stage::Gelu {} => Self::Gelu,
            other => {
                return Err(Error::unsupported(format!("{other:?}"), "a stage around the experts"));
            }
        })
    }

    fn row(&self, x: &[f32], ty: ScalarType, dot: Dot) -> Vec<f32> {
        let each = |f: &dyn Fn(f64) -> f64| -> Vec<f32> {
            x.iter().map(|&x| round(ty, f(x.into()))).collect()
        };
        match self {
            Self::Linear { weight, bias } => {
                let mut y = weight.row(x, ty, dot);
                for (y, b) in y.iter_mut().zip(bias.iter().flatten()) {
                    *y = round(ty, f64::from(*y) + f64::from(*b));
                }
                y
            }
            Self::Norm { eps, weight: None, .. } => norm(x, *eps, ty, dot),
            Self::Norm { eps, weight: Some(w), weight_first: true } => {
                norm(&scaled(x, w, ty), *eps, ty, dot)
            }
            Self::Norm { eps, weight: Some(w), weight_first: false } => {
                scaled(&norm(x, *eps, ty, dot), w, ty)
            }
            Self::Scale(w) => scaled(x, w, ty),
            Self::Multiply(factor) => each(&|x| x * factor),
            Self::Gelu => each(&|x| Function::Gelu.exact(x, 1.0)),
        }
    }
}

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}

fn scaled(x: &[f32], weight: &[f64], ty: ScalarType) -> Vec<f32> {
    x.iter().zip(weight).map(|(&x, w)| round(ty, f64::from(x) * w)).collect()
}

/// x / √(mean of x² + ε).
fn norm(x: &[f32], eps: f64, ty: ScalarType, dot: Dot) -> Vec<f32> {
    let root = (dot(x, x) / x.len() as f64 + eps).sqrt();
    x.iter().map(|&x| round(ty, f64::from(x) / root)).collect()
}
