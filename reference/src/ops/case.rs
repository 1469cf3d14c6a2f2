//! A case: the inputs, the configuration and the outputs of one operation.

use std::collections::BTreeMap;

use super::{CaseConfig, Op};
use crate::judge::compare::elements;
use crate::num::scalar::float_type;
use crate::num::tensor::Tensor;
use crate::{Error, Result};

/// The outputs of products and of what follows them in a layer. Other outputs, such as the scales of
/// quantizers, are infinite for a reason.
const ARITHMETIC: [&str; 4] = ["y", "gate_up", "activated", "down"];

/// One operation's inputs, configuration and outputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Case<'a> {
    /// The operation.
    pub op: Op,
    /// Free text.
    pub name: String,
    /// Typed configuration.
    pub config: CaseConfig,
    /// The configuration in the file, with its remarks. Empty for a case that was not read from a
    /// file.
    pub raw_config: serde_json::Map<String, serde_json::Value>,
    /// What produced the outputs.
    pub provenance: String,
    /// Inputs by bare name (`qweight`); the tensors keep their full one (`in.qweight`).
    pub inputs: BTreeMap<String, Tensor<'a>>,
    /// Outputs by bare name; one that is absent is not checked.
    pub outputs: BTreeMap<String, Tensor<'a>>,
}

impl<'a> Case<'a> {
    /// A case without tensors.
    pub fn new(name: impl Into<String>, config: CaseConfig, provenance: impl Into<String>) -> Self {
        Self {
            op: config.op(),
            name: name.into(),
            config,
            raw_config: serde_json::Map::new(),
            provenance: provenance.into(),
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
        }
    }

    /// A required input, by bare name.
    pub fn input(&self, name: &str) -> Result<&Tensor<'a>> {
        self.inputs
            .get(name)
            .ok_or_else(|| Error::missing(format!("in.{name}"), format!("operation `{}`", self.op)))
    }

    /// An output, by bare name.
    pub fn output(&self, name: &str) -> Option<&Tensor<'a>> {
        self.outputs.get(name)
    }

    /// The share of finite values in an output of arithmetic (a product, or what follows it in a
    /// layer); `None` for other outputs, and for one without values.
    pub(crate) fn finite_share(&self, name: &str) -> Option<f64> {
        let output = self.output(name).filter(|_| ARITHMETIC.contains(&name))?;
        let ty = float_type(output.dtype())?;
        let bits = elements(output);
        let finite = bits.iter().filter(|&&b| ty.to_f64(b).is_finite()).count();
        (!bits.is_empty()).then(|| finite as f64 / bits.len() as f64)
    }

    /// Whether each row of `in.x` holds an infinity or NaN.
    pub(crate) fn has_no_finite_row(&self) -> bool {
        let Some(x) = self.inputs.get("x") else { return false };
        let (Some(ty), Some(&cols)) = (float_type(x.dtype()), x.shape().last()) else {
            return false;
        };
        let bits = elements(x);
        let is_open = |row: &[u32]| row.iter().any(|&b| !ty.to_f64(b).is_finite());
        cols > 0 && bits.chunks(cols).all(is_open)
    }

    /// Adds an input under its bare name.
    pub fn add_input(&mut self, name: &str, tensor: Tensor<'a>) {
        self.inputs.insert(name.to_owned(), tensor.renamed(format!("in.{name}")));
    }

    /// Adds an output under its bare name.
    pub fn add_output(&mut self, name: &str, tensor: Tensor<'a>) {
        self.outputs.insert(name.to_owned(), tensor.renamed(format!("out.{name}")));
    }

    /// The experts whose weights a MoE case holds: the leading axis of w13.
    pub(crate) fn local_experts(&self) -> usize {
        let first = |name| self.inputs.get(name).and_then(|t| t.shape().first().copied());
        first("w13_qweight").or_else(|| first("w13_weight")).unwrap_or(0)
    }
}
