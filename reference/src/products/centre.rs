//! Sums in a known order: the unit's result for each part, bit for bit, and the distance of the f32
//! sum of the parts from their exact sum in any order.

use std::ops::Range;
use std::sync::OnceLock;

use rayon::prelude::*;

use super::bound::{Class, Order};
use super::columns::{Columns, TILE};
use super::rows::Rows;
use super::schedule::UnitName;
use super::tensor_core::{LANES, Panel, Row, Unit};
use crate::Result;
use crate::num::scalar::{ScalarType, f64_to_f32_rne};

/// One element's f32 sum.
#[derive(Debug, Clone, Copy)]
pub(super) struct Centre {
    /// The exact sum of the parts.
    value: f64,
    /// Largest distance of a kernel's sum from it.
    radius: f64,
}

impl Centre {
    pub(super) fn is_finite(&self) -> bool {
        (self.value.abs() + self.radius) < f64::from(f32::MAX)
    }

    /// The smallest possible f32 sum.
    pub(super) fn lo(&self) -> f64 {
        f64::from(f64_to_f32_rne(self.value - self.radius))
    }

    /// The largest possible f32 sum.
    pub(super) fn hi(&self) -> f64 {
        f64::from(f64_to_f32_rne(self.value + self.radius))
    }
}

/// The scale of a group in a column.
pub(super) type GroupScale<'r> = &'r (dyn Fn(u32, usize) -> f64 + Sync);

/// The operands of the unit for a weight.
#[derive(Clone, Copy)]
pub(super) struct Raw<'r> {
    /// The values that enter the unit, times 2^power.
    pub(super) columns: &'r dyn Columns,
    pub(super) power: i32,
    /// The group of each k, and the scales that multiply the sum of each group.
    pub(super) groups: Option<(&'r [u32], GroupScale<'r>)>,
}

/// The range of k and the group of each sum.
type Cuts = Vec<(Range<usize>, u32)>;

/// Sums of 16 columns, by member and row.
type PanelSums = Vec<Vec<[Centre; LANES]>>;

/// The codes of a type, indexed by value.
struct Codes {
    ty: ScalarType,
    e4m3: Option<&'static [u8]>,
}

/// Bits of an f64 below e4m3's three mantissa bits.
const BELOW_E4M3: u32 = 49;

impl Codes {
    fn new(ty: ScalarType) -> Self {
        static E4M3: OnceLock<Vec<u8>> = OnceLock::new();
        let e4m3 = (ty == ScalarType::FLOAT8_E4M3FN).then(|| {
            let table = E4M3.get_or_init(|| {
                let value = |i: u64| f64::from_bits(i << BELOW_E4M3);
                // 0x7f if e4m3 has no such value.
                let code = |i| match ty.encode_rne(value(i)) {
                    code if ty.to_f64(code) == value(i) => code as u8,
                    _ => 0x7f,
                };
                (0..1 << (64 - BELOW_E4M3)).map(code).collect()
            });
            table.as_slice()
        });
        Self { ty, e4m3 }
    }

    /// The code of exactly `value`.
    fn of(&self, value: f64) -> Option<u32> {
        let Some(table) = self.e4m3 else {
            let code = self.ty.encode_rne(value);
            return (self.ty.to_f64(code) == value || value.is_nan()).then_some(code);
        };
        let bits = value.to_bits();
        let code = table[(bits >> BELOW_E4M3) as usize];
        let exact = bits.trailing_zeros() >= BELOW_E4M3 && code != 0x7f;
        (exact || value.is_nan()).then_some(code.into())
    }
}

