//! Samples of a few rows and columns of a product. They rule out readings and members of classes,
//! and measure the parts of a verdict's power that need separate products.

use super::readings::{self, Chosen, Reading};
use super::stage::{Part, Stage};
use crate::judge::power::{Accepted, Power, rejects_sample, rejects_values, uniform_error};
use crate::num::interval::round_once;
use crate::products::tensor_core::LANES;
use crate::products::{Bounded, Class, Convention, Rows};
use crate::weight::Weight;
use crate::{Error, Result};

/// Columns of the sample for the power.
const COLUMNS: usize = 64;
/// Largest number of matrices in a sample.
const PARTS: usize = 2;

/// A few rows and columns of a part.
pub(in crate::judge) struct Sample<'s, 'c> {
    part: &'s Part<'c>,
    rows: Vec<usize>,
    /// The columns of the part's matrix.
    weight: Weight<'static>,
    /// Indices of its elements in the output, row by row.
    pub(in crate::judge) places: Vec<usize>,
}

impl<'s, 'c> Sample<'s, 'c> {
    fn new(
        stage: &Stage<'c>,
        part: &'s Part<'c>,
        rows: Vec<usize>,
        columns: &[usize],
    ) -> Result<Self> {
        let size_n = stage.size_n();
        let place = |&row: &usize| columns.iter().map(move |n| row * size_n + n);
        let places = rows.iter().flat_map(place).collect();
        Ok(Self { part, rows, weight: part.weight.gather_columns(columns)?, places })
    }

    /// The bounds of its elements by each convention.
    pub(in crate::judge) fn bounds(
        &self,
        stage: &Stage<'c>,
        how: (&[Convention], &Class),
    ) -> Result<Vec<Vec<Bounded>>> {
        let (rows, radius) = self.factors(stage)?;
        stage.bounds(self.part, &self.weight, &self.rows, how, (&rows, radius.as_ref()))
    }

    /// The bounds of its elements by each of the `members` of the class.
    pub(in crate::judge) fn member_bounds(
        &self,
        stage: &Stage<'c>,
        how: (&[Convention], &Class),
        members: &[Class],
    ) -> Result<Vec<Vec<Vec<Bounded>>>> {
        let (rows, radius) = self.factors(stage)?;
        stage.with_judge(self.part, &self.weight, &self.rows, how, |judge, recipes| {
            judge.member_bounds(members, recipes, &rows, radius.as_ref())
        })
    }

    fn factors(&self, stage: &Stage<'c>) -> Result<(Rows, Option<Rows>)> {
        let radius = stage.radius.as_ref().map(|radius| select(radius, &self.rows)).transpose()?;
        Ok((select(&stage.rows, &self.rows)?, radius))
    }
}

fn select(all: &Rows, which: &[usize]) -> Result<Rows> {
    let missing = || Error::size("rows", all.rows(), "one for each output row");
    all.select(which).ok_or_else(missing)
}

/// At most `count` numbers below `size`, evenly spaced from first to last.
fn spread(count: usize, size: usize) -> impl Iterator<Item = usize> {
    let step = move |i: usize| if size <= count { i } else { i * (size - 1) / (count - 1).max(1) };
    (0..count.min(size)).map(step)
}

impl<'c> Stage<'c> {
    /// Samples of the first parts, with at most `count` evenly spaced rows each.
    pub(in crate::judge) fn spread_samples(&self, count: usize) -> Result<Vec<Sample<'_, 'c>>> {
        let columns: Vec<usize> = spread(LANES, self.size_n()).collect();
        let filled = self.parts.iter().filter(|part| !part.rows.is_empty()).take(PARTS);
        let rows = |part: &Part<'_>| spread(count, part.rows.len()).map(|i| part.rows[i]).collect();
        filled.map(|part| Sample::new(self, part, rows(part), &columns)).collect()
    }

