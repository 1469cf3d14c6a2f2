//! The cause of a wrong `y` of a kernel that computes in any order: known mistakes, whose results count within
//! the class's errors.

use super::bytes::{Candidate, Sources};
use crate::judge::mistake::{Comparison, search};
use crate::judge::{Diagnosis, place, plain};
use crate::num::scalar::bf16_to_f32;
use crate::products::Bounded;
use crate::w4a8::packed::{Columns, Factors, QuantizedRows};
use crate::w4a8::scalar;

/// A wrong output: the bounds of the right one, the values found and their bits, and the wrong places.
pub(super) struct Wrong<'w> {
    pub(super) bounded: &'w [Bounded],
    pub(super) found: &'w [f64],
    pub(super) bits: &'w [u32],
    pub(super) wrong: &'w [usize],
}

/// Id, text and change of a known mistake in the columns.
type Change = (&'static str, &'static str, fn(&Columns) -> Option<Columns>);

/// Mistakes of kernels that read the weights themselves.
const COLUMNS: [Change; 8] = [
    ("codes-unsigned", "codes are read as 0 to 15: 8 is not subtracted", |c| {
        let codes = c.with_codes(|k, n| c.column(n)[k] + 8);
        Some(with_sums(&codes))
    }),
    (
        "codes-unsigned",
        "codes are read as 0 to 15 in the products: 8 is not subtracted, except in the sums for the zero \
         point",
        |c| Some(c.with_codes(|k, n| c.column(n)[k] + 8)),
    ),
    ("codes-twos-complement", "codes are read as two's complement, stored is code + 8", |c| {
        let code = |k: usize, n: usize| (c.column(n)[k] + 8) << 4 >> 4;
        Some(with_sums(&c.with_codes(code)))
    }),
    ("weight-nibbles-exchanged", "each even k and the next are exchanged in the weights", |c| {
        let last = c.shape().size_k - 1;
        Some(with_sums(&c.with_codes(|k, n| c.column(n)[(k ^ 1).min(last)])))
    }),
    (
        "scale-of-first-group",
        "the scale of a column's first group is that of all of its groups",
        |c| with_scales(c, |scales, _| scales[0]),
    ),
    ("scale-of-next-group", "each group has the scale of the next one", |c| {
        with_scales(c, |scales, g| scales[(g + 1) % scales.len()])
    }),
    ("scale-magnitude", "negative scales are taken by their magnitude", |c| {
        each_scale(c, f32::abs)
    }),
    ("negative-scale-zero", "negative scales are taken for zero", |c| {
        each_scale(c, |s| s.max(0.0))
    }),
];

/// The columns with sums of their own codes and scales.
fn with_sums(columns: &Columns) -> Columns {
    let size_n = columns.shape().size_n;
    columns.with(|factors, _| match factors {
        Factors::Channel { sums, .. } => {
            for (n, sum) in sums.iter_mut().enumerate().take(size_n) {
                *sum = columns.column(n).iter().map(|&w| 16 * i32::from(w)).sum();
            }
        }
        Factors::Group { group_size, scales, sums } => {
            for (n, sum) in sums.iter_mut().enumerate().take(size_n) {
                let groups = columns.column(n).chunks_exact(*group_size);
                let own = &scales[n * groups.len()..];
                let term = |(codes, &scale): (&[i8], &u16)| {
                    let codes: i32 = codes.iter().map(|&w| i32::from(w)).sum();
                    codes as f32 * bf16_to_f32(scale)
                };
                *sum = groups.zip(own).map(term).sum();
            }
        }
    })
}

/// The columns whose group `g` has the scale that `scale` picks from those of its column.
fn with_scales(columns: &Columns, scale: impl Fn(&[u16], usize) -> u16) -> Option<Columns> {
    let Factors::Group { group_size, .. } = columns.factors() else { return None };
    let groups = columns.shape().size_k / group_size;
    let changed = columns.with(|factors, _| {
        if let Factors::Group { scales, .. } = factors {
            for column in scales.chunks_exact_mut(groups) {
                let old = column.to_vec();
                (0..groups).for_each(|g| column[g] = scale(&old, g));
            }
        }
    });
    Some(with_sums(&changed))
}

