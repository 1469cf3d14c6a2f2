//! Keys, tensors and generated cases of `fused_experts_fp8_w8a8`.

mod lattice;

use std::ops::Deref;

use serde_json::{Value, json};

use super::{Fp8Moe, walk};
use crate::Result;
use crate::judge::{Declared, OutputReport};
use crate::ops::axes::Axes;
use crate::ops::case::Case;
use crate::ops::computation::{Defined, ids};
use crate::ops::draw::{Rng, activations, routes};
use crate::ops::draw::{e4m3, small};
use crate::ops::fp8_blocks::{BlockSize, SCALES, check_scales, draw_scales};
use crate::ops::quant::keys::schedule_json;
use crate::ops::quantized_moe::{QuantizedLayer, ROWS, with_layer_keys};
use crate::ops::schema::{CaseError, Demand, Dim, Inputs, Reader, TensorRule};
use crate::ops::tensors::{E4M3, F32, input, is, name_of};
use crate::ops::w8a8_fp8::read_convention;
use crate::ops::{CaseConfig, Operation};
use crate::products::schedule::ScheduleChoice;
use crate::quantize::Fp8GroupRule;

/// Config of `fused_experts_fp8_w8a8`: a layer whose weights and activations are e4m3fn.
///
/// in: `x` `[M, H]`; `topk_weights`, `topk_ids` `[M, top_k]`; `w13_weight` `[L, N, H]`, `w2_weight`
/// `[L, H, I]` e4m3fn of this rank's experts; `w13_weight_scale`, `w2_weight_scale` `[L]`, or
/// `[L, N, 1]` for `per_out_ch_quant`; `w13_input_scale`, `w2_input_scale` `[1]` unless
/// `per_act_token_quant`; `expert_map` `[E]` where L is not E.
///
/// With `weight_block_size` `[n, k]`, scales are `[L, ⌈N / n⌉, H / k]` and `[L, ⌈H / n⌉, I / k]`, f32 or UE8M0,
/// and those of activations `[M, H / k]` and `[M·top_k, I / k]`.
///
/// out: `a1q` `[M, H]` e4m3fn with `a1q_scale` (`[1]`, or `[M, 1]` per token), `gate_up` `[M·top_k, N]`,
/// `activated` `[M·top_k, I]`, `a2q` and `a2q_scale` likewise of `activated`, `down` `[M·top_k, H]`
/// (router weight applied), `y` `[M, H]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8LayerConfig {
    /// The keys of every layer of 8-bit weights.
    pub layer: QuantizedLayer,
    /// Whether each row of activations has its own dynamic scale; otherwise there is one static
    /// scale.
    pub per_act_token_quant: bool,
    /// Whether each output feature has its own scale; otherwise each expert has one.
    pub per_out_ch_quant: bool,
    /// Blocks of the weights and groups of the activations that share a scale.
    pub block: Option<BlockSize>,
    /// How groups of activations are quantized, with `block`.
    pub quantizer: Fp8GroupRule,
    /// Whether scales of groups of activations are rounded up to powers of two.
    pub use_ue8m0: bool,
    /// Schedule of `gate_up`, if its bits are declared.
    pub schedule_w13: Option<ScheduleChoice>,
    /// Schedule of `down`, if its bits are declared.
    pub schedule_w2: Option<ScheduleChoice>,
}

impl Fp8LayerConfig {
    /// Shape of the scales of `rows` rows of activations.
    pub(super) fn activation_scales(&self, rows: usize, size_k: usize) -> Vec<usize> {
        match self.block {
            Some(block) => vec![rows, size_k / block.k],
            None if self.per_act_token_quant => vec![rows, 1],
            None => vec![1],
        }
    }

    /// Shape of the scales of a stack of `[N, K]` matrices.
    fn weight_scales(&self, [size_n, size_k]: [usize; 2]) -> Vec<usize> {
        let experts = self.num_local_experts;
        match self.block {
            Some(block) => {
                let [blocks, groups] = block.scales([size_n, size_k]);
                vec![experts, blocks, groups]
            }
            None if self.per_out_ch_quant => vec![experts, size_n, 1],
            None => vec![experts],
        }
    }

    /// Whether activations have a static scale.
    pub(super) fn has_input_scales(&self) -> bool {
        !self.per_act_token_quant && self.block.is_none()
    }
}

/// The shared keys are read as if they were the config's own.
impl Deref for Fp8LayerConfig {
    type Target = QuantizedLayer;

    fn deref(&self) -> &QuantizedLayer {
        &self.layer
    }
}

