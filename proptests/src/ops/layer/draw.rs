//! Drawn layers: their inputs, activations and row orders.

use marlinspike::act_order;
use marlinspike::case::MoeConfig;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::ScheduleError;
use marlinspike::vectors::{self, Rng};
use marlinspike::weight::{Groups, Weight};
use marlinspike::{Error, Result};

use super::LayerInput;

/// Largest number of experts of an input; more would add nothing.
const MOST_EXPERTS: usize = 8;

/// Attempts with groups of any rows, before those with whole groups: of many experts on a rank, some always
/// have groups that cut an instruction.
const RANDOM: u64 = 3;

/// The weight with the rows of each group next to each other, the last group first.
fn whole_groups(mut weight: Weight<'static>) -> Weight<'static> {
    if let Groups::Indexed { g_idx, group_size: GroupSize::Of(size) } = &mut weight.groups {
        let groups = (g_idx.len() / *size) as u32;
        let size = *size as u32;
        (0u32..).zip(g_idx.iter_mut()).for_each(|(k, group)| *group = groups - 1 - k / size);
    }
    weight
}

impl LayerInput {
    /// Draws `size_m` tokens and a layer of `config`. The sizes of a rank in the lattice are scaled
    /// to the whole layer, and the input has a single rank with everything.
    ///
    /// # Errors
    /// None for a configuration of the lattice.
    pub fn draw(config: &MoeConfig, seed: u64, size_m: usize) -> Result<Self> {
        Self::defined(config, seed, size_m, Self::whole)
    }

    /// As [`LayerInput::draw`], for the rank of the configuration: its tensor-parallel part, and its
    /// experts.
    ///
    /// # Errors
    /// None for a configuration of the lattice.
    pub fn draw_rank(config: &MoeConfig, seed: u64, size_m: usize) -> Result<Self> {
        Self::defined(config, seed, size_m, |whole| {
            let tp = config.quant.tensor_parallel;
            // The ranks of a layer cut w13 by columns and w2 by rows, whatever else a matrix may be.
            let mut input = tp.map_or_else(|| whole.clone(), |tp| whole.on_rank(tp.size, tp.rank));
            (input.config.ep_size, input.config.ep_rank) = (config.ep_size, config.ep_rank);
            input
        })
    }

    /// The first drawn input that `part` makes one with a product from.
    fn defined(
        config: &MoeConfig,
        seed: u64,
        size_m: usize,
        part: impl Fn(&Self) -> Self,
    ) -> Result<Self> {
        // With 8-bit activations and act-order, groups that cut an instruction have no product.
        let q = &config.quant;
        if q.input_dtype.is_none() || !q.has_act_order() {
            return Self::attempt(config, seed, 0, size_m).map(|input| part(&input));
        }
        let mut last = None;
        for attempt in 0..8 {
            let input = part(&Self::attempt(config, seed, attempt, size_m)?);
            // Laws take the whole layer, too.
            let stages = input.local().and_then(|local| local.stages(&input));
            let whole = input.whole();
            match stages.and_then(|_| whole.local()?.stages(&whole)) {
                Err(e) if e.downcast_ref::<ScheduleError>().is_some() => last = Some(e),
                Err(e) => return Err(e),
                Ok(_) => return Ok(input),
            }
        }
        Err(last.unwrap_or_else(|| Error::size("attempts", 0, "1 or more")))
    }

    fn attempt(config: &MoeConfig, seed: u64, attempt: u64, size_m: usize) -> Result<Self> {
        let mut rng = Rng::for_case(seed, attempt);
        let mut c = config.clone();
        c.intermediate_size *= c.quant.tensor_parallel.map_or(1, |tp| tp.size);
        (c.quant.tensor_parallel, c.quant.is_k_full) = (None, true);
        (c.ep_size, c.ep_rank) = (1, 0);
        // A layer takes x as it is; router weights on x are tested by cases.
        c.rules.router_weight_on_x = false;
        c.num_experts = c.num_experts.min(MOST_EXPERTS);
        (c.top_k, c.size_m) = (c.top_k.min(c.num_experts), size_m);
        let (h, i) = (c.hidden_size, c.intermediate_size);
        let mut stack = |name: &str, shape: Shape| -> Result<Vec<Weight<'static>>> {
            (0..c.num_experts)
                .map(|e| {
                    vectors::weight(
                        &mut rng,
                        &format!("{name}[{e}]"),
                        &c.quant,
                        shape,
                        shape.size_k,
                    )
                    .map(|weight| if attempt < RANDOM { weight } else { whole_groups(weight) })
                })
                .collect()
        };
        let w13 = stack("w13", Shape::new(h, c.w13_size_n()))?;
        let w2 = stack("w2", Shape::new(i, h))?;
        let x = activations(&mut rng, c.quant.dtype, size_m, h);
        let mut experts: Vec<i32> = (0..c.num_experts as i32).collect();
        let mut topk_ids = Vec::new();
        for _ in 0..size_m {
            rng.shuffle(&mut experts);
            topk_ids.extend(&experts[..c.top_k]);
        }
        let topk_weights = topk_ids.iter().map(|_| rng.between(1, 4096) as f32 / 4096.0).collect();
        let orders = [stable(&w13), stable(&w2)];
        Ok(Self { config: c, seed, w13, w2, orders, x, topk_ids, topk_weights })
    }
}

/// Activations between 2^-8 and 2 in magnitude; some rows are all zeros or all one value.
pub(crate) fn activations(rng: &mut Rng, dtype: ScalarType, rows: usize, cols: usize) -> Vec<u16> {
    let (bias, mantissa) = if dtype == ScalarType::FLOAT16 { (15, 10) } else { (127, 7) };
    let number = |rng: &mut Rng| {
        let (sign, exponent) = (rng.between(0, 1), rng.between(bias - 8, bias));
        (sign << 15 | exponent << mantissa | rng.between(0, (1 << mantissa) - 1)) as u16
    };
    let mut all = Vec::with_capacity(rows * cols);
    for _ in 0..rows {
        let (kind, same) = (rng.below(8), number(rng));
        all.extend((0..cols).map(|_| match kind {
            0 => 0,
            1 => same,
            _ => number(rng),
        }));
    }
    all
}

/// The stable permutations of matrices with a `g_idx`.
pub(crate) fn stable(weights: &[Weight<'_>]) -> Option<Vec<Vec<u32>>> {
    let of = |w: &Weight<'_>| match &w.groups {
        Groups::Indexed { g_idx, .. } => Some(act_order::sort(g_idx).perm),
        Groups::Uniform(_) => None,
    };
    weights.iter().map(of).collect()
}
