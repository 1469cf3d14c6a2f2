//! Writes weights as inputs of a case, and their packed forms as outputs.

use crate::formats::transpose_words;
use crate::layouts::Layout;
use crate::layouts::marlin::{InputDtype, Options, Prepared, prepare};
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::quant::{CheckpointFormat, MatrixSource, QuantConfig};
use crate::ops::tensors::{bytes_of, half};
use crate::products::schedule::ScheduleError;
use crate::weight::{Groups, Table, Weight};
use crate::{Error, Result};

/// One matrix (`prefix` empty) or a stack of experts (`w13_`, `w2_`) that is written into a case.
pub(crate) struct Stack<'s> {
    pub(crate) prefix: &'static str,
    pub(crate) quant: &'s QuantConfig,
    pub(crate) shape: Shape,
    pub(crate) weights: Vec<Weight<'static>>,
}

impl<'s> Stack<'s> {
    /// The matrices that a case's inputs hold.
    ///
    /// # Errors
    /// For inputs that are missing or no weight.
    pub(crate) fn of_case(
        case: &Case<'_>,
        quant: &'s QuantConfig,
        prefix: &'static str,
        shape: Shape,
    ) -> Result<Self> {
        let weights = MatrixSource::new(case, quant, prefix, shape).weights()?;
        let weights = weights.into_iter().map(Weight::into_owned).collect();
        Ok(Self { prefix, quant, shape, weights })
    }
}

