//! What a product's verdict could not have missed, looked at in a few rows and columns: outputs that
//! take a product of their own to compute.

use super::readings::{Chosen, Reading};
use super::stage::{Part, Stage};
use crate::check::power::{Accepted, Power, rejects_sample, rejects_values, uniform_error};
use crate::gemm::{Bounded, Convention, Rows};
use crate::interval::round_once;
use crate::weight::Weight;
use crate::{Error, Result};

/// Columns of the sample.
const COLUMNS: usize = 64;
/// Matrices of the sample: those with the most rows.
const PARTS: usize = 2;

/// A few rows of a part, and a run of its columns.
struct Sample<'s, 'c> {
    part: &'s Part<'c>,
    rows: Vec<usize>,
    weight: Weight<'static>,
    /// Places of its elements in the output.
    places: Vec<usize>,
}

impl<'c> Stage<'c> {
    /// Adds what is looked at on a sample: half of k left out, split-K through 16 bits, and the
    /// uniform errors that other `conventions` would admit.
    pub(super) fn sample_power(
        &self,
        chosen: &Chosen,
        conventions: &[Convention],
        power: &mut Power,
    ) -> Result<()> {
        let (mut missing, mut split) = (Vec::new(), Vec::new());
        for sample in self.samples()? {
            let last_half = self.of_range(&sample, chosen, |k, size_k| k >= size_k / 2)?;
            let right = |i: usize| Accepted::from(&chosen.bounded[i]);
            let pairs = || sample.places.iter().copied().zip(&last_half);
            missing.extend(pairs().map(|(i, b)| (Accepted::from(b), right(i))));
            // With a bias, the parts' epilogues would add it twice.
            if sample.weight.bias.is_none() {
                let first_half = self.of_range(&sample, chosen, |k, size_k| k < size_k / 2)?;
                let value = |b: &Bounded| self.dtype.to_f64(b.rounded);
                split.extend(
                    pairs()
                        .zip(&first_half)
                        .map(|((i, b), a)| (round_once(self.dtype, value(a) + value(b)), right(i))),
                );
            }
        }
        // An exact result is one number, and its convention admits more.
        let whole = |c: &Convention| chosen.reading == Reading::Within(*c);
        for &other in conventions.iter().filter(|c| !whole(c)) {
            let mut pairs = Vec::new();
            for sample in self.samples()? {
                let rows = self.rows.select(&sample.rows).ok_or_else(|| {
                    Error::size("rows", self.rows.rows(), "one for each output row")
                })?;
                let how = (other, &chosen.class);
                let made =
                    self.bounds(sample.part, &sample.weight, &sample.rows, how, (&rows, None))?;
                let right = |i: &usize| Accepted::from(&chosen.bounded[*i]);
                pairs.extend(sample.places.iter().map(right).zip(made.iter().map(Accepted::from)));
            }
            let error = uniform_error(self.dtype, pairs);
            power.uniform_error = power.uniform_error.zip(error).map(|(a, b)| a.max(b));
        }
        power.rejects.half_k_missing = rejects_sample(self.dtype, missing);
        power.split_k_16_bit = rejects_values(self.dtype, split);
        Ok(())
    }

    fn samples(&self) -> Result<Vec<Sample<'_, 'c>>> {
        let size_n = self.size_n();
        let start = (size_n / 2).min(size_n.saturating_sub(COLUMNS));
        let columns = start..size_n.min(start + COLUMNS);
        let mut parts: Vec<&Part<'c>> = self.parts.iter().filter(|p| !p.rows.is_empty()).collect();
        parts.sort_by_key(|p| std::cmp::Reverse(p.rows.len()));
        let mut samples = Vec::new();
        for part in parts.into_iter().take(PARTS) {
            let last = part.rows.len() - 1;
            let mut rows = vec![part.rows[0], part.rows[last / 2], part.rows[last]];
            rows.dedup();
            let weight = part.weight.slice_columns(columns.clone())?;
            let place = |&row: &usize| columns.clone().map(move |n| row * size_n + n);
            let places = rows.iter().flat_map(place).collect();
            samples.push(Sample { part, rows, weight, places });
        }
        Ok(samples)
    }

    /// The sample's elements of a part of k; the rest of the activations is zero.
    fn of_range(
        &self,
        sample: &Sample<'_, '_>,
        chosen: &Chosen,
        of: impl Fn(usize, usize) -> bool,
    ) -> Result<Vec<Bounded>> {
        let size_k = self.rows.size_k();
        let of = &of;
        let row = |&row: &usize| {
            let row = self.rows.row(row);
            (0..size_k).map(move |k| if of(k, size_k) { row[k] } else { 0.0 })
        };
        let rows = Rows::new(size_k, sample.rows.iter().flat_map(row).collect())?;
        let how = (chosen.convention, &chosen.class);
        let mut made =
            self.bounds(sample.part, &sample.weight, &sample.rows, how, (&rows, None))?;
        chosen.reading.narrow(&mut made, self.dtype);
        Ok(made)
    }
}
