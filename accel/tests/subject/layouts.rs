//! Layouts: repacked weights, and permuted scales, biases and zero points.

use marlinspike::layouts::marlin::{
    Activations, ScaleLayout, ScalePermutation, e4m3_scale_factor, e4m3_scales, e8m0_scales,
};
use marlinspike::num::array::{into_vec, rows_of};
use marlinspike::num::dims::{GroupSize, LogicalK};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Table, TableData};
use marlinspike_accel::{
    Device,
    ops::{self, RepackArgs},
};
use marlinspike_proptests::{Subject, SubjectError, ops as laws};

use super::{Cuda, failed, fill};

fn repack(
    device: &Device,
    qweight: &[u32],
    (size_k, size_n): (usize, usize),
    out: &mut [u32],
) -> Result<(), SubjectError> {
    let args = RepackArgs::new(qweight, None, size_k, size_n, 4, false).map_err(failed)?;
    fill(out, &ops::gptq_marlin_repack(device, &args).map_err(failed)?)
}

impl Subject<laws::Repack> for Cuda {
    fn call(&self, i: &laws::RepackInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let (perm, n) = (i.perm.as_deref(), i.size_n);
        let args =
            RepackArgs::stack(&i.qweight, perm, i.experts, i.size_k, n, i.num_bits, i.is_a_8bit);
        fill(out, &ops::gptq_marlin_repack(&self.0, &args.map_err(failed)?).map_err(failed)?)
    }
}

impl Subject<laws::AwqRepack> for Cuda {
    fn call(&self, i: &laws::AwqInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let (k, n) = (i.size_k, i.size_n);
        let made = ops::awq_marlin_repack(&self.0, &i.qweight, k, n, i.num_bits, i.is_a_8bit);
        fill(out, &made.map_err(failed)?)
    }
}

impl Subject<laws::Fp4Repack> for Cuda {
    fn call(&self, i: &laws::Fp4Input, out: &mut [u32]) -> Result<(), SubjectError> {
        // Bytes of a column follow each other: the words of the packed form, transposed.
        let words: Vec<u32> =
            i.weight.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect();
        let words = rows_of("weight", &words, i.size_k / 8);
        let words = words.map_err(|e| SubjectError(e.to_string()))?;
        let qweight = into_vec(marlinspike::formats::transpose_words(words));
        repack(&self.0, &qweight, (i.size_k, i.size_n), out)
    }
}

impl Subject<laws::MergeW13> for Cuda {
    fn call(&self, i: &laws::MergeInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let rows = i.gate.chunks_exact(i.size).zip(i.up.chunks_exact(i.size));
        let qweight: Vec<u32> = rows.flat_map(|(gate, up)| [gate, up].concat()).collect();
        repack(&self.0, &qweight, (i.size_k, 2 * i.size), out)
    }
}

impl Subject<laws::PermuteScales> for Cuda {
    fn call(&self, i: &laws::ScalesInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let activations = if i.is_a_8bit { Activations::Bits8 } else { Activations::Bits16 };
        let group =
            GroupSize::from_config(i.group_size).map_err(|e| SubjectError(e.to_string()))?;
        let order = ScalePermutation::choose(group, LogicalK(i.size_k), activations);
        let made = ops::marlin_permute_scales(&self.0, &i.scales, i.size_n, order);
        fill(out, &made.map_err(failed)?)
    }
}

impl Subject<laws::PermuteBias> for Cuda {
    fn call(&self, i: &laws::BiasInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let (n, order) = (i.bias.len(), ScalePermutation::Single);
        fill(out, &ops::marlin_permute_scales(&self.0, &i.bias, n, order).map_err(failed)?)
    }
}

impl Subject<laws::Preprocess> for Cuda {
    fn call(&self, i: &laws::PreprocessInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let zeros = i.qzeros.as_deref();
        let words = if zeros.is_some() { i.size_n / 8 } else { i.qweight.len() };
        let made = ops::marlin_int4_fp8_preprocess(&self.0, &i.qweight, zeros, words);
        fill(out, &made.map_err(failed)?)
    }
}

/// Columns of the rows `values` in an order, by the device. Bytes travel in 16 bits.
fn permuted(
    device: &Device,
    values: &[u8],
    size_n: usize,
    order: ScalePermutation,
) -> Result<Vec<u8>, SubjectError> {
    let wide: Vec<u16> = values.iter().map(|&value| value.into()).collect();
    let made = ops::marlin_permute_scales(device, &wide, size_n, order).map_err(failed)?;
    Ok(made.into_iter().map(|value| value as u8).collect())
}