impl Operation for Fp8LayerConfig {
    fn keys() -> &'static [&'static str] {
        const KEYS: [&str; 22] = with_layer_keys([
            "per_act_token_quant",
            "per_out_ch_quant",
            "weight_block_size",
            "quantizer",
            "use_ue8m0",
            "schedule_w13",
            "schedule_w2",
            "convention",
        ]);
        &KEYS
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        read_convention(r)?;
        let layer = QuantizedLayer::read(r)?;
        let own = ["per_act_token_quant", "per_out_ch_quant"];
        let flags = [r.flag(own[0], false)?, r.flag(own[1], false)?];
        let block = BlockSize::read(r, &[(own[0], flags[0]), (own[1], flags[1])])?;
        let quantizer = r.optional_name("quantizer", Fp8GroupRule::NAMED)?;
        let use_ue8m0 = r.flag("use_ue8m0", false)?;
        if block.is_none() {
            let expected = "none: activations have no groups without weight_block_size";
            if let Some(rule) = quantizer {
                return Err(r.refuse("quantizer", name_of(Fp8GroupRule::NAMED, &rule), expected));
            }
            if use_ue8m0 {
                return Err(r.refuse("use_ue8m0", true, "false, without weight_block_size"));
            }
        }
        let config = Self {
            layer,
            per_act_token_quant: flags[0],
            per_out_ch_quant: flags[1],
            block,
            quantizer: quantizer.unwrap_or_default(),
            use_ue8m0,
            schedule_w13: r.schedule("schedule_w13")?,
            schedule_w2: r.schedule("schedule_w2")?,
        };
        for (key, size) in
            [("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)]
        {
            BlockSize::fills(block, r, key, size)?;
        }
        BlockSize::fits(block, r, "schedule_w13", config.schedule_w13.as_ref())?;
        BlockSize::fits(block, r, "schedule_w2", config.schedule_w2.as_ref())?;
        Ok(config)
    }

    fn json(&self) -> Value {
        let mut v = self.layer.json(json!({
            "per_act_token_quant": self.per_act_token_quant,
            "per_out_ch_quant": self.per_out_ch_quant,
            "weight_block_size": BlockSize::json(self.block),
        }));
        if self.block.is_some() {
            v["quantizer"] = name_of(Fp8GroupRule::NAMED, &self.quantizer).into();
            v["use_ue8m0"] = self.use_ue8m0.into();
        }
        for (key, schedule) in
            [("schedule_w13", &self.schedule_w13), ("schedule_w2", &self.schedule_w2)]
        {
            v[key] = schedule.as_ref().map_or(Value::Null, schedule_json);
        }
        v
    }

    fn is_gated(&self) -> Option<bool> {
        Some(self.activation.is_gated())
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let scale = |rows: usize, size_k: usize| -> Vec<Dim> {
            let shape = self.activation_scales(rows, size_k);
            shape.into_iter().map(is).collect()
        };
        let of_rows =
            [scale(self.rows_of_x(), self.hidden_size), scale(self.rows(), self.intermediate_size)];
        let mut rules = self.layer.tensors(E4M3, of_rows);
        for (name, size_n, size_k) in self.matrices() {
            let types = if self.block.is_some() { SCALES } else { F32 };
            let scales: Vec<Dim> =
                self.weight_scales([size_n, size_k]).into_iter().map(is).collect();
            rules.push(input(&format!("{name}_weight_scale"), types, &scales));
            if self.has_input_scales() {
                rules.push(input(&format!("{name}_input_scale"), F32, &[is(1)]));
            }
        }
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        self.layer.check_inputs(inputs, check_scales)
    }

    /// A covering array of strength 3 over [`Operation::axes`].
    fn lattice() -> Result<Vec<Self>> {
        lattice::configs()
    }

    fn axes() -> Result<Option<Axes>> {
        Ok(Some(lattice::space()?.axes()))
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Fp8Moe::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Fp8Moe>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let (m, l) = (self.size_m, self.num_local_experts);
        case.add_input("x", activations(rng, self.dtype, m, self.hidden_size)?);
        routes(case, rng, [m, self.top_k], [self.num_experts, l])?;
        for (name, size_n, size_k) in self.matrices() {
            case.add_input(&format!("{name}_weight"), e4m3(rng, vec![l, size_n, size_k])?);
            let draw = if self.block.is_some() { draw_scales } else { small };
            let scales = self.weight_scales([size_n, size_k]);
            case.add_input(&format!("{name}_weight_scale"), draw(rng, scales)?);
            if self.has_input_scales() {
                case.add_input(&format!("{name}_input_scale"), small(rng, vec![1])?);
            }
        }
        Ok(())
    }

    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        Ok(self.layer.demands(case))
    }

    fn judge(&self, case: &Case<'_>, declared: &Declared) -> Result<Vec<OutputReport>> {
        self.layer.each_reading(|layer, prescale| {
            let config = Self { layer, ..self.clone() };
            walk::judge(case, &Fp8Moe::reading(case, &config, prescale)?, declared)
        })
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        let layer = QuantizedLayer { size_m: 1, ..self.layer.clone() };
        Some((Self { layer, ..self.clone() }.into(), &ROWS))
    }
}
