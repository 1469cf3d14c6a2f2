//! Products without error, rounded once.
//!
//! For quantized rows, the sum over one segment of k, in which no scale changes, is a sum of
//! products of small codes, which f64 represents exactly. Only the scaled sums of segments need a
//! wider accumulator. 16-bit rows use [`products::product`](crate::products::product()).

use rayon::prelude::*;

use super::activations::Scales;
use super::product::{Product, half_bits};
use crate::Result;
use crate::num::dims::GroupSize;
use crate::products::{self, Request, Rows, Rule, WeightColumns, Wide};
use crate::weight::{Groups, Weight};

/// Largest number of k of a segment: a product of two e4m3 values is a multiple of 2^-18 and below 2^18, so 2^15
/// of them fill 51 bits. int8 codes less a zero point of a row are below 2^21 (a row of 16-bit floats
/// with two values has zero points below 2^20); a row with larger ones has the scale 0.
const MOST: usize = 1 << 15;

/// The outputs; rows without an expert are zero.
pub(super) fn compute(product: &Product<'_>) -> Result<Vec<u16>> {
    let size_n = product.size_n();
    let mut out = vec![0u16; product.expert_of.len() * size_n];
    for (e, weight) in product.weights.iter().enumerate() {
        let mine: Vec<usize> =
            (0..product.expert_of.len()).filter(|&m| product.expert_of[m] == Some(e)).collect();
        if mine.is_empty() {
            continue;
        }
        let made = match segment(product, weight) {
            Some(segment) => segments(product, e, &mine, segment),
            None => values(product, e, &mine)?,
        };
        for (&m, row) in mine.iter().zip(made.chunks_exact(size_n)) {
            out[m * size_n..][..size_n].copy_from_slice(row);
        }
    }
    Ok(out)
}

/// k over which the scales of rows and columns are constant; `None` for rows that are not quantized
/// and for act-order.
fn segment(product: &Product<'_>, weight: &Weight<'_>) -> Option<usize> {
    let size_k = product.rows.size_k;
    let of_rows = match product.rows.scales {
        Scales::None => return None,
        Scales::Row(_) => size_k,
        Scales::Group { size, .. } => size,
    };
    let of_columns = match weight.groups {
        Groups::Uniform(GroupSize::Of(group)) => group,
        Groups::Uniform(GroupSize::Channel) => size_k,
        Groups::Indexed { .. } => return None,
    };
    // Segments start at every multiple of either.
    let (mut a, mut b) = (of_rows, of_columns);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    (weight.zeros.is_none() && a <= MOST).then_some(a)
}

/// The outputs of rows `mine` with expert `e`, row by row.
fn segments(product: &Product<'_>, e: usize, mine: &[usize], segment: usize) -> Vec<u16> {
    let (rows, weight) = (product.rows, &product.weights[e]);
    let (size_k, size_n) = (rows.size_k, product.size_n());
    let decode = |ty: crate::num::scalar::ScalarType| -> Vec<f64> {
        (0..1 << ty.storage_bits()).map(|code| ty.to_f64(code)).collect()
    };
    let (of_rows, of_columns) = (decode(rows.ty), decode(weight.ty));
    let row = |&m: &usize| {
        let zero = f64::from(rows.zero(m));
        rows.row(m).iter().map(|&c| of_rows[c as usize] - zero).collect()
    };
    let x: Vec<Vec<f64>> = mine.par_iter().map(row).collect();
    let column = |n: usize| -> Vec<u16> {
        let codes = (0..size_k).map(|k| of_columns[usize::from(weight.codes.get(k, n))]);
        let w: Vec<f64> = codes.collect();
        let starts = (0..size_k).step_by(segment);
        let scale = |k| weight.scales.value(weight.groups.group_of(k), n);
        let scales: Vec<f64> = starts.map(scale).collect();
        let mut sum = Wide::new();
        let one = |(&m, x): (&usize, &Vec<f64>)| {
            sum.clear();
            for (i, &scale) in scales.iter().enumerate() {
                let k = i * segment..(i + 1) * segment;
                // 24 by 24 bits at most: exact.
                let both = f64::from(rows.scale(m, k.start)) * scale;
                sum.add_product(dot(&x[k.clone()], &w[k]), both);
            }
            let wide = product.chain([m, e, n]).exact(&sum);
            half_bits(product.dtype, wide.round(product.dtype))
        };
        mine.iter().zip(&x).map(one).collect()
    };
    let columns: Vec<Vec<u16>> = (0..size_n).into_par_iter().map(column).collect();
    let place = |i: usize| columns[i % size_n][i / size_n];
    (0..mine.len() * size_n).map(place).collect()
}

/// Σ a·b, exact by the caller's choice of codes; four independent sums, which a processor adds in
/// parallel.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    let (a, b) = (a.chunks_exact(4), b.chunks_exact(4));
    let rest: f64 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3]) + rest
}

/// The outputs of rows that are not quantized.
fn values(product: &Product<'_>, e: usize, mine: &[usize]) -> Result<Vec<u16>> {
    let size_k = product.rows.size_k;
    let values = mine.iter().flat_map(|&m| (0..size_k).map(move |k| product.rows.value(m, k)));
    let rows = Rows::new(size_k, values.collect())?;
    let columns = WeightColumns::new(&product.weights[e], Rule::Exact, None)?;
    products::product(&rows, &columns, Request::default(), |element| {
        let wide = product.chain([mine[element.m], e, element.n]).exact(&element.sum());
        half_bits(product.dtype, wide.round(product.dtype))
    })
}