impl Stack<'_> {
    fn stacked(&self) -> bool {
        !self.prefix.is_empty()
    }

    /// `shape` with the leading axis of experts, if there is one.
    fn full(&self, shape: &[usize]) -> Vec<usize> {
        let lead = self.stacked().then_some(self.weights.len());
        lead.into_iter().chain(shape.iter().copied()).collect()
    }

    /// The bytes of a part of each matrix, one after the other, as an input.
    fn input(
        &self,
        case: &mut Case<'_>,
        name: &str,
        dtype: DType,
        shape: &[usize],
        part: impl Fn(&Weight<'static>) -> Result<Vec<u8>>,
    ) -> Result<()> {
        let parts = self.weights.iter().map(part).collect::<Result<Vec<_>>>()?;
        let name = format!("{}{name}", self.prefix);
        case.add_input(&name, Tensor::new(&name, dtype, self.full(shape), parts.concat())?);
        Ok(())
    }

    /// Adds the matrices in the checkpoint format of the case.
    pub(crate) fn add_inputs(&self, case: &mut Case<'_>) -> Result<()> {
        use CheckpointFormat as F;
        let Self { quant: q, shape: Shape { size_k, size_n }, .. } = *self;
        let Some(first) = self.weights.first() else { return Ok(()) };
        let groups = first.scales.rows();
        let (pack, per_byte) = (first.codes.pack(), first.codes.pack() / 4);
        let float = half(q.dtype);
        let table = |t: &Table| table_bytes(t);
        match q.checkpoint_format {
            F::Int(format) => {
                let shape = format.words_shape(size_k, size_n, pack);
                self.input(case, format.names.weight, DType::I32, &shape, |w| {
                    Ok(bytes_of(&format.words(&w.codes)))
                })?;
                let shape = [groups, size_n];
                self.input(case, format.names.scales, float, &shape, |w| table(&w.scales))?;
                if q.has_zero_points() {
                    let shape = [groups, size_n / pack];
                    self.input(case, format.names.zeros, DType::I32, &shape, |w| {
                        let words = w.zeros.as_ref().map(|z| format.zero_words(z));
                        Ok(bytes_of(&words.unwrap_or_default()))
                    })?;
                }
            }
            F::Fp8 | F::Block(_) => {
                let dtype = if per_byte > 1 { DType::U8 } else { DType::F8E4M3 };
                let shape = [size_n, size_k / per_byte];
                self.input(case, "weight", dtype, &shape, |w| {
                    Ok(bytes_of(&transpose_words(w.codes.words(), size_k / pack, size_n)))
                })?;
                match q.checkpoint_format {
                    F::Block(format) => {
                        let (dtype, shape) = (format.scale_dtypes[0], [size_n, groups]);
                        self.input(case, "weight_scale", dtype, &shape, |w| {
                            table(&w.scales.transposed())
                        })?;
                    }
                    _ => {
                        let shape = [groups, size_n];
                        self.input(case, "weight_scale", float, &shape, |w| table(&w.scales))?;
                    }
                }
                if q.checkpoint_format.has_global_scale() {
                    let shape: &[usize] = if self.stacked() { &[] } else { &[1] };
                    self.input(case, "weight_global_scale", DType::F32, shape, |w| {
                        Ok(w.global_scale.unwrap_or(1.0).to_le_bytes().to_vec())
                    })?;
                }
            }
        }
        if q.has_act_order() {
            self.input(case, "g_idx", DType::I32, &[size_k], |w| match &w.groups {
                Groups::Indexed { g_idx, .. } => Ok(bytes_of(g_idx)),
                Groups::Uniform(_) => Ok(Vec::new()),
            })?;
        }
        if q.has_bias {
            self.input(case, "bias", float, &[size_n], |w| match &w.bias {
                Some(bias) => table(bias),
                None => Ok(Vec::new()),
            })?;
        }
        Ok(())
    }

    /// Packs the matrices and adds all tensors of the kernel as outputs.
    pub(crate) fn add_outputs(&self, case: &mut Case<'_>) -> Result<Prepared> {
        let input_dtype = InputDtype::from_config(self.quant.input_dtype)?;
        let options = Options { input_dtype, ..Options::new(self.quant.dtype) };
        let p = prepare(&self.weights, options)?;
        let mut output = |name: &str, dtype, shape: &[usize], bytes: Vec<u8>| -> Result<()> {
            let name = format!("{}{name}", self.prefix);
            case.add_output(&name, Tensor::new(&name, dtype, self.full(shape), bytes)?);
            Ok(())
        };
        let scalar: &[usize] = if self.stacked() { &[] } else { &[1] };
        let float = half(self.quant.dtype);
        let table = |t: &Table| table_bytes(t);
        let size_n = self.shape.size_n;
        output(
            "marlin_qweight",
            DType::I32,
            &p.weight_layout.packed_shape(),
            bytes_of(&p.qweight),
        )?;
        let scale_type = match p.scales.ty() {
            ScalarType::FLOAT8_E8M0FNU => DType::U8,
            ScalarType::FLOAT8_E4M3FN => DType::F8E4M3,
            _ => float,
        };
        output("marlin_scales", scale_type, &[p.groups(), size_n], table(&p.scales)?)?;
        if let Some((layout, words)) = &p.zeros {
            output("marlin_zeros", DType::I32, &layout.packed_shape(), bytes_of(words))?;
        }
        if let Some(bias) = &p.bias {
            output("marlin_bias", float, &[size_n], table(bias)?)?;
        }
        if let Some(scales) = &p.global_scale {
            let bits: Vec<u32> = scales.iter().map(|s| s.to_bits()).collect();
            output("marlin_global_scale", DType::F32, scalar, bytes_of(&bits))?;
        }
        if let Some(scale) = p.input_global_scale {
            // One value for all experts; a stack repeats it for each.
            let bits = vec![scale.to_bits(); p.experts];
            output("input_global_scale", DType::F32, scalar, bytes_of(&bits))?;
        }
        if let Some(sorted) = &p.sorted {
            let k = [self.shape.size_k];
            let perms: Vec<u32> = sorted.iter().flat_map(|s| s.perm.iter().copied()).collect();
            let g_idx: Vec<u32> = sorted.iter().flat_map(|s| s.g_idx.iter().copied()).collect();
            output("g_idx_sort_indices", DType::I32, &k, bytes_of(&perms))?;
            output("sorted_g_idx", DType::I32, &k, bytes_of(&g_idx))?;
        }
        Ok(p)
    }
}

/// Little-endian bytes of a table.
fn table_bytes(table: &Table) -> Result<Vec<u8>> {
    // Only the width of the element type matters.
    let dtype = match table.ty().storage_bits() {
        8 => DType::U8,
        16 => DType::U16,
        _ => DType::U32,
    };
    Ok(table.to_tensor("table", dtype)?.into_bytes().into_owned())
}

fn is_schedule(error: &Error) -> bool {
    error.downcast_ref::<ScheduleError>().is_some()
}

/// `None` if the canonical schedule does not define the product: with act-order, groups need not
/// fill the instructions of 8-bit activations, which sum each group separately.
pub(crate) fn defined<T>(q: &QuantConfig, made: Result<T>) -> Result<Option<T>> {
    match made {
        Err(e) if is_schedule(&e) && q.has_act_order() && q.input_dtype.is_some() => Ok(None),
        made => made.map(Some),
    }
}

/// A 16-bit output.
pub(crate) fn add_halves(
    case: &mut Case<'_>,
    name: &str,
    dtype: ScalarType,
    shape: [usize; 2],
    values: Vec<u16>,
) -> Result<()> {
    case.add_output(name, Tensor::from_vec(name, half(dtype), shape.to_vec(), values)?);
    Ok(())
}
