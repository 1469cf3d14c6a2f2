//! A product of each row with the matrix of its expert.

use std::fmt;

use marlinspike::Result;
use marlinspike::moe::to_slots;
use marlinspike::num::array::rows_of;
use marlinspike::products::schedule::{Extras, Schedule, Stack};
use marlinspike::vectors::Rng;
use marlinspike::weight::Weight;
use proptest::prelude::*;

use super::ProductWeight;
use super::bounds::Matrix;
use crate::laws::{call, compare, expected, judged};
use crate::ops::Distribution;
use crate::ops::layer::stable;
use crate::{Failure, Law, Operation, Subject};

/// `moe_wna16_marlin_gemm`: row `token · top_k + slot` of y is row `token` of x times the matrix of
/// the slot's expert, plus bias, times the router weight; zeros without an expert.
#[derive(Debug)]
pub struct ExpertProduct;

/// Arguments of [`ExpertProduct`].
#[derive(Clone)]
pub struct ExpertInput {
    /// Configuration of each expert's weight.
    pub form: ProductWeight,
    /// `[K, N]` of each expert.
    pub weights: Vec<Weight<'static>>,
    /// `[M, K]`, bits of the form's `dtype` or zero-extended 8-bit codes, columns in the model's
    /// order.
    pub x: Vec<u16>,
    /// `[M]`: for 8-bit activations, the scale of each token's row.
    pub x_scales: Option<Vec<f32>>,
    /// Slots of a token.
    pub top_k: usize,
    /// `[M, top_k]`, −1 for none.
    pub topk_ids: Vec<i32>,
    /// `[M, top_k]`, if rows are weighted.
    pub topk_weights: Option<Vec<f32>>,
    /// How `topk_ids` were drawn.
    pub distribution: Distribution,
    /// A number from which a subject may derive its division of the work.
    pub choice: u64,
}

impl ExpertInput {
    /// Tokens.
    pub fn size_m(&self) -> usize {
        self.x.len() / self.form.shape.size_k
    }

    /// The same input with only token `m`.
    fn token(&self, m: usize) -> Self {
        let (size_k, top_k) = (self.form.shape.size_k, self.top_k);
        let slots = m * top_k..(m + 1) * top_k;
        Self {
            x: self.x[m * size_k..][..size_k].to_vec(),
            x_scales: self.x_scales.as_ref().map(|scales| vec![scales[m]]),
            topk_ids: self.topk_ids[slots.clone()].to_vec(),
            topk_weights: self.topk_weights.as_ref().map(|w| w[slots].to_vec()),
            ..self.clone()
        }
    }
}

impl fmt::Debug for ExpertInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; topk_ids {:?}", ExpertProduct::describe(self), self.topk_ids)
    }
}

impl Operation for ExpertProduct {
    const NAME: &'static str = "moe_wna16_marlin_gemm";
    type Input = ExpertInput;
    type Element = u16;

    fn inputs() -> BoxedStrategy<ExpertInput> {
        let sizes = (1usize..7, 1usize..5, prop_oneof![3 => 1usize..10, 1 => 16usize..40]);
        (
            ProductWeight::any(),
            sizes,
            Distribution::any(),
            any::<bool>(),
            any::<u64>(),
            any::<u64>(),
        )
            .prop_filter_map(
                "a canonical product",
                |(form, (experts, top_k, tokens), distribution, weighted, seed, choice)| {
                    let (mut rng, top_k) = (Rng::new(seed), top_k.min(experts));
                    let weights = form.draw(&mut rng, experts)?;
                    let x = form.rows(&mut rng, tokens);
                    let x_scales = form.row_scales(&mut rng, tokens);
                    let topk_ids = distribution.topk_ids(&mut rng, tokens, top_k, experts);
                    let weight = |_: &i32| rng.between(1, 1 << 20) as f32 / (1 << 20) as f32;
                    let topk_weights = weighted.then(|| topk_ids.iter().map(weight).collect());
                    Some(ExpertInput {
                        form,
                        weights,
                        x,
                        x_scales,
                        top_k,
                        topk_ids,
                        topk_weights,
                        distribution,
                        choice,
                    })
                },
            )
            .boxed()
    }

