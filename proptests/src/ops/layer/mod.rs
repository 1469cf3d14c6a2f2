//! A Mixture-of-Experts layer: tokens and their experts in, `y` out.

mod draw;
pub mod laws;
mod rows;

use std::fmt;

use marlinspike::Result;
use marlinspike::act_order;
use marlinspike::case::{CaseConfig, MoeConfig, Op, ParallelStyle, TensorParallel};
use marlinspike::layers::{ExpertPlacement, determine_expert_map};
use marlinspike::moe::activation::Columns;
use marlinspike::moe::layer::bounds::{Declared, Int8Layer};
use marlinspike::moe::layer::{Layer, Routed, Stages};
use marlinspike::num::array::{FloatView2, into_vec};
use marlinspike::num::interval::Bound;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::{Class, Convention};
use marlinspike::vectors;
use marlinspike::weight::Weight;
use proptest::prelude::*;

use crate::{Failure, Law, Mismatch, Operation};
pub(crate) use draw::{activations, stable};
pub use rows::{Fp8Experts, W4a8Experts, layer_of_rows, local_of_rows};

/// The layer as an operation: `y` `[M, H]`, bits of `config.quant.dtype`.
#[derive(Debug)]
pub struct MoeLayer;

/// Arguments of [`MoeLayer`]: the matrices of the whole model, and the rank to compute.
///
/// [`LayerInput::local`] cuts out the part of a rank; a subject may also cut it itself. `y` of a
/// rank is its share of the sum: the outputs of all ranks add up to those of the whole layer.
#[derive(Clone)]
pub struct LayerInput {
    /// Sizes and types of the whole layer; `quant.tensor_parallel`, `ep_size` and `ep_rank` select
    /// the rank.
    pub config: MoeConfig,
    /// The seed of all values.
    pub seed: u64,
    /// Gate and up of every expert, `[H, N of w13]`.
    pub w13: Vec<Weight<'static>>,
    /// Down of every expert, `[I, H]`.
    pub w2: Vec<Weight<'static>>,
    /// For each expert's w13 and w2 a permutation that sorts its `g_idx` (act-order).
    pub orders: [Option<Vec<Vec<u32>>>; 2],
    /// `[M, H]`, bits of `dtype`.
    pub x: Vec<u16>,
    /// `[M, top_k]` global expert ids; −1 is none.
    pub topk_ids: Vec<i32>,
    /// `[M, top_k]`.
    pub topk_weights: Vec<f32>,
}

/// Omits the data, which the seed reproduces.
impl fmt::Debug for LayerInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerInput")
            .field("config", &self.config)
            .field("seed", &self.seed)
            .field("topk_ids", &self.topk_ids)
            .finish_non_exhaustive()
    }
}

/// The part of a layer on one rank.
#[derive(Debug, Clone)]
pub struct Local {
    /// Gate and up of this rank's experts and columns.
    pub w13: Vec<Weight<'static>>,
    /// Down of this rank's experts and rows.
    pub w2: Vec<Weight<'static>>,
    /// As [`LayerInput::orders`].
    pub orders: [Option<Vec<Vec<u32>>>; 2],
    /// Global to local expert, −1 for those of other ranks.
    pub expert_map: Option<Vec<i32>>,
}

impl Local {
    /// The rank's layer.
    pub fn layer(&self, input: &LayerInput) -> Layer<'_> {
        let c = &input.config;
        Layer {
            w13: &self.w13,
            w2: &self.w2,
            orders: [self.orders[0].as_deref(), self.orders[1].as_deref()],
            num_experts: c.num_experts,
            expert_map: self.expert_map.as_deref(),
            activation: c.definition(),
            dtype: c.quant.dtype,
            input_dtype: c.quant.input_dtype,
            router_weight_on_input: c.apply_router_weight_on_input,
        }
    }

    /// All stages under the canonical arithmetic.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    pub fn stages(&self, input: &LayerInput) -> Result<Stages> {
        let layer = self.layer(input);
        layer.forward(input.x_view()?, input.routed()?, &layer.canonical()?)
    }
}

impl LayerInput {
    /// Tokens.
    pub fn size_m(&self) -> usize {
        self.x.len() / self.config.hidden_size.max(1)
    }

