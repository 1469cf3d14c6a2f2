//! Reads the inputs of a case as weights.

use crate::formats::transpose_words;
use crate::num::dims::Shape;
use crate::num::tensor::Tensor;
use crate::ops::case::Case;
use crate::ops::quant::{CheckpointFormat as F, QuantConfig};
use crate::weight::{Codes, Groups, Table, Weight};
use crate::{Result, act_order};

/// The inputs of one matrix or one stack of experts, as the case names them.
pub struct Source<'c> {
    case: &'c Case<'c>,
    quant: &'c QuantConfig,
    /// Empty, `w13_` or `w2_`.
    prefix: &'static str,
    shape: Shape,
    stacked: bool,
}

impl<'c> Source<'c> {
    /// The matrices of `shape` whose inputs begin with `prefix`: empty for the one of a `linear`
    /// case, `w13_` or `w2_` for a layer's experts.
    pub fn new(
        case: &'c Case<'c>,
        quant: &'c QuantConfig,
        prefix: &'static str,
        shape: Shape,
    ) -> Self {
        Self { case, quant, prefix, shape, stacked: !prefix.is_empty() }
    }

    /// Number of matrices.
    ///
    /// # Errors
    /// [`Error::Missing`](crate::Error::Missing) without the input.
    pub fn experts(&self) -> Result<usize> {
        let name = match self.quant.checkpoint_format {
            F::Int(format) => format.names.weight,
            _ => "weight",
        };
        Ok(if self.stacked { self.input(name)?.shape()[0] } else { 1 })
    }

    fn input(&self, name: &str) -> Result<&'c Tensor<'c>> {
        self.case.input(&format!("{}{name}", self.prefix))
    }

    /// Part of an input that belongs to one expert.
    fn part(&self, name: &str, expert: usize) -> Result<Tensor<'c>> {
        let tensor = self.input(name)?;
        if self.stacked { tensor.index0(expert) } else { Ok(tensor.clone()) }
    }

    /// The matrices, in the order of this rank's experts.
    ///
    /// # Errors
    /// Returns an error for missing or invalid inputs.
    pub fn weights(&self) -> Result<Vec<Weight<'c>>> {
        (0..self.experts()?).map(|e| self.weight(e)).collect()
    }

    fn weight(&self, expert: usize) -> Result<Weight<'c>> {
        let (q, shape) = (self.quant, self.shape);
        let part = |name| self.part(name, expert);
        let bits = if q.weight_type.size_bits() <= 4 { 4 } else { 8 };
        let (codes, scales, zeros) = match q.checkpoint_format {
            F::Int(format) => {
                let codes = format.codes(bits, shape, owned_words(&part(format.names.weight)?))?;
                let scales = Table::from_tensor(&part(format.names.scales)?, q.dtype)?;
                let zeros = match q.has_zero_points() {
                    true => {
                        let words = owned_words(&part(format.names.zeros)?);
                        Some(format.zeros(q.weight_type, scales.rows(), shape.size_n, &words)?)
                    }
                    false => None,
                };
                (codes, scales, zeros)
            }
            F::Fp8 | F::Block(_) => {
                // Codes run along K in memory, so the words are those of the packed form,
                // transposed.
                let bytes = part("weight")?;
                let words = bytemuck::allocation::pod_collect_to_vec(bytes.bytes());
                let words =
                    transpose_words(&words, shape.size_n, shape.size_k * bits as usize / 32);
                let scales = part("weight_scale")?;
                let scales = match q.checkpoint_format {
                    F::Block(format) => Table::from_tensor(&scales, format.scale)?.transposed(),
                    _ => Table::from_tensor(&scales, q.dtype)?,
                };
                (Codes::from_words(bits, shape, words)?, scales, None)
            }
        };
        let groups = if q.has_act_order() {
            let g_idx = part("g_idx")?;
            let g_idx = g_idx.elements::<u32>().into_owned();
            Groups::Indexed { g_idx, group_size: q.group_size }
        } else {
            Groups::Uniform(q.group_size)
        };
        let global_scale = match q.checkpoint_format.has_global_scale() {
            true => Some(self.input("weight_global_scale")?.elements::<f32>()[expert]),
            false => None,
        };
        let bias = match q.has_bias {
            true => Some(Table::from_tensor(&part("bias")?, q.dtype)?),
            false => None,
        };
        let name = match self.stacked {
            true => format!("{}[{expert}]", self.prefix.trim_end_matches('_')),
            false => "weight".to_owned(),
        };
        let ty = q.weight_type;
        let weight = Weight { name, ty, codes, scales, zeros, groups, global_scale, bias };
        weight.validate()?;
        Ok(weight)
    }

    /// The permutations that the case's own outputs state, and whether all of them sort. `None`
    /// without act-order or when the case states none.
    pub(super) fn stated_perms(&self) -> Result<Option<(Vec<Vec<u32>>, bool)>> {
        let name = format!("{}g_idx_sort_indices", self.prefix);
        let (true, Some(stated)) = (self.quant.has_act_order(), self.case.output(&name)) else {
            return Ok(None);
        };
        let size_k = self.shape.size_k;
        let stated: Vec<Vec<u32>> =
            stated.elements::<u32>().chunks(size_k.max(1)).map(<[u32]>::to_vec).collect();
        let mut sorts = true;
        for (expert, perm) in stated.iter().enumerate() {
            let g_idx = self.part("g_idx", expert)?;
            sorts &= act_order::expect_sorting(&g_idx.elements::<u32>(), perm).is_ok();
        }
        Ok(Some((stated, sorts)))
    }

    /// The order of each matrix's rows in the kernel's loop: the permutation of the case if it
    /// sorts, otherwise the stable one. `None` without act-order.
    ///
    /// # Errors
    /// Returns an error for a missing `g_idx`.
    pub fn orders(&self, weights: &[Weight<'_>]) -> Result<Option<Vec<Vec<u32>>>> {
        if let Some((stated, true)) = self.stated_perms()? {
            return Ok(Some(stated));
        }
        let sorted = |w: &Weight<'_>| match &w.groups {
            Groups::Indexed { g_idx, .. } => Some(act_order::sort(g_idx).perm),
            Groups::Uniform(_) => None,
        };
        Ok(weights.iter().map(sorted).collect())
    }
}

/// The tensor's 32-bit words.
fn owned_words(tensor: &Tensor<'_>) -> Vec<u32> {
    tensor.elements::<u32>().into_owned()
}
