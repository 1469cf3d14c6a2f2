//! Stages of a block around its router and experts, by the names of their tensors.

use super::key::Key;
use crate::num::tensor::{DType, Tensor};
use crate::{Error, Result};

/// A place in the block where stages may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Hidden states to the router's input.
    RouterInput,
    /// Hidden states to the routed experts' input.
    ExpertInput,
    /// The output of each routed expert, before its weight.
    ExpertOutput,
    /// The sum of the routed experts, before the shared expert is added.
    RoutedOutput,
    /// The block's output.
    Output,
}

impl Path {
    /// All paths.
    pub const ALL: [Self; 5] = [
        Self::RouterInput,
        Self::ExpertInput,
        Self::ExpertOutput,
        Self::RoutedOutput,
        Self::Output,
    ];
}

/// A stage of a family's block. Names are relative to the experts' parent, or to the layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum StageRule {
    /// The module's weight, and its bias if there is one.
    Linear(&'static str),
    /// As [`StageRule::Linear`], if the checkpoint has the module.
    LinearIfPresent(&'static str),
    /// x / √(mean of x² + ε), times the module's weight.
    Norm {
        /// The module; `None` for a norm without weights.
        module: Option<&'static str>,
        /// ε.
        eps: Key<f32>,
        /// Added to the weight.
        weight_offset: f32,
        /// Whether the weight multiplies before the norm.
        weight_first: bool,
    },
    /// Times the tensor of this name.
    Scale(&'static str),
    /// Times H^−½.
    RootOfHidden,
    /// GELU by erf.
    Gelu,
}

impl StageRule {
    /// A norm with ε in `rms_norm_eps`, whose default is `eps`.
    pub(super) const fn norm(module: Option<&'static str>, eps: f32) -> Self {
        let eps = Key::new(&["rms_norm_eps"], eps);
        Self::Norm { module, eps, weight_offset: 0.0, weight_first: false }
    }
}

/// A stage with its tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundStage {
    /// The stage.
    pub rule: StageRule,
    /// Weight and bias of a linear stage, or the vector of another one, with the module's name.
    pub tensors: Vec<(String, Tensor<'static>)>,
    /// Features after the stage.
    pub width: usize,
}

/// The stages of `rules` after `hidden` features; `find` looks up a tensor by its name.
pub(super) fn read(
    rules: &[(Path, &[StageRule])],
    path: Path,
    find: &dyn Fn(&str) -> Option<Tensor<'static>>,
    hidden: usize,
) -> Result<Vec<FoundStage>> {
    let mut width = hidden;
    let mut all = Vec::new();
    let own = rules.iter().filter(|(p, _)| *p == path).flat_map(|(_, stages)| *stages);
    for rule in own.copied() {
        let need = |name: &str| -> Result<Tensor<'static>> {
            let tensor = find(name).ok_or_else(|| Error::missing(name, "the block"))?;
            tensor.expect_dtype(&[DType::F32, DType::F16, DType::BF16])?;
            Ok(tensor)
        };
        let vector = |name: String| -> Result<Vec<(String, Tensor<'static>)>> {
            let tensor = need(&name)?;
            tensor.expect_shape(&[width])?;
            Ok(vec![(name, tensor)])
        };
        let (tensors, after) = match rule {
            StageRule::Linear(module) | StageRule::LinearIfPresent(module) => {
                let name = format!("{module}.weight");
                if matches!(rule, StageRule::LinearIfPresent(_)) && find(&name).is_none() {
                    continue;
                }
                let weight = need(&name)?;
                let [size_n, size_k] = weight.dims2()?;
                if size_k != width {
                    let expected = format!("[N, {width}]");
                    return Err(Error::shape(name, &[size_n, size_k], expected));
                }
                let bias = format!("{module}.bias");
                let mut tensors = vec![(name, weight)];
                if find(&bias).is_some() {
                    let tensor = need(&bias)?;
                    tensor.expect_shape(&[size_n])?;
                    tensors.push((bias, tensor));
                }
                (tensors, size_n)
            }
            StageRule::Norm { module: Some(module), .. } => {
                (vector(format!("{module}.weight"))?, width)
            }
            StageRule::Scale(name) => (vector(name.to_owned())?, width),
            StageRule::Norm { module: None, .. } | StageRule::RootOfHidden | StageRule::Gelu => {
                (Vec::new(), width)
            }
        };
        all.push(FoundStage { rule, tensors, width: after });
        width = after;
    }
    Ok(all)
}
