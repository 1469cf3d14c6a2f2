//! Integer weights with a scale and optionally a zero point per group of k and column.

use super::expect_rows;
use crate::num::dims::{GroupSize, LogicalK, Shape};
use crate::num::scalar::{ScalarType, round_to};
use crate::weight::{Codes, Groups, Table, TableData, Weight};
use crate::{Error, Result, act_order};

/// Quantized weights, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupQuantized {
    /// Stored codes [K, N]: value + bias for biased types, value + zero point for the others.
    pub codes: Vec<u8>,
    /// [G, N].
    pub scales: Vec<f32>,
    /// [G, N] if the type has run-time zero points; otherwise empty.
    pub zeros: Vec<u8>,
}

/// Quantizes `w` [K, N] with values of type `ty`; every operation is rounded to `ty`.
///
/// `uint4b8`, `uint8b128`: scale = max(|largest / qmax|, |smallest / qmin|), code = w / scale
/// rounded to even, limited, plus the bias. `uint4`, `uint8`: scale = max(largest − smallest,
/// 1e-5) / qmax, zero = |smallest / scale| rounded and limited, code = w / scale rounded, plus
/// zero, limited. A group of zeros keeps its zero scale and gets the code of zero.
/// Upstream: `quantize_weights` on a CPU.
///
/// # Errors
/// [`Error::Unsupported`] for other types; [`Error::Size`], [`Error::Shape`] when K is not a
/// number of groups or `w` not [K, N]; [`Error::Value`] when a value is not finite or not of `ty`.
pub fn quantize_weights(
    w: &[f32],
    size_n: usize,
    ty: ScalarType,
    weight_type: ScalarType,
    group_size: GroupSize,
) -> Result<GroupQuantized> {
    expect_rows(w, size_n, 1)?;
    let size_k = w.len() / size_n;
    let groups = group_size.groups(LogicalK(size_k))?;
    if groups == 0 {
        return Err(Error::size("size_k", size_k, "1 or more"));
    }
    let per = size_k / groups;
    let rows: Vec<Vec<usize>> = (0..groups).map(|g| (g * per..(g + 1) * per).collect()).collect();
    quantize_groups(w, size_n, ty, weight_type, &rows)
}

/// [`quantize_weights`] with row k in group `g_idx[k]`; each group must have at least one row.
///
/// # Errors
/// As [`quantize_weights`]; [`Error::Shape`] for a `g_idx` of another length than K,
/// [`Error::Value`] if a group below the largest has no row.
pub fn quantize_by_group(
    w: &[f32],
    size_n: usize,
    ty: ScalarType,
    weight_type: ScalarType,
    g_idx: &[u32],
) -> Result<GroupQuantized> {
    expect_rows(w, size_n, 1)?;
    let size_k = w.len() / size_n;
    if g_idx.len() != size_k || size_k == 0 {
        return Err(Error::shape("g_idx", &[g_idx.len()], format!("[{size_k}], 1 or more")));
    }
    // Every group has a row, so there are at most K.
    if let Some(k) = g_idx.iter().position(|&g| g as usize >= size_k) {
        return Err(Error::value("g_idx", &[k], g_idx[k], format!("a group below {size_k}")));
    }
    let groups = g_idx.iter().fold(0, |max, &g| max.max(g as usize + 1));
    let mut rows = vec![Vec::new(); groups];
    for (k, &g) in g_idx.iter().enumerate() {
        rows[g as usize].push(k);
    }
    if let Some(empty) = rows.iter().position(Vec::is_empty) {
        let expected = format!("each group below {groups}");
        return Err(Error::value("g_idx", &[], format!("no row of group {empty}"), expected));
    }
    quantize_groups(w, size_n, ty, weight_type, &rows)
}

/// Symmetric GPTQ weights as stored in a checkpoint. With `perm`, they have act-order: groups are
/// runs of the rows of `w`, and row i of the result is row `perm[i]`. Upstream:
/// `gptq_quantize_weights`, whose `test_perm` this is.
///
/// # Errors
/// As [`quantize_weights`]; [`Error::Unsupported`] for a type with zero points; the errors of
/// [`act_order::expect_permutation`]; [`Error::Size`] for act-order with one group.
pub fn gptq_quantize_weights(
    w: &[f32],
    size_n: usize,
    ty: ScalarType,
    weight_type: ScalarType,
    group_size: GroupSize,
    perm: Option<&[u32]>,
) -> Result<Weight<'static>> {
    if ![ScalarType::UINT4B8, ScalarType::UINT8B128].contains(&weight_type) {
        return Err(Error::unsupported(weight_type, "GPTQ's types are uint4b8 and uint8b128"));
    }
    let mut made = quantize_weights(w, size_n, ty, weight_type, group_size)?;
    let Some(perm) = perm else {
        return made.into_weight(size_n, ty, weight_type, Groups::Uniform(group_size));
    };
    let size_k = w.len() / size_n;
    act_order::expect_permutation(perm, size_k)?;
    let GroupSize::Of(per) = group_size else {
        return Err(Error::size("group_size of act-order", group_size, "less than size_k"));
    };
    if per >= size_k {
        return Err(Error::size("group_size of act-order", per, format!("less than {size_k}")));
    }
    let codes = std::mem::take(&mut made.codes);
    made.codes =
        perm.iter().flat_map(|&k| &codes[k as usize * size_n..][..size_n]).copied().collect();
    let g_idx = perm.iter().map(|&k| k / per as u32).collect();
    made.into_weight(size_n, ty, weight_type, Groups::Indexed { g_idx, group_size })
}

