//! Compares a kernel's outputs with the exact product and the bound of its class.

use rayon::prelude::*;

use super::bound::{Class, Growth, Inputs};
use super::bounded::Bounded;
use super::centre::{Centre, Raw};
use super::columns::{Columns, Rule, WeightColumns};
use super::exact::{Element, product};
use super::recipe::{Extras, Recipe};
use super::rows::Rows;
use super::summed::{Errors, Summed};
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// A product to judge: one matrix and the declared arithmetic of its kernel.
#[derive(Clone, Copy)]
pub struct Judge<'j> {
    /// The matrix.
    pub weight: &'j Weight<'j>,
    /// Order of the rows in the kernel's loop (act-order's sort), or as stored.
    pub order: Option<&'j [u32]>,
    /// Scales, bias, roundings.
    pub recipe: &'j Recipe,
    /// Accumulation.
    pub class: &'j Class,
    /// Scales and router weights of the rows.
    pub extras: Extras<'j>,
}

impl Judge<'_> {
    /// The exact result and the bounds of every element of `rows` · W, row by row. `rows` have
    /// their k in stored order; `radius`, if given, is the uncertainty of each of their elements.
    ///
    /// # Errors
    /// Returns an error for inconsistent operands.
    pub fn bounds(&self, rows: &Rows, radius: Option<&Rows>) -> Result<Vec<Bounded>> {
        let classes = std::slice::from_ref(self.class);
        self.stored(classes, (rows, radius), |judge, element, context| {
            judge.bounded(element, element.n, context)
        })
    }

    /// As [`Self::bounds`], under each of `recipes` instead of the judge's recipe. Sums that
    /// recipes share are computed once.
    ///
    /// # Errors
    /// Returns an error for inconsistent operands.
    pub fn bounds_each(
        &self,
        recipes: &[Recipe],
        rows: &Rows,
        radius: Option<&Rows>,
    ) -> Result<Vec<Vec<Bounded>>> {
        let classes = std::slice::from_ref(self.class);
        let errors = |judge: &Judge<'_>, element: &Element<'_>, context: &Context| {
            judge.errors(judge.class, 0, element, context)
        };
        let mut made = self.shared(recipes, classes, (rows, radius), errors, |error, _| error)?;
        Ok(made.pop().unwrap_or_default())
    }

    /// As [`Self::bounds_each`], for each of the `members` of the judge's class, and each of `recipes`.
    ///
    /// # Errors
    /// Returns an error for inconsistent operands.
    pub fn member_bounds(
        &self,
        members: &[Class],
        recipes: &[Recipe],
        rows: &Rows,
        radius: Option<&Rows>,
    ) -> Result<Vec<Vec<Vec<Bounded>>>> {
        let errors = |judge: &Judge<'_>, element: &Element<'_>, context: &Context| {
            let one = |(i, member)| judge.errors(member, i, element, context);
            members.iter().enumerate().map(one).collect::<Vec<_>>()
        };
        self.shared(recipes, members, (rows, radius), errors, |errors, i| &errors[i])
    }

    /// The bounds by each class and recipe. `errors` computes the errors of an element for all
    /// classes; `of_class` selects one.
    fn shared<E: Send + Sync>(
        &self,
        recipes: &[Recipe],
        classes: &[Class],
        (rows, radius): (&Rows, Option<&Rows>),
        errors: impl Fn(&Judge<'_>, &Element<'_>, &Context) -> E + Sync,
        of_class: impl Fn(&E, usize) -> &Errors + Sync,
    ) -> Result<Vec<Vec<Vec<Bounded>>>> {
        let mut all = vec![vec![Vec::new(); recipes.len()]; classes.len()];
        let mut done = vec![false; recipes.len()];
        for (first, recipe) in recipes.iter().enumerate() {
            if done[first] {
                continue;
            }
            let judge = Judge { recipe, ..*self };
            let sums = judge.stored(classes, (rows, radius), |judge, element, context| {
                (Summed::new(element, context.size_k), errors(judge, element, context))
            })?;
            let (size_n, output) = (self.weight.shape().size_n, recipe.dtype);
            for (i, recipe) in recipes.iter().enumerate().skip(first) {
                if done[i] || !recipe.sums_as(&recipes[first], self.weight) {
                    continue;
                }
                done[i] = true;
                for (class, made) in all.iter_mut().enumerate() {
                    let each = sums.par_iter().with_min_len(PER_THREAD).enumerate();
                    let each = each.map(|(at, (sum, errors))| {
                        let (m, n) = (at / size_n, at % size_n);
                        let chain = recipe.chain(self.weight, self.extras, m, n);
                        sum.through(of_class(errors, class), &chain, output)
                    });
                    made[i] = each.collect();
                }
            }
        }
        Ok(all)
    }

    /// k per group; all of k if groups differ in size.
    fn group_size(&self) -> usize {
        match (&self.weight.groups, self.order) {
            (Groups::Uniform(GroupSize::Of(size)), None) => *size,
            _ => self.weight.shape().size_k,
        }
    }

    /// Whether the unit sums codes and group scales multiply the sums.
    fn group_scales(&self) -> bool {
        self.recipe.rule == Rule::Exact && self.recipe.operands.size_bits() == 8
    }

    /// As [`Self::bounds`], for other `columns`; `at` maps each of them to the column whose scale
    /// and bias it uses.
    ///
    /// # Errors
    /// Returns an error for inconsistent operands.
    pub fn bounds_of(
        &self,
        columns: &dyn Columns,
        at: &(dyn Fn(usize) -> usize + Sync),
        rows: &Rows,
        radius: Option<&Rows>,
    ) -> Result<Vec<Bounded>> {
        let power = self.recipe.power;
        let raw = (!self.group_scales()).then_some(Raw { columns, power, groups: None });
        let classes = std::slice::from_ref(self.class);
        self.each(columns, raw, classes, (rows, radius), |judge, element, context| {
            judge.bounded(element, at(element.n), context)
        })
    }

    /// Calls `each` for every element of `rows` · W; the context has the centres of `classes`.
    fn stored<R: Send>(
        &self,
        classes: &[Class],
        factors: (&Rows, Option<&Rows>),
        each: impl Fn(&Self, &Element<'_>, &Context) -> R + Sync,
    ) -> Result<Vec<R>> {
        let columns = self.recipe.columns(self.weight, self.order)?;
        if !self.group_scales() {
            let raw = Raw { columns: &columns, power: self.recipe.power, groups: None };
            return self.each(&columns, Some(raw), classes, factors, each);
        }
        let codes = WeightColumns::new(self.weight, Rule::Unscaled, self.order)?;
        let scale = |group: u32, n: usize| self.weight.scales.value(group as usize, n);
        let raw = Raw { columns: &codes, power: 0, groups: Some((codes.groups(), &scale)) };
        self.each(&columns, Some(raw), classes, factors, each)
    }

    /// Calls `each` for every element of `rows` · `columns`; `raw` are the unit's operands, if
    /// known.
    fn each<R: Send>(
        &self,
        columns: &dyn Columns,
        raw: Option<Raw<'_>>,
        classes: &[Class],
        (rows, radius): (&Rows, Option<&Rows>),
        each: impl Fn(&Self, &Element<'_>, &Context) -> R + Sync,
    ) -> Result<Vec<R>> {
        let gathered = match self.order {
            Some(order) => {
                Some((rows.gather(order)?, radius.map(|r| r.gather(order)).transpose()?))
            }
            None => None,
        };
        let (rows, radius) = match &gathered {
            Some((rows, radius)) => (rows, radius.as_ref()),
            None => (rows, radius),
        };
        let other = rows.scaled_group().is_some_and(|group| group != self.group_size());
        if rows.largest_scale().is_some() && (other || !self.group_scales()) {
            let what = format!("{}: activations with scales for groups", self.weight.name);
            let expected = format!("the groups of the weight, {} k", self.group_size());
            return Err(Error::unsupported(what, expected));
        }
        let mut stripes = Vec::new();
        let mut request = self.class.request(&mut stripes);
        request.radius = radius;
        let centres = match raw {
            Some(raw) if radius.is_none() => raw.centres(classes, rows)?,
            _ => Vec::new(),
        };
        let (inputs, size_k) = (self.inputs(rows), columns.size_k());
        let growth = self.class.growth(size_k, inputs.output);
        let edge = rows.largest_scale().map_or(0.0, |largest| self.edge(largest, size_k));
        let context = Context { centres, inputs, growth, size_k, size_n: columns.size_n(), edge };
        product(rows, columns, request, |element| each(self, element, &context))
    }

    /// How much the products of two scales that are not normal f32 can lose in all.
    fn edge(&self, largest: f32, size_k: usize) -> f64 {
        let scales = &self.weight.scales;
        let of_weight = scales.iter_bits().map(|b| scales.ty().to_f64(b)).fold(0.0, f64::max);
        let largest = f64::from(largest).max(of_weight).max(1.0);
        // Codes are below 2^9.
        size_k as f64 * f64::from(18 - 149).exp2() * largest
    }

    /// The types of the product.
    fn inputs(&self, rows: &Rows) -> Inputs {
        let (operands, group_scales) = (self.recipe.operands, self.group_scales());
        let scaled = rows.largest_scale().is_some();
        Inputs {
            activations: if scaled { ScalarType::FLOAT32 } else { operands },
            weights: if group_scales { self.weight.ty } else { operands },
            output: self.recipe.dtype,
            group_scales: group_scales.then(|| self.group_size()),
        }
    }

    /// The largest errors of a kernel of `class`, the context's `i`th, in the sum.
    fn errors(&self, class: &Class, i: usize, element: &Element<'_>, context: &Context) -> Errors {
        let centres = context.centres.get(i).and_then(Option::as_ref);
        let centre = centres.map(|all| all[element.m * context.size_n + element.n]);
        match centre.filter(Centre::is_finite) {
            Some(centre) => Errors::Centre(centre),
            None => {
                let Context { size_k, inputs, growth, edge, .. } = *context;
                let errors = class.bound_with(element, size_k, inputs, growth);
                Errors::Sides(errors.map(|e| e + edge))
            }
        }
    }

    /// Applies the recipe, with the scale and bias of column `n`, to the bounds of an element.
    fn bounded(&self, element: &Element<'_>, n: usize, context: &Context) -> Bounded {
        let errors = self.errors(self.class, 0, element, context);
        let chain = self.recipe.chain(self.weight, self.extras, element.m, n);
        Summed::new(element, context.size_k).through(&errors, &chain, context.inputs.output)
    }
}

/// Least number of elements per thread.
const PER_THREAD: usize = 256;

/// Values that all elements of a product share.
struct Context {
    /// The centres of each class that has a single order.
    centres: Vec<Option<Vec<Centre>>>,
    inputs: Inputs,
    growth: Growth,
    size_k: usize,
    size_n: usize,
    /// [`Judge::edge`] of scaled rows.
    edge: f64,
}
