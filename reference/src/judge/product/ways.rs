//! The ways to a pass besides the one that an output takes: the same output, scaled, may fall within
//! the bound of a wider class.
//!
//! A class whose bound accepts a larger uniform error than the declared limit is no way to a pass.

use super::known::Known;
use super::members;
use super::readings::{self, Chosen, Reading};
use super::stage::Stage;
use crate::Result;
use crate::judge::compare::elements;
use crate::judge::power::{Power, reach};
use crate::products::{Bounded, Class, Convention};

/// Number of elements whose bounds show the power of another class.
const ELEMENTS: usize = 1 << 17;

/// The bounds of each element, by class and convention.
type ByClass = Vec<Vec<Vec<Bounded>>>;

impl Stage<'_> {
    /// The power of a pass by a known schedule: that of every other way.
    pub(in crate::judge) fn power_beside(&self, known: &Known<'_>) -> Result<Power> {
        let conventions = self.conventions();
        let power = Power::every_bit().or_scaled(known.scaled);
        self.with_other_classes(power, &conventions, None)
    }

    /// The power of a verdict that is otherwise `power`, together with the classes that the stage
    /// would also accept.
    pub(super) fn with_other_classes(
        &self,
        mut power: Power,
        conventions: &[Convention],
        chosen: Option<&Chosen>,
    ) -> Result<Power> {
        let Some(part) = self.parts.iter().find(|p| !p.rows.is_empty()) else { return Ok(power) };
        let all = self.declared.classes_for(part.weight, self.input_dtype);
        if all.len() < 2 {
            return Ok(power);
        }
        let (conventions, _) = readings::distinct(self, conventions);
        let size_k = part.weight.shape().size_k;
        let (several, single): (Vec<Class>, Vec<Class>) =
            all.into_iter().partition(|class| class.members(size_k).len() > 1);
        for class in several {
            power = power.or_scaled(members::scaled(self, &class, &conventions)?);
        }
        let is_other = |class: &Class| chosen.is_none_or(|chosen| chosen.class != *class);
        let single: Vec<Class> = single.into_iter().filter(is_other).collect();
        let (found, made) = self.some_bounds(&single, &conventions)?;
        for bounded in made.iter().flatten() {
            let accepted = readings::accepted(bounded);
            let own = Power::of(&accepted, self.size_n(), self.dtype);
            if !own.is_way(self.declared.power_limit()) {
                continue;
            }
            let error = reach(self.dtype, found.iter().copied().zip(accepted));
            if let Some(error) = error {
                power = power.or(&Power { uniform_error: Some(error), ..own });
            }
        }
        Ok(power)
    }

    /// Values of some rows, evenly spaced among those of the parts, and their bounds by each class
    /// and convention.
    fn some_bounds(
        &self,
        classes: &[Class],
        conventions: &[Convention],
    ) -> Result<(Vec<f64>, ByClass)> {
        let mut made = vec![vec![Vec::new(); conventions.len()]; classes.len()];
        let mut found = Vec::new();
        let Some(widest) = classes.last() else { return Ok((found, made)) };
        let (size_n, bits) = (self.size_n(), elements(self.found));
        let step = bits.len().div_ceil(ELEMENTS).max(1);
        for part in self.parts.iter().filter(|p| !p.rows.is_empty()) {
            let rows: Vec<usize> = part.rows.iter().step_by(step).copied().collect();
            let Some((of_rows, radius)) = self.factors(&rows) else { continue };
            let bounds = self.with_judge(
                part,
                part.weight,
                &rows,
                (conventions, widest),
                |judge, recipes| judge.member_bounds(classes, recipes, &of_rows, radius.as_ref()),
            )?;
            for (all, bounds) in made.iter_mut().flatten().zip(bounds.into_iter().flatten()) {
                all.extend(bounds);
            }
            let values = rows.iter().flat_map(|row| &bits[row * size_n..][..size_n]);
            found.extend(values.map(|&b| self.dtype.to_f64(b)));
        }
        Ok((found, made))
    }
}

impl Chosen {
    /// Whether the interval of the class is a way to a pass besides the exact result.
    pub(super) fn admits_interval(&self, limit: f64) -> bool {
        match self.reading {
            Reading::Exact { .. } => !self.interval_error.is_none_or(|error| error > limit),
            Reading::Within(_) => true,
        }
    }
}
