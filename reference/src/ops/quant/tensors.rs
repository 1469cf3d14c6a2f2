//! The tensors of a quantized matrix.

use crate::Result;
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::quant::{CheckpointFormat, QuantConfig};
use crate::ops::schema::{Dim, TensorRule, rule, stored};
use crate::ops::tensors::{F32, I32};

/// The tensors of one quantized matrix: names, types and shapes without a leading axis.
pub(crate) struct Matrix<'c> {
    pub(crate) quant: &'c QuantConfig,
    /// `in.`, `in.w13_` or `in.w2_`.
    pub(crate) input: String,
    /// `out.`, `out.w13_` or `out.w2_`.
    pub(crate) output: String,
    /// Empty, or this rank's experts.
    pub(crate) lead: Vec<Dim>,
    pub(crate) size_k: usize,
    pub(crate) size_n: usize,
}

impl Matrix<'_> {
    fn rule(&self, name: String, dtypes: &[DType], shape: &[Dim]) -> TensorRule {
        rule(name, dtypes, &[&self.lead[..], shape].concat())
    }

    pub(crate) fn rules(&self) -> Result<Vec<TensorRule>> {
        use CheckpointFormat as F;
        let Self { quant: q, size_k: k, size_n: n, .. } = *self;
        let (input, output) = (|s| format!("{}{s}", self.input), |s| format!("{}{s}", self.output));
        let half = [stored(q.dtype)];
        let pack = q.pack();
        let groups = q.scale_rows(k)?.map_or(Dim::Some, Dim::Is);
        let is = Dim::Is;
        let mut rules = Vec::new();
        let mut add = |name, dtypes: &[DType], shape: &[Dim], required| {
            rules.push(self.rule(name, dtypes, shape).required(required));
        };
        let processed = match q.checkpoint_format {
            F::Int(format) => {
                add(input(format.names.weight), I32, &format.words_shape(k, n, pack).map(is), true);
                add(input(format.names.scales), &half, &[groups, is(n)], true);
                // int8 activations turn the scales into integers kept in the scale type's bits.
                let int8 = q.input_dtype == Some(ScalarType::INT8);
                if int8 { vec![half[0], DType::I16] } else { half.to_vec() }
            }
            F::Fp8 => {
                add(input("weight"), &[DType::F8E4M3], &[is(n), is(k)], true);
                add(input("weight_scale"), &half, &[groups, is(n)], true);
                half.to_vec()
            }
            F::Block(format) => {
                let columns = is(k / format.codes_per_byte());
                add(input("weight"), &[format.weight_dtype()], &[is(n), columns], true);
                let shape = [is(n), is(k / format.block)];
                add(input("weight_scale"), format.scale_dtypes, &shape, true);
                if format.has_global_scale() {
                    // A single matrix has one value, a stack one for each expert.
                    let shape: &[Dim] = if self.lead.is_empty() { &[is(1)] } else { &[] };
                    add(input("weight_global_scale"), F32, shape, true);
                    add(output("marlin_global_scale"), F32, shape, false);
                }
                format.scale_dtypes.to_vec()
            }
        };
        add(output("marlin_qweight"), I32, &[is(k / 16), is(n * 16 / pack)], false);
        add(output("marlin_scales"), &processed, &[groups, is(n)], false);
        if q.has_zero_points() {
            add(input("qzeros"), I32, &[groups, is(n / pack)], true);
            add(output("marlin_zeros"), I32, &[groups, is(n / pack)], false);
        }
        if q.checkpoint_format.has_act_order() {
            add(input("g_idx"), I32, &[is(k)], q.has_act_order());
            add(output("g_idx_sort_indices"), I32, &[is(k)], false);
            add(output("sorted_g_idx"), I32, &[is(k)], false);
        }
        if q.has_bias {
            add(input("bias"), &half, &[is(n)], true);
            add(output("marlin_bias"), &half, &[is(n)], false);
        }
        if q.input_dtype == Some(ScalarType::INT8) {
            // One factor for the whole stack, which some producers repeat for each expert.
            let shape: &[Dim] = if self.lead.is_empty() { &[is(1)] } else { &[] };
            rules.push(self.rule(output("input_global_scale"), F32, shape).or_single());
        }
        Ok(rules)
    }
}

pub(crate) fn topk(m: Dim, top_k: usize) -> [TensorRule; 2] {
    let shape = [m, Dim::Is(top_k)];
    [rule("out.topk_weights", F32, &shape), rule("out.topk_ids", I32, &shape)]
}

pub(crate) fn blocks() -> [TensorRule; 3] {
    [
        rule("out.sorted_token_ids", I32, &[Dim::Any]),
        rule("out.expert_ids", I32, &[Dim::Any]),
        rule("out.num_tokens_post_padded", I32, &[Dim::Is(1)]),
    ]
}
