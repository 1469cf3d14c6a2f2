//! The tensors of a stack's experts, in the form that preparation takes.

use marlinspike::config::{FloatContainer, ScaleStrategy, Scheme};
use marlinspike::formats::global_scale;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::weight::Weight;
use marlinspike::{Error, Result};
use rayon::prelude::*;

use crate::load::preparation::Preparation;
use crate::load::{self, Reading};
use crate::model::bind::{self, Bound, Part};
use crate::model::layers::Stack;
use crate::model::{Model, ModelError, values};

/// A stack with the tensors of its experts.
pub(super) struct Matrices<'s> {
    pub(super) module: &'s str,
    pub(super) scheme: &'s Scheme,
    pub(super) experts: Vec<Vec<Bound>>,
}

impl<'s> Matrices<'s> {
    pub(super) fn bind(model: &Model<'_>, stack: &'s Stack) -> Result<Self, ModelError> {
        let of = |row: &Vec<_>| row.iter().map(|m| Bound::find(model, &stack.scheme, m)).collect();
        let experts: Vec<Vec<Bound>> = stack.experts.iter().map(of).collect::<Result<_, _>>()?;
        bind::expect_alike(&experts, Bound::shape_difference)
            .map_err(|reason| ModelError::module(&stack.module, reason))?;
        Ok(Self { module: &stack.module, scheme: &stack.scheme, experts })
    }

    pub(super) fn size_k(&self) -> usize {
        self.experts[0][0].shape.size_k
    }

    /// Columns of an expert's matrices together.
    pub(super) fn size_n(&self) -> usize {
        self.experts[0].iter().map(|b| b.shape.size_n).sum()
    }