/// The columns with every scale changed; `None` if none is.
fn each_scale(columns: &Columns, change: fn(f32) -> f32) -> Option<Columns> {
    let changed = columns.with(|factors, _| match factors {
        Factors::Channel { scales, .. } => scales.iter_mut().for_each(|s| *s = change(*s)),
        Factors::Group { scales, .. } => {
            let bits = |s: u16| (change(bf16_to_f32(s)).to_bits() >> 16) as u16;
            scales.iter_mut().for_each(|s| *s = bits(*s));
        }
    });
    Some(with_sums(&changed))
}

impl Sources<'_> {
    /// Facts such as NaN or zeros, otherwise the known mistake whose results are within the errors of the
    /// class, otherwise the place.
    pub(super) fn diagnose_any_order(
        &self,
        rows: &QuantizedRows,
        output: &Wrong<'_>,
    ) -> Option<Diagnosis> {
        let (ty, size_n) = (self.config.dtype, self.config.size_n);
        let Wrong { bounded, found, bits, wrong } = *output;
        if let Some(finding) = self.constant_rows(bits, wrong) {
            return Some(finding);
        }
        let shape = [found.len() / size_n, size_n];
        let pairs: Vec<(f64, f64)> = wrong.iter().map(|&i| (found[i], bounded[i].exact)).collect();
        if let Some((id, text)) = plain::floats(&pairs, found.iter().all(|x| *x == 0.0)) {
            return Some(Diagnosis::explains(
                id,
                format!("{text}: {}", place::of_matrix(wrong, shape)),
            ));
        }
        let candidates = self.any_order_candidates(rows);
        let known = search(candidates.iter(), |candidate| {
            let made = (candidate.make)(()).filter(|made| made.len() == found.len())?;
            let made: Vec<f64> = made.iter().map(|&bits| ty.to_f64(bits)).collect();
            Some(Comparison::of_bounds(bounded, near(bounded, &made, size_n), found, wrong, ty))
        });
        Some(known.unwrap_or_else(|| place::diagnosis(wrong, shape)))
    }

    /// The known mistakes of any kernel, and those of kernels that read the weights themselves.
    fn any_order_candidates<'c>(&'c self, rows: &'c QuantizedRows) -> Vec<Candidate<'c, Vec<u32>>> {
        let ty = self.config.dtype;
        let made = move |rows: &QuantizedRows, columns: &Columns| {
            Some(scalar::product(rows, columns, ty).ok()?.bits())
        };
        let mut all = self.y_candidates(rows, &self.columns, [false; 2]);
        for (id, text, change) in COLUMNS {
            let make = move || made(rows, &change(&self.columns)?);
            all.push(Candidate::of(id, text, make));
        }
        let bias =
            |factor: f32| self.columns.with(|_, bias| bias.iter_mut().for_each(|b| *b *= factor));
        let twice = move || made(rows, &bias(2.0));
        all.push(Candidate::of("bias-twice", "the bias is added twice", twice));
        let scaled = move |scale: fn(f32) -> f32| {
            let mut rows = rows.clone();
            rows.reciprocals.iter_mut().for_each(|r| *r = scale(*r));
            made(&rows, &self.columns)
        };
        let text = "the sums are not multiplied by the step of their row of activations";
        all.push(Candidate::of("activation-scale-missing", text, move || scaled(|_| 1.0)));
        let text = "the sums are divided by the step of their row of activations";
        all.push(Candidate::of("activation-scale-inverted", text, move || scaled(|r| 1.0 / r)));
        all
    }
}

/// Bounds around the results of a mistake: those of the right results, wider by as much as the mistake
/// enlarges a row.
fn near<'n>(
    bounded: &'n [Bounded],
    made: &'n [f64],
    size_n: usize,
) -> impl Iterator<Item = (usize, Bounded)> + 'n {
    let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
    let factors: Vec<f64> = bounded
        .chunks(size_n)
        .zip(made.chunks(size_n))
        .map(|(right, made)| {
            let right = largest(&mut right.iter().map(|b| b.exact.abs()));
            let made = largest(&mut made.iter().map(|x| x.abs()));
            let factor = made / right;
            if factor.is_finite() { factor.max(1.0) } else { 1.0 }
        })
        .collect();
    bounded.iter().zip(made).enumerate().map(move |(i, (right, &exact))| {
        let width = right.below.max(right.above) * factors[i / size_n];
        let (lo, hi) = (exact - width, exact + width);
        let made = Bounded { exact, rounded: 0, centre: exact, lo, hi, below: width, above: width };
        (i, made)
    })
}
