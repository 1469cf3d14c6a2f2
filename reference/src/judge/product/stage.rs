//! One product of a case, and its bounds.

use super::Declared;
use super::hints::Hints;
use crate::Result;
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::products::{Bounded, Class, Convention, Extras, Judge, Recipe, Rows};
use crate::weight::Weight;

/// Rows that are multiplied with one matrix.
pub(crate) struct Part<'c> {
    pub(crate) weight: &'c Weight<'c>,
    /// Its rows of the output.
    pub(crate) rows: Vec<usize>,
    /// The expert's index on this rank, in a layer.
    pub(crate) expert: Option<usize>,
    /// The global id of the expert.
    pub(crate) global: usize,
}

/// A product of a case.
pub(crate) struct Stage<'c> {
    /// Output.
    pub(crate) name: &'static str,
    pub(crate) found: &'c Tensor<'c>,
    /// Activations of each output row.
    pub(crate) rows: Rows,
    pub(crate) radius: Option<Rows>,
    /// Rows without a part are zero.
    pub(crate) parts: &'c [Part<'c>],
    /// Row order of each part's matrix (act-order).
    pub(crate) orders: Option<&'c [Vec<u32>]>,
    pub(crate) extras: Extras<'c>,
    pub(crate) dtype: ScalarType,
    /// Type of 8-bit activations.
    pub(crate) input_dtype: Option<ScalarType>,
    pub(crate) declared: &'c Declared,
    /// Slots per token in a layer, whose rows are token · top_k + slot.
    pub(crate) top_k: Option<usize>,
    /// Further facts about the case, for a diagnosis.
    pub(crate) hints: Hints<'c>,
}

impl Stage<'_> {
    /// Columns of the output.
    pub(super) fn size_n(&self) -> usize {
        self.found.shape().last().copied().unwrap_or(1).max(1)
    }

    /// The convention of this reading.
    pub(super) fn convention(&self) -> Convention {
        self.declared.convention.unwrap_or_default()
    }

    /// The recipe of one matrix under a convention.
    pub(crate) fn recipe(
        &self,
        weight: &Weight<'_>,
        convention: Convention,
        extras: Extras<'_>,
    ) -> Result<Recipe> {
        Recipe::new(convention, weight, self.dtype, extras)
    }

    /// The activations of some output rows, and their uncertainty; `None` if one has none.
    pub(super) fn factors(&self, of: &[usize]) -> Option<(Rows, Option<Rows>)> {
        let radius = match &self.radius {
            Some(radius) => Some(radius.select(of)?),
            None => None,
        };
        Some((self.rows.select(of)?, radius))
    }

    /// Exact results and bounds of some rows of a part, by each convention and a class.
    pub(super) fn part(
        &self,
        part: &Part<'_>,
        of: &[usize],
        how: (&[Convention], &Class),
    ) -> Result<Vec<Vec<Bounded>>> {
        let missing = || crate::Error::size("rows", self.rows.rows(), "one for each output row");
        let (rows, radius) = self.factors(of).ok_or_else(missing)?;
        self.bounds(part, part.weight, of, how, (&rows, radius.as_ref()))
    }

    /// Exact results and bounds, by each convention, of `rows` times `weight` (columns of the
    /// part's matrix) in place of the output rows `of`.
    pub(super) fn bounds(
        &self,
        part: &Part<'_>,
        weight: &Weight<'_>,
        of: &[usize],
        how: (&[Convention], &Class),
        (rows, radius): (&Rows, Option<&Rows>),
    ) -> Result<Vec<Vec<Bounded>>> {
        self.with_judge(part, weight, of, how, |judge, recipes| {
            judge.bounds_each(recipes, rows, radius)
        })
    }

    /// Calls `then` with the judge of the output rows `of` times `weight` (columns of the part's
    /// matrix) and the recipes of the conventions.
    pub(super) fn with_judge<R: Default>(
        &self,
        part: &Part<'_>,
        weight: &Weight<'_>,
        of: &[usize],
        (conventions, class): (&[Convention], &Class),
        then: impl FnOnce(&Judge<'_>, &[Recipe]) -> Result<R>,
    ) -> Result<R> {
        let pick = |values: Option<&[f32]>| -> Option<Vec<f32>> {
            values.map(|v| of.iter().map(|&r| v[r]).collect())
        };
        let (scales, routers) =
            (pick(self.extras.activation_scales), pick(self.extras.router_weights));
        let extras =
            Extras { activation_scales: scales.as_deref(), router_weights: routers.as_deref() };
        let recipe = |&convention: &Convention| self.recipe(weight, convention, extras);
        let recipes: Vec<Recipe> = conventions.iter().map(recipe).collect::<Result<_>>()?;
        let Some(first) = recipes.first() else { return Ok(R::default()) };
        let order = match (self.orders, part.expert) {
            (Some(orders), expert) => orders.get(expert.unwrap_or(0)).map(Vec::as_slice),
            (None, _) => None,
        };
        then(&Judge { weight, order, recipe: first, class, extras }, &recipes)
    }
}
