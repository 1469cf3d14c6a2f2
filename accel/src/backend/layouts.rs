//! Repack weights, scales and biases of a case.

use marlinspike::case::{CheckpointFormat, QuantConfig};
use marlinspike::check::MatrixSource;
use marlinspike::formats::gptq;
use marlinspike::layouts::marlin::{Activations, ScalePermutation};
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::weight::{TableData, Weight};

use super::compared::Compared;
use super::operations::Operations;
use super::{BackendError, CaseRun};
use crate::error::AccelError;
use crate::ops::{
    repack::Repack,
    scales::{Int4Fp8, PermuteScales},
};

/// Outputs that the host makes from the checkpoint alone.
const ON_THE_HOST: [&str; 5] = [
    "marlin_zeros",
    "marlin_global_scale",
    "input_global_scale",
    "g_idx_sort_indices",
    "sorted_g_idx",
];

impl<O: Operations> CaseRun<'_, O> {
    /// The layouts of one matrix or stack of experts.
    pub(super) fn layouts(
        &mut self,
        quant: &QuantConfig,
        prefix: &'static str,
        shape: Shape,
    ) -> Result<(), BackendError> {
        let full = |name: &str| format!("{prefix}{name}");
        for name in ON_THE_HOST {
            self.absent(&full(name), "it is made on the host, when a weight is loaded");
        }
        let (qweight, scales) = (full("marlin_qweight"), full("marlin_scales"));
        let bias = full("marlin_bias");
        if [&qweight, &scales, &bias].iter().all(|name| self.case.output(name).is_none()) {
            return Ok(());
        }
        let case = self.case;
        let source = MatrixSource::new(case, quant, prefix, shape);
        let weights = source.weights()?;
        let perm = source.orders(&weights)?.map(|orders| orders.concat());
        // The case's own order of rows is followed where it sorts.
        let stated = case.output(&full("g_idx_sort_indices")).cloned();
        let context: Vec<Tensor<'_>> = stated.into_iter().collect();
        let packed = |qweight, format| Repack {
            format,
            qweight,
            perm: perm.as_deref(),
            experts: weights.len(),
            shape,
            bits: weights[0].codes.bits(),
            is_a_8bit: quant.input_dtype.is_some(),
        };
        match quant.checkpoint_format {
            CheckpointFormat::Int(format) if format.is_packed_along_n() => {
                let words = case.input(&full(format.names.weight))?.elements::<u32>();
                let zeros = case.input(&full(format.names.zeros))?.elements::<u32>();
                let packed = packed(&words, format);
                self.output(&qweight, &context, |o| along_n(o, packed, &zeros, quant))?;
            }
            // Loaded codes of every other format are words along K.
            _ => {
                let words: Vec<u32> =
                    weights.iter().flat_map(|w| w.codes.words().iter().copied()).collect();
                let packed = packed(&words, &gptq::FORMAT);
                self.output(&qweight, &context, |o| along_k(o, packed, quant))?;
            }
        }
        let activations = match quant.input_dtype {
            Some(_) => Activations::Bits8,
            None => Activations::Bits16,
        };
        match moved_scales(quant, &weights) {
            Ok(values) => {
                let permutation =
                    ScalePermutation::choose(quant.group_size, shape.k(), activations);
                let call = PermuteScales { scales: &values, size_n: shape.size_n, permutation };
                self.output(&scales, &context, |o| o.run(&call))?;
            }
            Err(reason) => self.absent(&scales, reason),
        }
        if let Some(values) = bits16(weights.iter().map(|w| w.bias.as_ref())) {
            let permutation = ScalePermutation::Single;
            let call = PermuteScales { scales: &values, size_n: shape.size_n, permutation };
            self.output(&bias, &context, |o| o.run(&call))?;
        }
        Ok(())
    }
}

/// Whether codes are rewritten before they are packed: int4 under fp8 activations.
fn is_rewritten(quant: &QuantConfig) -> bool {
    quant.input_dtype == Some(ScalarType::FLOAT8_E4M3FN)
        && [ScalarType::UINT4B8, ScalarType::UINT4].contains(&quant.weight_type)
}

/// Codes in words along K.
fn along_k<O: Operations>(
    o: &Compared<'_, O>,
    packed: Repack<'_>,
    quant: &QuantConfig,
) -> Result<Vec<u32>, AccelError> {
    if !is_rewritten(quant) {
        return o.run(&packed);
    }
    let qweight = packed.qweight;
    let words = o.run(&Int4Fp8 { qweight, qzeros: None, words: qweight.len() })?;
    o.run(&Repack { qweight: &words, ..packed })
}

/// Codes in words along N, one matrix after the other: the operator takes no stack.
fn along_n<O: Operations>(
    o: &Compared<'_, O>,
    packed: Repack<'_>,
    zeros: &[u32],
    quant: &QuantConfig,
) -> Result<Vec<u32>, AccelError> {
    let Repack { qweight, experts, shape, .. } = packed;
    let (words, of_zeros) = (qweight.len() / experts, zeros.len() / experts);
    let mut out = Vec::with_capacity(qweight.len());
    for e in 0..experts {
        let mut words = qweight[e * words..][..words].to_vec();
        if is_rewritten(quant) {
            let zeros = &zeros[e * of_zeros..][..of_zeros];
            let per_row = shape.size_n / 8;
            words = o.run(&Int4Fp8 { qweight: &words, qzeros: Some(zeros), words: per_row })?;
        }
        out.extend(o.run(&Repack { qweight: &words, experts: 1, ..packed })?);
    }
    Ok(out)
}

/// The scales of all matrices, if the kernel's form only permutes their columns.
fn moved_scales(quant: &QuantConfig, weights: &[Weight<'_>]) -> Result<Vec<u16>, &'static str> {
    let several = weights.iter().any(|w| w.scales.rows() > 1);
    if !matches!(quant.checkpoint_format, CheckpointFormat::Int(_)) {
        return Err("scales of this format are recoded on the host");
    }
    match quant.input_dtype {
        Some(ScalarType::INT8) if several => {
            Err("group scales become integers for int8 activations, on the host")
        }
        Some(ScalarType::FLOAT8_E4M3FN) => {
            Err("scales are recoded for fp8 activations, on the host")
        }
        _ => bits16(weights.iter().map(|w| Some(&w.scales))).ok_or("scales of other than 16 bits"),
    }
}

/// The elements of all tables of 16-bit values; `None` if one is absent or of another width.
fn bits16<'w>(
    tables: impl Iterator<Item = Option<&'w marlinspike::weight::Table>>,
) -> Option<Vec<u16>> {
    let mut all = Vec::new();
    for table in tables {
        match table?.data() {
            TableData::B16(bits) => all.extend_from_slice(bits),
            _ => return None,
        }
    }
    Some(all)
}