impl Raw<'_> {
    /// The sums `[M, N]` by each of `classes`; `None` for a class with several orders, for factors
    /// that are not values of the unit's types, and for groups that do not fill its instructions.
    /// Classes of one unit share its operands.
    pub(super) fn centres(
        &self,
        classes: &[Class],
        rows: &Rows,
    ) -> Result<Vec<Option<Vec<Centre>>>> {
        let size_k = self.columns.size_k();
        let mut all = vec![None; classes.len()];
        let mut units: Vec<(UnitName, Vec<(usize, Cuts)>)> = Vec::new();
        for (i, class) in classes.iter().enumerate() {
            let Order::Ascending(set) = &class.order else { continue };
            let Some((name, starts)) = set.single(size_k) else { continue };
            let Some(cuts) = self.cuts(name.find()?, &starts, rows) else { continue };
            match units.iter_mut().find(|(unit, _)| *unit == name) {
                Some((_, members)) => members.push((i, cuts)),
                None => units.push((name, vec![(i, cuts)])),
            }
        }
        for (name, members) in units {
            let Some(panels) = self.panels(name.find()?, rows, &members)? else { continue };
            for (place, (i, _)) in members.iter().enumerate() {
                all[*i] = Some(self.in_order(rows, &panels, place));
            }
        }
        Ok(all)
    }

    /// The sums of each 16 columns, of each member and row; `None` where a factor has no code.
    fn panels(
        &self,
        unit: &Unit,
        rows: &Rows,
        members: &[(usize, Cuts)],
    ) -> Result<Option<Vec<PanelSums>>> {
        let (size_k, size_n) = (self.columns.size_k(), self.columns.size_n());
        let padded = size_k.next_multiple_of(unit.size_k);
        let codes = Codes::new(unit.inputs.0);
        let row = |m: usize| -> Option<Result<Row>> {
            // A code times its scale is exact, so the quotient is.
            let code = |(k, &x): (usize, &f64)| codes.of(x / rows.scale(m, k));
            let mut bits =
                rows.row(m).iter().enumerate().map(code).collect::<Option<Vec<u32>>>()?;
            bits.resize(padded, 0);
            Some(Row::new(unit, &bits))
        };
        let decoded: Option<Result<Vec<Row>>> = (0..rows.rows()).map(row).collect();
        let Some(decoded) = decoded else { return Ok(None) };
        let decoded = decoded?;
        let firsts: Vec<usize> = (0..size_n).step_by(LANES).collect();
        let panels =
            firsts.par_iter().map(|&n0| self.panel((unit, padded), n0, (rows, &decoded), members));
        let panels: Option<Result<Vec<_>>> = panels.collect();
        panels.transpose()
    }

    /// One member's sums, row by row.
    fn in_order(&self, rows: &Rows, panels: &[PanelSums], member: usize) -> Vec<Centre> {
        let size_n = self.columns.size_n();
        let mut all = Vec::with_capacity(rows.rows() * size_n);
        for m in 0..rows.rows() {
            for (panel, n0) in panels.iter().zip((0..size_n).step_by(LANES)) {
                all.extend_from_slice(&panel[member][m][..LANES.min(size_n - n0)]);
            }
        }
        all
    }

    /// The range of k and the group of each sum; sums are cut at `starts` and at the ends of
    /// groups, which scaled rows share.
    fn cuts(&self, unit: &Unit, starts: &[usize], rows: &Rows) -> Option<Cuts> {
        let size_k = self.columns.size_k();
        let group = |k: usize| self.groups.map_or(0, |(groups, _)| groups[k]);
        let mut starts = starts.to_vec();
        starts.extend((1..size_k).filter(|&k| group(k) != group(k - 1)));
        if rows.largest_scale().is_some() {
            starts.extend((0..size_k).step_by(rows.scaled_group()?));
        }
        starts.sort_unstable();
        starts.dedup();
        if starts.iter().any(|k| !k.is_multiple_of(unit.size_k)) {
            return None;
        }
        let padded = size_k.next_multiple_of(unit.size_k);
        let ends = starts.iter().skip(1).copied().chain([padded]);
        Some(starts.iter().zip(ends).map(|(&start, end)| (start..end, group(start))).collect())
    }

    /// Columns from `n0`, for every member and row.
    fn panel(
        &self,
        (unit, padded): (&Unit, usize),
        n0: usize,
        (rows, decoded): (&Rows, &[Row]),
        members: &[(usize, Cuts)],
    ) -> Option<Result<PanelSums>> {
        let (size_k, size_n) = (self.columns.size_k(), self.columns.size_n());
        let codes = Codes::new(unit.inputs.1);
        let undo = f64::from(-self.power).exp2();
        let mut bits = vec![[0; LANES]; padded];
        let mut tile = vec![[0.0; TILE]; size_k];
        for first in (0..LANES).step_by(TILE).filter(|l| n0 + l < size_n) {
            self.columns.tile(n0 + first, &mut tile);
            for (bits, values) in bits.iter_mut().zip(&tile) {
                for (bits, value) in bits[first..].iter_mut().zip(values) {
                    *bits = codes.of(value * undo)?;
                }
            }
        }
        let panel = match Panel::new(unit, padded, |k, l| bits[k][l]) {
            Ok(panel) => panel,
            Err(e) => return Some(Err(e)),
        };
        let one = |(_, cuts): &(usize, Cuts)| {
            let scale = |(_, group): &(Range<usize>, u32)| {
                std::array::from_fn(|l| match self.groups {
                    Some((_, scale)) if n0 + l < size_n => scale(*group, n0 + l),
                    _ => 1.0,
                })
            };
            let scales: Vec<[f64; LANES]> = cuts.iter().map(scale).collect();
            let sum = |(m, row): (usize, &Row)| {
                let of_row = |k| rows.scale(m, k);
                self.sum(unit, (row, &of_row), &panel, cuts, &scales)
            };
            decoded.iter().enumerate().map(sum).collect()
        };
        Some(Ok(members.iter().map(one).collect()))
    }

    fn sum(
        &self,
        unit: &Unit,
        (row, of_row): (&Row, &dyn Fn(usize) -> f64),
        panel: &Panel,
        ranges: &[(Range<usize>, u32)],
        scales: &[[f64; LANES]],
    ) -> [Centre; LANES] {
        let mut sides = [[0.0f64; LANES]; 2];
        // The scales of rows round the product of the scales, or the part, once more.
        let (mut roundings, mut edges) = (1.0, [0.0f64; LANES]);
        for ((range, _), scales) in ranges.iter().zip(scales) {
            let mut part = [0; LANES];
            unit.accumulate_panel(row, panel, range.clone(), &mut part);
            let of_row = of_row(range.start);
            if of_row != 1.0 {
                roundings = 2.0;
            }
            for l in 0..LANES {
                // 24 bits by 24: exact; the row's scale rounds to f64.
                let part = f64::from(f32::from_bits(part[l]));
                let value = part * scales[l] * of_row;
                edges[l] += part.abs() + scales[l].max(of_row);
                if value < 0.0 {
                    sides[1][l] -= value;
                } else {
                    sides[0][l] += value;
                }
            }
        }
        let parts = ranges.len() as f64;
        let scaled = self.groups.is_some();
        let factor = f64::from(self.power).exp2();
        std::array::from_fn(|l| {
            let [positive, negative] = [sides[0][l], sides[1][l]];
            let mut radius = 0.0;
            if ranges.len() > 1 || scaled {
                // Each f32 addition rounds by 2^-24 of a partial sum, each multiplication by a
                // group's scale by 2^-24 of the part; the rest covers the error of this f64 sum.
                let once = f64::from(f32::EPSILON) / 2.0;
                let growth = (2.0 * parts * once).exp();
                let additions = (parts - 1.0) * positive.max(negative);
                let products = if scaled { roundings * (positive + negative) } else { 0.0 };
                let lost = parts * f64::EPSILON * (positive + negative);
                let least = f64::from(-149).exp2();
                let edge = if roundings > 1.0 { edges[l] } else { 0.0 };
                let tiny = if scaled { (parts + edge) * least } else { 0.0 };
                radius = (additions + products) * once * growth + lost + tiny;
            }
            Centre { value: (positive - negative) * factor, radius: radius * factor }
        })
    }
}