impl GroupQuantized {
    /// Converts codes, scales (values of `ty`) and zero points to the hub's form; `groups` maps
    /// rows to groups.
    ///
    /// # Errors
    /// [`Error::Size`] if K does not fill packed words; the errors of [`Weight::validate`].
    pub fn into_weight(
        self,
        size_n: usize,
        ty: ScalarType,
        weight_type: ScalarType,
        groups: Groups,
    ) -> Result<Weight<'static>> {
        if size_n == 0 || !self.codes.len().is_multiple_of(size_n) {
            return Err(Error::shape("codes", &[self.codes.len()], format!("rows of {size_n}")));
        }
        let shape = Shape::new(self.codes.len() / size_n, size_n);
        let bits = weight_type.size_bits();
        let codes = Codes::from_fn(bits, shape, |k, n| self.codes[k * size_n + n])?;
        let rows = self.scales.len() / size_n;
        let encode = |&s: &f32| ty.encode_rne(s.into());
        let data = match ty.storage_bits() {
            16 => TableData::B16(self.scales.iter().map(|s| encode(s) as u16).collect()),
            32 => TableData::B32(self.scales.iter().map(encode).collect()),
            _ => TableData::B8(self.scales.iter().map(|s| encode(s) as u8).collect()),
        };
        let scales = Table::new(ty, rows, size_n, data)?;
        let zeros = match self.zeros.is_empty() {
            true => None,
            false => Some(Table::new(ScalarType::UINT8, rows, size_n, TableData::B8(self.zeros))?),
        };
        let name = "weight".to_owned();
        let (global_scale, bias) = (None, None);
        let weight =
            Weight { name, ty: weight_type, codes, scales, zeros, groups, global_scale, bias };
        weight.validate()?;
        Ok(weight)
    }
}

/// [`quantize_weights`] with the rows of each group.
fn quantize_groups(
    w: &[f32],
    size_n: usize,
    ty: ScalarType,
    weight_type: ScalarType,
    groups: &[Vec<usize>],
) -> Result<GroupQuantized> {
    let (low, high, zero_points) = match weight_type {
        ScalarType::UINT4B8 => (-8.0, 7.0, false),
        ScalarType::UINT8B128 => (-128.0, 127.0, false),
        ScalarType::UINT4 => (0.0, 15.0, true),
        ScalarType::UINT8 => (0.0, 255.0, true),
        other => return Err(Error::unsupported(other, "not an integer weight type of Marlin")),
    };
    if let Some(i) = w.iter().position(|&v| round_to(ty, v) != v) {
        return Err(Error::value("w", &[i / size_n, i % size_n], w[i], format!("a value of {ty}")));
    }
    let r = |v: f32| round_to(ty, v);
    let mut codes = vec![0; w.len()];
    let (mut scales, mut zeros) = (Vec::new(), Vec::new());
    for rows in groups {
        for n in 0..size_n {
            let column = || rows.iter().map(|k| w[k * size_n + n]);
            let largest = column().fold(f32::NEG_INFINITY, f32::max);
            let smallest = column().fold(f32::INFINITY, f32::min);
            let scale = if zero_points {
                r(r(largest - smallest).max(r(1e-5)) / high)
            } else {
                r(largest / high).abs().max(r(smallest / low).abs())
            };
            let quotient = |v: f32| if scale == 0.0 { 0.0 } else { r(v / scale) };
            let zero = if zero_points {
                quotient(smallest).abs().round_ties_even().clamp(low, high)
            } else {
                0.0
            };
            let bias = weight_type.bias() as f32;
            for k in rows {
                let code = quotient(w[k * size_n + n]).round_ties_even() + zero;
                codes[k * size_n + n] = (code.clamp(low, high) + bias) as u8;
            }
            scales.push(scale);
            if zero_points {
                zeros.push(zero as u8);
            }
        }
    }
    Ok(GroupQuantized { codes, scales, zeros })
}
