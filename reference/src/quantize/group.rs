//! Integer weights with a scale, and perhaps a zero point, per group of k and column.

use super::expect_rows;
use crate::dims::{GroupSize, LogicalK};
use crate::moe::router::round_to;
use crate::scalar::ScalarType;
use crate::{Error, Result};

/// Quantized weights, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupQuantized {
    /// Stored codes [K, N]: value + bias for biased types, value + zero point for the others.
    pub codes: Vec<u8>,
    /// [G, N].
    pub scales: Vec<f32>,
    /// [G, N], where the type has run-time zero points; else empty.
    pub zeros: Vec<u8>,
}

/// Quantizes `w` [K, N], whose values and operations are of type `ty` (each result rounded to it).
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
    let size_k = w.len() / size_n;
    let groups = group_size.groups(LogicalK(size_k))?;
    if groups == 0 {
        return Err(Error::size("size_k", size_k, "1 or more"));
    }
    let per = size_k / groups;
    let r = |v: f32| round_to(ty, v);
    let mut codes = vec![0; w.len()];
    let (mut scales, mut zeros) = (Vec::new(), Vec::new());
    for g in 0..groups {
        for n in 0..size_n {
            let column = || (g * per..(g + 1) * per).map(|k| w[k * size_n + n]);
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
            for k in g * per..(g + 1) * per {
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