    /// Every expert's weight in the hub.
    pub(super) fn weights(
        &self,
        model: &Model<'_>,
        preparation: Preparation,
    ) -> Result<Vec<Weight<'static>>> {
        let one = |matrices: &Vec<Bound>| {
            let size_k = matrices[0].shape.size_k;
            let n: Vec<_> = matrices.iter().map(|b| 0..b.shape.size_n).collect();
            let size_n = n.iter().map(|r| r.len()).sum();
            let reading = Reading {
                scheme: self.scheme,
                n: &n,
                group_size: bind::group_size(self.scheme, size_k),
                act_order: bind::act_order(self.scheme),
                preparation,
            };
            Ok(load::load(model, reading, matrices, &(0..size_k), &(0..size_n))?.into_owned())
        };
        self.experts.par_iter().map(one).collect()
    }

    /// `part` of expert `e`, its matrices one after the other.
    fn part<'m>(&self, model: &Model<'m>, e: usize, part: Part) -> Result<Tensor<'m>> {
        let matrices = &self.experts[e];
        let n: Vec<_> = matrices.iter().map(|b| 0..b.shape.size_n).collect();
        let found = load::merged(model, matrices, part, &(0..matrices[0].shape.size_k), &n)?;
        found.ok_or_else(|| self.missing(&matrices[0], part))
    }

    /// The error for a matrix without `part`, by the name that its tensor would have.
    fn missing(&self, matrix: &Bound, part: Part) -> Error {
        let of_other = |b: &Bound| Some(b.get(part)?.name.rsplit('.').next()?.to_owned());
        let other = self.experts.iter().flatten().find_map(of_other);
        let of_scheme = || {
            let binding = bind::bindings(self.scheme).into_iter().find(|b| b.part == part);
            binding.map_or("", |b| b.suffixes[0]).to_owned()
        };
        let suffix = other.unwrap_or_else(of_scheme);
        Error::missing(format!("{}.{suffix}", matrix.name), self.scheme.label())
    }

    /// `part` of every expert, `[experts, values]`, widened to f32.
    fn floats(&self, model: &Model<'_>, part: Part) -> Result<Vec<Vec<f32>>> {
        (0..self.experts.len()).map(|e| values::floats(&self.part(model, e, part)?)).collect()
    }

    /// The activations' scales of each expert's matrices, as multipliers.
    pub(super) fn input_scales(&self, model: &Model<'_>) -> Result<Vec<Vec<f32>>> {
        let of = |e: usize| -> Result<Vec<f32>> {
            let tensor = self.part(model, e, Part::InputScale)?;
            match self.scheme {
                Scheme::Block { container, .. } => {
                    global_scale::multipliers(&tensor, container.global_scale())
                }
                _ => {
                    let values = values::floats(&tensor)?;
                    self.expect_shared(e, &values)?;
                    match values.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
                        Some(i) => {
                            let expected = "a positive finite scale";
                            Err(Error::value(tensor.name(), &[i], values[i], expected))
                        }
                        None => Ok(values),
                    }
                }
            }
        };
        (0..self.experts.len()).map(of).collect()
    }

    /// The zero points of the activations of a linear layer's matrices.
    pub(super) fn input_zeros(&self, model: &Model<'_>) -> Result<Vec<i32>> {
        let tensor = self.part(model, 0, Part::InputZero)?;
        tensor.expect_dtype(&[DType::I8])?;
        Ok(tensor.elements::<i8>().iter().map(|&zero| zero.into()).collect())
    }

    /// The activations of w1 and w3 are the same, so upstream refuses scales of compressed-tensors that are
    /// more than 1e-5 apart.
    fn expect_shared(&self, e: usize, values: &[f32]) -> Result<()> {
        let ct = matches!(self.scheme, Scheme::Fp8(f) if f.container == FloatContainer::CompressedTensors);
        let apart = values.iter().position(|v| (v - values[0]).abs() > 1e-5);
        match (ct, apart) {
            (true, Some(i)) => {
                let own = self.experts[e].get(i).unwrap_or(&self.experts[e][0]);
                let first = &self.experts[e][0].name;
                let expected = format!("{} to within 1e-5, as `{first}` has it", values[0]);
                Err(Error::value(format!("{}.input_scale", own.name), &[], values[i], expected))
            }
            _ => Ok(()),
        }
    }

    /// Codes of all experts, `[experts, N, K]`.
    pub(super) fn codes(&self, model: &Model<'_>, name: &str) -> Result<Tensor<'static>> {
        let mut bytes = Vec::new();
        for e in 0..self.experts.len() {
            let tensor = self.part(model, e, Part::Weight)?;
            tensor.expect_dtype(&[DType::F8E4M3])?;
            bytes.extend_from_slice(tensor.bytes());
        }
        let shape = vec![self.experts.len(), self.size_n(), self.size_k()];
        Tensor::from_vec(name, DType::F8E4M3, shape, bytes)
    }

    /// Scales of all experts, in the form of [`Fp8Experts`](marlinspike::prepare::fp8::Fp8Experts).
    pub(super) fn scales(
        &self,
        model: &Model<'_>,
        name: &str,
        strategy: ScaleStrategy,
    ) -> Result<Tensor<'static>> {
        let (experts, each) = (self.experts.len(), self.experts[0].len());
        let mut shape = match strategy {
            ScaleStrategy::Tensor if each == 1 => vec![experts],
            ScaleStrategy::Tensor => vec![experts, each],
            ScaleStrategy::Channel => vec![experts, self.size_n(), 1],
            ScaleStrategy::Block { .. } => vec![experts],
        };
        if let ScaleStrategy::Block { .. } = strategy {
            let tensor = self.part(model, 0, Part::Scale)?;
            shape.extend(tensor.dims2()?);
        }
        let values = self.floats(model, Part::Scale)?.concat();
        let len: usize = shape.iter().product();
        if values.len() != len {
            let first = &self.experts[0][0].name;
            return Err(Error::shape(
                format!("{first}: scales of all experts"),
                &[values.len()],
                format!("{shape:?}"),
            ));
        }
        Tensor::from_vec(name, DType::F32, shape, values)
    }
}