/// Fours of bytes with the middle two exchanged, as kernels of 16-bit activations read scales of a byte.
fn quads(bytes: Vec<u8>) -> Vec<u8> {
    bytes.as_chunks().0.iter().flat_map(|&[a, b, c, d]| [a, c, b, d]).collect()
}

/// What a conversion makes of each byte: a table of one value is the same in any order.
fn converted(
    bytes: &[u8],
    convert: impl Fn(Vec<u8>) -> marlinspike::Result<Table>,
) -> Result<Vec<u8>, SubjectError> {
    let mut of_byte = [None; 256];
    let one = |byte: u8| {
        let made = convert(vec![byte; 64]).map_err(|e| SubjectError(e.to_string()))?;
        Ok(made.bits(0, 0) as u8)
    };
    bytes
        .iter()
        .map(|&byte| match of_byte[usize::from(byte)] {
            Some(made) => Ok(made),
            None => one(byte).inspect(|&made| of_byte[usize::from(byte)] = Some(made)),
        })
        .collect()
}

/// A row of 64 columns.
fn one_row(
    ty: ScalarType,
    via: ScalarType,
    bytes: Vec<u8>,
) -> marlinspike::Result<(Table, ScaleLayout)> {
    let layout = ScaleLayout::new(1, 64, ScalePermutation::Grouped, via)?;
    Ok((Table::new(ty, 1, 64, TableData::B8(bytes))?, layout))
}

impl Subject<laws::E4m3Scales> for Cuda {
    fn call(&self, i: &laws::E4m3Input, out: &mut [u8]) -> Result<(), SubjectError> {
        let order =
            ScalePermutation::choose(GroupSize::Of(16), LogicalK(i.size_k), Activations::Bits16);
        let factor = e4m3_scale_factor(i.scales.iter().copied(), i.dtype);
        let bytes = converted(&i.scales, |bytes| {
            let (table, layout) = one_row(ScalarType::FLOAT8_E4M3FN, ScalarType::FLOAT16, bytes)?;
            e4m3_scales(&table, layout, factor)
        })?;
        fill(out, &quads(permuted(&self.0, &bytes, i.size_n, order)?))
    }
}

impl Subject<laws::MxScales> for Cuda {
    fn call(&self, i: &laws::MxInput, out: &mut [u8]) -> Result<(), SubjectError> {
        let act = if i.fp8_activations { Activations::Bits8 } else { Activations::Bits16 };
        let order = ScalePermutation::choose(GroupSize::Of(32), LogicalK(i.size_k), act);
        let bytes = converted(&i.scales, |bytes| {
            let (table, layout) = one_row(ScalarType::FLOAT8_E8M0FNU, i.dtype, bytes)?;
            e8m0_scales(&table, i.dtype, layout, i.fp8_activations)
        })?;
        let made = permuted(&self.0, &bytes, i.size_n, order)?;
        fill(out, &if i.fp8_activations { made } else { quads(made) })
    }
}

impl Subject<laws::AwqZeroPoints> for Cuda {
    fn call(&self, i: &laws::AwqZerosInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let (bits, pack) = (i.num_bits as usize, 32 / i.num_bits as usize);
        // Field f of AWQ's word holds this column of eight or four.
        let awq: &[usize] = if bits == 4 { &[0, 2, 4, 6, 1, 3, 5, 7] } else { &[0, 2, 1, 3] };
        let field = |word: u32, at: usize| (word >> (at * bits)) as u8 & (u8::MAX >> (8 - bits));
        let mut codes = Vec::with_capacity(i.groups * i.size_n);
        for &word in &i.qzeros {
            let of = |column| awq.iter().position(|&c| c == column).unwrap_or_default();
            codes.extend((0..pack).map(|column| field(word, of(column))));
        }
        let made = permuted(&self.0, &codes, i.size_n, ScalePermutation::Grouped)?;
        let word = |codes: &[u8]| {
            let at = |p: usize| if i.is_a_8bit { codes[p] } else { codes[awq[p]] };
            (0..pack).fold(0, |word, p| word | u32::from(at(p)) << (p * bits))
        };
        fill(out, &made.chunks_exact(pack).map(word).collect::<Vec<_>>())
    }
}