    /// x `[M, H]`.
    ///
    /// # Errors
    /// [`marlinspike::Error::Shape`] if x is not whole rows.
    pub fn x_view(&self) -> Result<FloatView2<'_>> {
        let (dtype, hidden) = (self.config.quant.dtype, self.config.hidden_size);
        FloatView2::from_rows("x", dtype, hidden, &self.x)
    }

    /// The routing of the tokens.
    ///
    /// # Errors
    /// As [`Routed::from_rows`].
    pub fn routed(&self) -> Result<Routed<'_>> {
        Routed::from_rows(self.config.top_k, &self.topk_ids, &self.topk_weights)
    }

    /// The same layer with the tokens `tokens` of this input, in that order.
    pub fn with_tokens(&self, tokens: &[usize]) -> Self {
        let rows = |width: usize| tokens.iter().flat_map(move |&t| t * width..(t + 1) * width);
        let top_k = self.config.top_k;
        let mut config = self.config.clone();
        config.size_m = tokens.len();
        Self {
            config,
            x: rows(self.config.hidden_size).map(|at| self.x[at]).collect(),
            topk_ids: rows(top_k).map(|at| self.topk_ids[at]).collect(),
            topk_weights: rows(top_k).map(|at| self.topk_weights[at]).collect(),
            ..self.clone()
        }
    }

    /// The same input for another tensor-parallel rank.
    pub fn on_rank(&self, size: usize, rank: usize) -> Self {
        let mut input = self.clone();
        let (quant, style) = (&mut input.config.quant, ParallelStyle::Row);
        quant.tensor_parallel = Some(TensorParallel { size, rank, style });
        quant.is_k_full = act_order::is_k_full(quant.desc_act, true);
        input
    }

    /// The same input on a single rank with every expert and column.
    pub fn whole(&self) -> Self {
        let mut input = self.clone();
        (input.config.quant.tensor_parallel, input.config.quant.is_k_full) = (None, true);
        (input.config.ep_size, input.config.ep_rank) = (1, 0);
        input
    }

    /// The same input for another expert-parallel rank.
    pub fn on_expert_rank(&self, size: usize, rank: usize) -> Self {
        let mut input = self.clone();
        (input.config.ep_size, input.config.ep_rank) = (size, rank);
        input
    }

    /// Columns of w13 that belong to columns `i` of `activated`: gate and, if there is one, up.
    pub fn w13_columns(&self, i: impl Iterator<Item = usize> + Clone) -> Vec<usize> {
        let size_i = self.config.intermediate_size;
        match self.config.definition().columns {
            Columns::Halves => i.clone().chain(i.map(|i| size_i + i)).collect(),
            Columns::Interleaved => i.flat_map(|i| [2 * i, 2 * i + 1]).collect(),
            Columns::Gate => i.collect(),
        }
    }

    /// The part of the rank: w13 cut along N in each half, w2 along K, and the rank's experts.
    ///
    /// # Errors
    /// Returns an error if the ranks would cut a group ([`Weight::slice_rows`]) or do not divide I.
    pub fn local(&self) -> Result<Local> {
        let c = &self.config;
        let map =
            determine_expert_map(c.ep_size, c.ep_rank, c.num_experts, ExpertPlacement::Linear)?;
        let mut local = Local {
            w13: self.w13.clone(),
            w2: self.w2.clone(),
            orders: self.orders.clone(),
            expert_map: map.map,
        };
        if let Some(tp) = c.quant.tensor_parallel {
            let rows = act_order::k_slice(c.intermediate_size, tp.size, tp.rank)?;
            let columns = self.w13_columns(rows.clone());
            for w in &mut local.w13 {
                *w = w.gather_columns(&columns)?;
            }
            for w in &mut local.w2 {
                *w = w.slice_rows(rows.clone())?;
            }
            for order in local.orders[1].iter_mut().flatten() {
                order.retain(|&k| rows.contains(&(k as usize)));
                order.iter_mut().for_each(|k| *k -= rows.start as u32);
            }
        }
        let keep = |all: &mut Vec<Weight<'static>>| {
            *all = map.global_ids.iter().map(|&e| all[e].clone()).collect();
        };
        keep(&mut local.w13);
        keep(&mut local.w2);
        for orders in local.orders.iter_mut().flatten() {
            *orders = map.global_ids.iter().map(|&e| orders[e].clone()).collect();
        }
        Ok(local)
    }

    /// Bounds on `y` for kernels of a convention, in any order of additions.
    ///
    /// # Errors
    /// As [`Layer::bounds`].
    pub fn bounds(&self, convention: Convention) -> Result<Vec<Bound>> {
        let class = Class::any_order();
        let local = self.local()?;
        let int8 = Int8Layer::default();
        let declared = Declared { convention, class: &class, int8 };
        local.layer(self).bounds(self.x_view()?, self.routed()?, declared).map(|b| into_vec(b.y))
    }

    /// Whether group scales are converted to integers by the largest scale of all experts of a
    /// rank, so that ranks with other matrices use other scales.
    pub fn shares_a_scale(&self) -> bool {
        let several = self.w13.iter().chain(&self.w2).any(|w| w.scales.rows() > 1);
        self.config.quant.input_dtype == Some(ScalarType::INT8) && several
    }
}

