//! Integer weights with a scale and optionally a zero point per group of k and column.

use ndarray::Array2;

use super::{finite_rows, matrix};
use crate::num::array::FloatView2;
use crate::num::dims::{GroupSize, LogicalK, Shape};
use crate::num::scalar::{ScalarType, round_to};
use crate::weight::{Codes, Groups, Table, TableData, Weight};
use crate::{Error, Result, act_order};

/// Quantized weights.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupQuantized {
    /// Type of the codes.
    pub weight_type: ScalarType,
    /// The type of the floats, of which the scales are values too.
    pub ty: ScalarType,
    /// Stored codes `[K, N]`: value + bias for biased types, value + zero point for the others.
    pub codes: Array2<u8>,
    /// `[G, N]`.
    pub scales: Array2<f32>,
    /// `[G, N]`, where the type has run-time zero points.
    pub zeros: Option<Array2<u8>>,
}

/// Quantizes `w` `[K, N]`. Every operation is rounded to the type of `w`.
///
/// `uint4b8`, `uint8b128`: scale = max(|largest / qmax|, |smallest / qmin|), code = w / scale
/// rounded to even, limited, plus the bias. `uint4`, `uint8`: scale = max(largest − smallest,
/// 1e-5) / qmax, zero = |smallest / scale| rounded and limited, code = w / scale rounded, plus
/// zero, limited. A group of zeros keeps its zero scale and gets the code of zero.
/// Upstream: `quantize_weights` on a CPU.
///
/// # Errors
/// [`Error::Unsupported`] for other types; [`Error::Size`] when K is not a number of groups, or there are
/// no columns; [`Error::Value`] when a value is not finite.
///
/// ```
/// use marlinspike::num::dims::GroupSize;
/// use marlinspike::num::element::f16;
/// use marlinspike::num::scalar::ScalarType;
/// use marlinspike::quantize::quantize_weights;
/// use ndarray::Array2;
///
/// let w = Array2::from_shape_fn((64, 8), |(k, n)| f16::from_f32((k * 8 + n) as f32 / 512.0 - 0.5));
/// let q = quantize_weights(w.view(), ScalarType::UINT4B8, GroupSize::Of(32))?;
/// assert_eq!((q.codes.shape(), q.scales.shape()), (&[64, 8][..], &[2, 8][..]));
/// assert_eq!(q.codes[[0, 0]], 0);
/// # Ok::<(), marlinspike::Error>(())
/// ```
pub fn quantize_weights<'a>(
    w: impl Into<FloatView2<'a>>,
    weight_type: ScalarType,
    group_size: GroupSize,
) -> Result<GroupQuantized> {
    let w = w.into();
    let size_k = w.shape()[0];
    let groups = group_size.groups(LogicalK(size_k))?;
    if groups == 0 {
        return Err(Error::size("size_k", size_k, "1 or more"));
    }
    let per = size_k / groups;
    let rows: Vec<Vec<usize>> = (0..groups).map(|g| (g * per..(g + 1) * per).collect()).collect();
    quantize_groups(&w, weight_type, &rows)
}

/// [`quantize_weights`] with row k in group `g_idx[k]`; each group must have at least one row.
///
/// # Errors
/// As [`quantize_weights`]; [`Error::Shape`] for a `g_idx` of another length than K,
/// [`Error::Value`] if a group below the largest has no row.
pub fn quantize_by_group<'a>(
    w: impl Into<FloatView2<'a>>,
    weight_type: ScalarType,
    g_idx: &[u32],
) -> Result<GroupQuantized> {
    let w = w.into();
    let size_k = w.shape()[0];
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
    quantize_groups(&w, weight_type, &rows)
}

/// Symmetric GPTQ weights as stored in a checkpoint. With `perm`, they have act-order: groups are
/// runs of the rows of `w`, and row i of the result is row `perm[i]`. Upstream:
/// `gptq_quantize_weights`, whose `test_perm` this is.
///
/// # Errors
/// As [`quantize_weights`]; [`Error::Unsupported`] for a type with zero points; the errors of
/// [`act_order::expect_permutation`]; [`Error::Size`] for act-order with one group.
pub fn gptq_quantize_weights<'a>(
    w: impl Into<FloatView2<'a>>,
    weight_type: ScalarType,
    group_size: GroupSize,
    perm: Option<&[u32]>,
) -> Result<Weight<'static>> {
    if ![ScalarType::UINT4B8, ScalarType::UINT8B128].contains(&weight_type) {
        return Err(Error::unsupported(weight_type, "GPTQ's types are uint4b8 and uint8b128"));
    }
    let mut made = quantize_weights(w, weight_type, group_size)?;
    let Some(perm) = perm else {
        return made.into_weight(Groups::Uniform(group_size));
    };
    let size_k = made.codes.nrows();
    act_order::expect_permutation(perm, size_k)?;
    let GroupSize::Of(per) = group_size else {
        return Err(Error::size("group_size of act-order", group_size, "less than size_k"));
    };
    if per >= size_k {
        return Err(Error::size("group_size of act-order", per, format!("less than {size_k}")));
    }
    let rows: Vec<usize> = perm.iter().map(|&k| k as usize).collect();
    made.codes = made.codes.select(ndarray::Axis(0), &rows);
    let g_idx = perm.iter().map(|&k| k / per as u32).collect();
    made.into_weight(Groups::Indexed { g_idx, group_size })
}

impl GroupQuantized {
    /// Converts codes, scales (values of `ty`) and zero points to the hub's form; `groups` maps
    /// rows to groups.
    ///
    /// # Errors
    /// [`Error::Size`] if K does not fill packed words; the errors of [`Weight::validate`].
    pub fn into_weight(self, groups: Groups) -> Result<Weight<'static>> {
        let Self { weight_type, ty, codes, scales, zeros } = self;
        let (size_k, size_n) = codes.dim();
        let shape = Shape::new(size_k, size_n);
        let codes = Codes::from_fn(weight_type.size_bits(), shape, |k, n| codes[[k, n]])?;
        let (rows, encode) = (scales.nrows(), |&s: &f32| ty.encode_rne(s.into()));
        let data = match ty.storage_bits() {
            16 => TableData::B16(scales.iter().map(|s| encode(s) as u16).collect()),
            32 => TableData::B32(scales.iter().map(encode).collect()),
            _ => TableData::B8(scales.iter().map(|s| encode(s) as u8).collect()),
        };
        let scales = Table::new(ty, rows, scales.ncols(), data)?;
        let zeros = zeros.map(|zeros| {
            let ((rows, cols), data) = (zeros.dim(), zeros.iter().copied().collect());
            Table::new(ScalarType::UINT8, rows, cols, TableData::B8(data))
        });
        let zeros = zeros.transpose()?;
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
    w: &FloatView2<'_>,
    weight_type: ScalarType,
    groups: &[Vec<usize>],
) -> Result<GroupQuantized> {
    let (ty, (w, size_n)) = (w.scalar_type(), finite_rows(w, 1)?);
    let (low, high, zero_points) = match weight_type {
        ScalarType::UINT4B8 => (-8.0, 7.0, false),
        ScalarType::UINT8B128 => (-128.0, 127.0, false),
        ScalarType::UINT4 => (0.0, 15.0, true),
        ScalarType::UINT8 => (0.0, 255.0, true),
        other => return Err(Error::unsupported(other, "not an integer weight type of Marlin")),
    };
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
    let zeros = zero_points.then(|| matrix(groups.len(), zeros));
    let codes = matrix(codes.len() / size_n, codes);
    Ok(GroupQuantized { weight_type, ty, codes, scales: matrix(groups.len(), scales), zeros })
}
