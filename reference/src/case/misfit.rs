//! Outputs whose type or shape the configuration does not allow. The kernel under test wrote them,
//! so they fail with a verdict instead of an error.

use super::TensorRule;
use super::{Case, ParallelStyle};
use crate::Result;
use crate::num::dims::LogicalK;
use crate::num::tensor::Tensor;

/// What is wrong with an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MisfitKind {
    /// Only the element type.
    Dtype,
    /// The shape, whatever the element type.
    Shape,
    /// The scales of an act-order rank were cut to the groups of its own rows.
    ShardedScales,
    /// The scales of a rank were not cut along K although its rows were.
    UnshardedScales,
}

/// An output whose element type or shape the configuration does not allow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misfit {
    /// Bare name.
    pub name: String,
    /// What is wrong.
    pub kind: MisfitKind,
    /// Element type and shape found: `F16 [2, 64]`.
    pub found: String,
    /// Element types and shape expected.
    pub expected: String,
}

impl Misfit {
    fn of(name: &str, tensor: &Tensor<'_>, rule: &TensorRule) -> Option<Self> {
        let typed = rule.dtypes.contains(&tensor.dtype());
        let shaped = rule.fits(tensor.shape());
        if typed && shaped {
            return None;
        }
        let kind = if shaped { MisfitKind::Dtype } else { MisfitKind::Shape };
        Some(Self::new(name, kind, tensor, rule, rule.demanded()))
    }

    fn new(
        name: &str,
        kind: MisfitKind,
        tensor: &Tensor<'_>,
        rule: &TensorRule,
        shape: String,
    ) -> Self {
        let types: Vec<_> = rule.dtypes.iter().map(|d| d.name()).collect();
        Self {
            name: name.to_owned(),
            kind,
            found: format!("{} {:?}", tensor.dtype(), tensor.shape()),
            expected: format!("{} {shape}", types.join(" or ")),
        }
    }
}

impl Case<'_> {
    /// The outputs whose element type or shape the configuration and the inputs do not allow, in
    /// the order of their names.
    ///
    /// # Errors
    /// As [`CaseConfig::rules`](super::CaseConfig::rules).
    pub fn misfits(&self) -> Result<Vec<Misfit>> {
        let rules = self.config.rules(self.local_experts())?;
        let mut misfits = Vec::new();
        for (name, tensor) in &self.outputs {
            let full = |rule: &&TensorRule| rule.name.strip_prefix("out.") == Some(name);
            let Some(rule) = rules.iter().find(full) else { continue };
            let mut misfit = Misfit::of(name, tensor, rule);
            if let Some(misfit) = misfit.as_mut().filter(|_| self.has_all_groups(name, tensor)) {
                misfit.kind = MisfitKind::UnshardedScales;
            }
            misfits.extend(misfit.or_else(|| self.unlike_input(name, tensor, rule)));
        }
        Ok(misfits)
    }

    /// Checks sizes that follow only from the inputs: rows of a router's outputs, and rows of the
    /// scales that an act-order rank keeps for the whole matrix.
    fn unlike_input(&self, name: &str, tensor: &Tensor<'_>, rule: &TensorRule) -> Option<Misfit> {
        let rows = |kind, rows: usize, rest: &[usize]| {
            let shape: Vec<usize> = std::iter::once(rows).chain(rest.iter().copied()).collect();
            Misfit::new(name, kind, tensor, rule, format!("{shape:?}"))
        };
        let (&first, rest) = tensor.shape().split_first()?;
        if let Some(expected) = self.config.operation().output_rows(&self.inputs) {
            return (first != expected).then(|| rows(MisfitKind::Shape, expected, rest));
        }
        let prefix = name.strip_suffix("marlin_scales")?;
        let input = self.inputs.get(&format!("{prefix}scales"))?;
        if input.shape() == tensor.shape() {
            return None;
        }
        let found = tensor.shape().iter().rev().nth(1).copied();
        let sharded = found.is_some() && found == self.groups_of_rank(prefix);
        let kind = if sharded { MisfitKind::ShardedScales } else { MisfitKind::Shape };
        Some(Misfit::new(name, kind, tensor, rule, format!("{:?}", input.shape())))
    }

    /// Whether scales of a row-parallel rank without act-order have the groups of the whole matrix.
    fn has_all_groups(&self, name: &str, tensor: &Tensor<'_>) -> bool {
        let operation = self.config.operation();
        let (Some(quant), Some(size_k)) = (operation.quant(), operation.size_k("")) else {
            return false;
        };
        let cut = quant.tensor_parallel.filter(|tp| tp.style == ParallelStyle::Row && tp.size > 1);
        let (Some(tp), "marlin_scales") = (cut, name) else { return false };
        let groups = quant.group_size.groups(LogicalK(size_k));
        let found = tensor.shape().iter().rev().nth(1).copied();
        !quant.has_act_order()
            && groups.is_ok_and(|own| found == own.checked_mul(tp.size).filter(|all| *all > own))
    }

    /// Groups that the rank's own rows of an act-order matrix would fill.
    fn groups_of_rank(&self, prefix: &str) -> Option<usize> {
        let operation = self.config.operation();
        let quant = operation.quant().filter(|q| q.has_act_order())?;
        quant.group_size.groups(LogicalK(operation.size_k(prefix)?)).ok()
    }
}