    /// Adds the power that is measured on a sample: a missing half of k, split-K through 16 bits,
    /// and the uniform errors that other `conventions` would admit.
    pub(super) fn sample_power(
        &self,
        chosen: &Chosen,
        conventions: &[Convention],
        power: &mut Power,
    ) -> Result<()> {
        let (distinct, same) = readings::distinct(self, conventions);
        let mut own = conventions.iter().zip(&same).filter(|(c, _)| **c == chosen.convention);
        let own = own.next().map_or(0, |(_, &at)| at);
        let right = |i: usize| Accepted::from(&chosen.bounded[i]);
        let (mut missing, mut split) = (Vec::new(), Vec::new());
        let mut pairs = vec![Vec::new(); distinct.len()];
        for sample in self.power_samples()? {
            let made = self.with_halves(&sample, (&distinct, &chosen.class))?;
            for (pairs, made) in pairs.iter_mut().zip(&made) {
                let accepted = made.iter().map(Accepted::from);
                pairs.extend(sample.places.iter().map(|&i| right(i)).zip(accepted));
            }
            let Some(made) = made.get(own) else { continue };
            let mut halves = made[sample.places.len()..].to_vec();
            chosen.reading.narrow(&mut halves, self.dtype);
            let (last_half, first_half) = halves.split_at(sample.places.len());
            let places = || sample.places.iter().copied().zip(last_half);
            missing.extend(places().map(|(i, b)| (Accepted::from(b), right(i))));
            // With a bias, the epilogues of both parts would add it.
            if sample.weight.bias.is_none() {
                let value = |b: &Bounded| self.dtype.to_f64(b.rounded);
                let sum = |b, a| round_once(self.dtype, value(a) + value(b));
                split.extend(places().zip(first_half).map(|((i, b), a)| (sum(b, a), right(i))));
            }
        }
        // An exact result is one number, while its convention admits an interval, unless that is
        // too wide for a pass.
        let admits = chosen.admits_interval(self.declared.power_limit());
        let whole = |c: &Convention| chosen.reading == Reading::Within(*c) || !admits;
        for (_, &at) in conventions.iter().zip(&same).filter(|(c, _)| !whole(c)) {
            let error = uniform_error(self.dtype, pairs[at].iter().copied());
            power.uniform_error = power.uniform_error.zip(error).map(|(a, b)| a.max(b));
        }
        power.rejects.half_k_missing = rejects_sample(self.dtype, missing);
        power.split_k_16_bit = rejects_values(self.dtype, split);
        Ok(())
    }

    /// A run of columns of the parts with the most rows, and a few rows of each.
    fn power_samples(&self) -> Result<Vec<Sample<'_, 'c>>> {
        let size_n = self.size_n();
        let start = (size_n / 2).min(size_n.saturating_sub(COLUMNS));
        let columns: Vec<usize> = (start..size_n.min(start + COLUMNS)).collect();
        let mut parts: Vec<&Part<'c>> = self.parts.iter().filter(|p| !p.rows.is_empty()).collect();
        parts.sort_by_key(|p| std::cmp::Reverse(p.rows.len()));
        let mut samples = Vec::new();
        for part in parts.into_iter().take(PARTS) {
            let last = part.rows.len() - 1;
            let mut rows = vec![part.rows[0], part.rows[last / 2], part.rows[last]];
            rows.dedup();
            samples.push(Sample::new(self, part, rows, &columns)?);
        }
        Ok(samples)
    }

    /// The sample's elements by each convention: those of all of k, of its last half, and of its first
    /// half; the rest of the activations is zero.
    fn with_halves(
        &self,
        sample: &Sample<'_, 'c>,
        how: (&[Convention], &Class),
    ) -> Result<Vec<Vec<Bounded>>> {
        let size_k = self.rows.size_k();
        let half = size_k / 2;
        let row = |&(row, range): &(usize, &std::ops::Range<usize>)| {
            let (row, range) = (self.rows.row(row), range.clone());
            (0..size_k).map(move |k| if range.contains(&k) { row[k] } else { 0.0 })
        };
        let ranges = [0..size_k, half..size_k, 0..half];
        let all: Vec<_> =
            ranges.iter().flat_map(|range| sample.rows.iter().map(move |&m| (m, range))).collect();
        let rows = Rows::new(size_k, all.iter().flat_map(row).collect())?;
        let of: Vec<usize> = all.iter().map(|(m, _)| *m).collect();
        self.bounds(sample.part, &sample.weight, &of, how, (&rows, None))
    }
}
