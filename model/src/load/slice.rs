//! Slices and concatenates tensors. Bytes are moved, never interpreted.

use std::borrow::Cow;
use std::ops::Range;

use marlinspike::num::tensor::Tensor;
use marlinspike::{Error, Result};

/// The part of `tensor` given by one range per dimension; borrowed if it is contiguous.
///
/// # Errors
/// [`Error::Shape`] if a range exceeds the tensor.
pub fn slice<'a>(tensor: Tensor<'a>, ranges: &[Range<usize>]) -> Result<Tensor<'a>> {
    let shape = tensor.shape().to_vec();
    let inside = ranges.iter().zip(&shape).all(|(r, &d)| r.start <= r.end && r.end <= d);
    if ranges.len() != shape.len() || !inside {
        return Err(Error::shape(tensor.name(), &shape, format!("at least {ranges:?}")));
    }
    let (name, dtype) = (tensor.name().to_owned(), tensor.dtype());
    let out_shape: Vec<usize> = ranges.iter().map(Range::len).collect();
    // Dimensions from `cut` on are whole, so a run covers the range of dimension `cut - 1`.
    let whole = |d: &usize| ranges[*d] == (0..shape[*d]);
    let cut = (0..shape.len()).rev().find(|d| !whole(d));
    let Some(cut) = cut else { return Ok(tensor) };
    let inner = shape[cut + 1..].iter().product::<usize>() * dtype.bytes();
    let run = ranges[cut].start * inner..ranges[cut].end * inner;
    let stride = shape[cut] * inner;
    let data = tensor.into_bytes();
    if ranges[..cut].iter().all(|r| r.len() == 1) {
        let at = outer(&shape[..cut], ranges, 0) * stride;
        let run = at + run.start..at + run.end;
        let data = match data {
            Cow::Borrowed(b) => Cow::Borrowed(&b[run]),
            Cow::Owned(b) => Cow::Owned(b[run].to_vec()),
        };
        return Tensor::new(name, dtype, out_shape, data);
    }
    let count: usize = ranges[..cut].iter().map(Range::len).product();
    let mut out = Vec::with_capacity(count * run.len());
    for i in 0..count {
        let at = outer(&shape[..cut], ranges, i) * stride;
        out.extend_from_slice(&data[at + run.start..at + run.end]);
    }
    Tensor::new(name, dtype, out_shape, out)
}

/// Row-major index in `shape` of element `i` of the ranges.
fn outer(shape: &[usize], ranges: &[Range<usize>], mut i: usize) -> usize {
    let mut position = 0;
    let mut stride = 1;
    for (&dim, range) in shape.iter().zip(ranges).rev() {
        position += (range.start + i % range.len().max(1)) * stride;
        i /= range.len().max(1);
        stride *= dim;
    }
    position
}

/// Concatenates tensors of one type along dimension `dim`; a single tensor is returned unchanged.
///
/// # Errors
/// [`Error::Dtype`] or [`Error::Shape`] naming the first tensor that does not fit the first one.
pub fn concat<'a>(mut tensors: Vec<Tensor<'a>>, dim: usize) -> Result<Tensor<'a>> {
    if tensors.len() == 1 {
        return Ok(tensors.remove(0));
    }
    let Some(first) = tensors.first() else {
        return Err(Error::size("tensors", 0, "at least one"));
    };
    let (dtype, shape) = (first.dtype(), first.shape().to_vec());
    for t in &tensors {
        t.expect_dtype(&[dtype])?;
        let others = |s: &[usize]| {
            s.iter().enumerate().filter(|(d, _)| *d != dim).all(|(d, &n)| shape.get(d) == Some(&n))
        };
        if t.shape().len() != shape.len() || shape.len() <= dim || !others(t.shape()) {
            let expected = format!("{shape:?} as `{}` but for dimension {dim}", first.name());
            return Err(Error::shape(t.name(), t.shape(), expected));
        }
    }
    let rows: usize = shape[..dim].iter().product();
    let runs: Vec<usize> = tensors.iter().map(|t| t.bytes().len() / rows.max(1)).collect();
    let mut out = Vec::with_capacity(tensors.iter().map(|t| t.bytes().len()).sum());
    for row in 0..rows {
        for (t, &run) in tensors.iter().zip(&runs) {
            out.extend_from_slice(&t.bytes()[row * run..(row + 1) * run]);
        }
    }
    let mut out_shape = shape;
    out_shape[dim] = tensors.iter().map(|t| t.shape()[dim]).sum();
    Tensor::new(tensors[0].name(), dtype, out_shape, out)
}

#[cfg(test)]
mod tests {
    use marlinspike::num::tensor::DType;

    use super::*;

    fn counting(shape: &[usize]) -> Tensor<'static> {
        let len = shape.iter().product::<usize>() as u8;
        Tensor::new("t", DType::U8, shape.to_vec(), (0..len).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn slices_are_the_elements_in_range() {
        let t = counting(&[3, 4, 5]);
        for ranges in [
            [0..3, 0..4, 0..5],
            [1..2, 0..4, 0..5],
            [1..3, 1..3, 0..5],
            [0..3, 2..4, 1..4],
            [2..3, 1..2, 2..5],
            [0..3, 0..4, 3..4],
        ] {
            let mut expected = Vec::new();
            for a in ranges[0].clone() {
                for b in ranges[1].clone() {
                    expected.extend(ranges[2].clone().map(|c| (a * 20 + b * 5 + c) as u8));
                }
            }
            let found = slice(t.clone(), &ranges).unwrap();
            assert_eq!(found.bytes(), expected, "{ranges:?}");
            assert_eq!(found.shape(), ranges.clone().map(|r| r.len()));
        }
        assert!(matches!(slice(t.clone(), &[0..3, 0..5, 0..5]), Err(Error::Shape { .. })));
        assert!(matches!(slice(t, &[0..3, 0..4]), Err(Error::Shape { .. })));
    }

    #[test]
    fn a_run_of_borrowed_bytes_is_not_copied() {
        let data: Vec<u8> = (0..60).collect();
        let t = Tensor::new("t", DType::U8, vec![3, 20], &data[..]).unwrap();
        let part = slice(t, &[1..3, 0..20]).unwrap();
        assert!(matches!(part.into_bytes(), Cow::Borrowed(b) if b == &data[20..]));
    }

    #[test]
    fn slices_side_by_side_are_the_whole() {
        let t = counting(&[3, 4, 5]);
        for (dim, cut) in [(0, 1), (1, 3), (2, 2)] {
            let whole = [0..3, 0..4, 0..5];
            let part = |r: Range<usize>| {
                let mut ranges = whole.clone();
                ranges[dim] = r;
                slice(t.clone(), &ranges).unwrap()
            };
            let parts = vec![part(0..cut), part(cut..t.shape()[dim])];
            assert_eq!(concat(parts, dim).unwrap(), t);
        }
        let odd = vec![t.clone(), counting(&[3, 3, 5])];
        assert!(matches!(concat(odd, 2), Err(Error::Shape { .. })));
    }
}