    fn expected(i: &ExpertInput) -> Result<Vec<u16>> {
        let (dtype, size_k) = (i.form.quant.dtype, i.form.shape.size_k);
        let x: Vec<u32> = to_slots(&i.x, size_k, i.top_k).into_iter().map(u32::from).collect();
        let expert_of: Vec<_> = i.topk_ids.iter().map(|&id| usize::try_from(id).ok()).collect();
        let orders = stable(&i.weights);
        let (weights, orders) = (&i.weights[..], orders.as_deref());
        let stack = Stack { weights, expert_of: &expert_of, orders, places: None };
        let router_weights = i.topk_weights.as_deref();
        let scales: Option<Vec<f32>> = i.x_scales.as_ref().map(|scales| {
            let of_slots = scales.iter().flat_map(|&scale| vec![scale; i.top_k]);
            i.form.scales_of_rows(weights, &of_slots.collect::<Vec<_>>())
        });
        let activation_scales = scales.as_deref();
        let extras = Extras { router_weights, activation_scales, ..Extras::default() };
        let schedule = Schedule::canonical(&i.weights[0], dtype, i.form.input())?;
        let y = schedule.execute_stack(rows_of("x", &x, size_k)?, stack, extras)?;
        Ok(y.into_iter().map(|bits| bits as u16).collect())
    }

    fn len(i: &ExpertInput) -> Result<usize> {
        Ok(i.topk_ids.len() * i.form.shape.size_n)
    }

    fn out_of_bounds(i: &ExpertInput, found: &[u16]) -> Result<Option<Vec<usize>>> {
        let (size_k, size_n) = (i.form.shape.size_k, i.form.shape.size_n);
        let x = to_slots(&i.x, size_k, i.top_k);
        let orders = stable(&i.weights);
        let mut outside = Vec::new();
        for (slot, &id) in i.topk_ids.iter().enumerate() {
            let y = &found[slot * size_n..][..size_n];
            let Ok(e) = usize::try_from(id) else {
                let zero = |bits: u16| i.form.quant.dtype.to_f64(bits.into()) == 0.0;
                outside.extend((0..size_n).filter(|&n| !zero(y[n])).map(|n| slot * size_n + n));
                continue;
            };
            let order = orders.as_ref().map(|orders| orders[e].as_slice());
            let matrix = Matrix { form: &i.form, weight: &i.weights[e], order };
            let router = i.topk_weights.as_ref().map(|w| &w[slot..=slot]);
            let wrong = matrix.outside(&x[slot * size_k..][..size_k], None, router, y)?;
            outside.extend(wrong.into_iter().map(|n| slot * size_n + n));
        }
        Ok(Some(outside))
    }

    fn place(i: &ExpertInput, element: usize, _bit: u32) -> String {
        let (row, n) = (element / i.form.shape.size_n, element % i.form.shape.size_n);
        let expert = i.topk_ids.get(row).copied().unwrap_or(-1);
        format!("token {} slot {} (expert {expert}) column {n}", row / i.top_k, row % i.top_k)
    }

    fn describe(i: &ExpertInput) -> String {
        format!(
            "M {} top_k {} of {} experts, {:?}, router weights {}, {} choice {:#x}",
            i.size_m(),
            i.top_k,
            i.weights.len(),
            i.distribution,
            i.topk_weights.is_some(),
            i.form,
            i.choice
        )
    }

    fn own_laws() -> Vec<Law<Self>> {
        let name = "a token alone is as right as among others";
        vec![Law { name, check: token_alone }]
    }
}

fn token_alone(s: &dyn Subject<ExpertProduct>, i: &ExpertInput) -> Result<(), Failure> {
    let m = i.choice as usize % i.size_m();
    let alone = i.token(m);
    let (width, what) = (i.top_k * i.form.shape.size_n, "a token alone");
    let found = call(s, &alone, 0xff)?;
    if !s.claims_bits() {
        let expected = expected::<ExpertProduct>(&alone)?;
        return judged::<ExpertProduct>(&alone, &expected, &found, what);
    }
    let among = call(s, i, 0)?[m * width..][..width].to_vec();
    compare::<ExpertProduct>(&alone, &among, &found, what)
}