/// Every configuration of generated layers.
///
/// # Errors
/// None.
pub fn moe_lattice() -> Result<Vec<MoeConfig>> {
    let configs = vectors::lattice(Op::Moe)?;
    let moe = |c| match c {
        CaseConfig::Moe(c) => Some(c),
        _ => None,
    };
    Ok(configs.into_iter().filter_map(moe).collect())
}

impl Operation for MoeLayer {
    const NAME: &'static str = "moe";
    type Input = LayerInput;
    type Element = u16;

    fn inputs() -> BoxedStrategy<LayerInput> {
        let configs = moe_lattice().unwrap_or_default();
        (any::<prop::sample::Index>(), any::<u64>(), 1usize..6)
            .prop_filter_map("a configuration of the lattice", move |(at, seed, size_m)| {
                let config = configs.get(at.index(configs.len().max(1)))?;
                LayerInput::draw(config, seed, size_m).ok()
            })
            .boxed()
    }

    fn expected(input: &LayerInput) -> Result<Vec<u16>> {
        Ok(input.local()?.stages(input)?.y.into_bits())
    }

    fn len(input: &LayerInput) -> Result<usize> {
        Ok(input.x.len())
    }

    fn place(input: &LayerInput, element: usize, _bit: u32) -> String {
        let h = input.config.hidden_size;
        let (token, n) = (element / h, element % h);
        let top_k = input.config.top_k;
        let experts = input.topk_ids.get(token * top_k..(token + 1) * top_k).unwrap_or_default();
        format!("token {token} column {n} (experts {experts:?})")
    }

    fn describe(input: &LayerInput) -> String {
        let c = &input.config;
        format!(
            "{} {} {} group_size {} input {} desc_act {} bias {} size_m {} experts {} top_k {} \
             hidden {} intermediate {} {} seed {:#018x}",
            c.quant.checkpoint_format,
            c.quant.weight_type,
            c.quant.dtype,
            c.quant.group_size,
            c.quant.input_dtype.unwrap_or(c.quant.dtype),
            c.quant.desc_act,
            c.quant.has_bias,
            input.size_m(),
            c.num_experts,
            c.top_k,
            c.hidden_size,
            c.intermediate_size,
            c.activation,
            input.seed,
        )
    }

    /// Accepts every `y` that a kernel of a known convention may compute.
    fn accepts(input: &LayerInput, found: &[u16]) -> bool {
        laws::in_bounds(input, found).is_ok()
    }

    fn own_laws() -> Vec<Law<Self>> {
        laws::own()
    }
}

/// A failure at output element `at` of `input`.
pub(crate) fn failure(
    input: &LayerInput,
    what: String,
    at: Option<(usize, usize, u16, u16)>,
) -> Failure {
    Failure {
        input: MoeLayer::describe(input),
        minimal: format!("{input:?}"),
        what,
        mismatch: at.map(|(count, element, expected, found)| {
            Box::new(Mismatch {
                count,
                total: input.x.len(),
                element,
                bit: 0,
                place: MoeLayer::place(input, element, 0),
                expected: expected.into(),
                found: found.into(),
            })
        }),
    }
}
