//! Requantizes FP8 experts to one scale for w1 and w3, and one scale for the activations of all
//! experts.

use serde_json::{Value, json};

use crate::Result;
use crate::judge::compare::Rows;
use crate::num::array::rows_mut;
use crate::num::tensor::DType;
use crate::ops::Operation;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Form, Mistake, ids, known};
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule, positive};
use crate::ops::tensors::{E4M3, F32, input, is, name_of, optional, output, w13_size_n};
use crate::prepare::fp8::largest_scale;
use crate::prepare::requantize::{Fp8Type, Requantize, merge_shards};

const RULES: &[(&str, Requantize)] = &[
    ("exact", Requantize::Exact),
    ("upstream_cuda", Requantize::UpstreamCuda),
    ("upstream_cpu", Requantize::UpstreamCpu),
];

const TYPES: &[(&str, Fp8Type)] =
    &[("float8_e4m3fn", Fp8Type::E4m3fn), ("float8_e4m3fnuz", Fp8Type::E4m3fnuz)];

/// Config of `process_fp8_weight_tensor_strategy_moe` and `process_fp8_input_tensor_strategy_moe`: one
/// scale for w1 and w3, and one for the activations of all experts.
///
/// in: `w13_weight` `[E, 2I, H]` FP8 codes, `w13_weight_scale` `[E, 2]`; `w13_input_scale`,
/// `w2_input_scale` `[E]` of static activations. out: `w13_weight`, `w13_weight_scale` `[E]`, the input
/// scales `[1]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequantizeConfig {
    /// Experts.
    pub num_experts: usize,
    /// H.
    pub hidden_size: usize,
    /// I: rows of w1 and of w3.
    pub intermediate_size: usize,
    /// How codes are requantized: `exact`, `upstream_cuda` or `upstream_cpu`.
    pub requantize: Requantize,
    /// Meaning of the codes: `float8_e4m3fn` or `float8_e4m3fnuz`.
    pub fp8_type: Fp8Type,
}

impl RequantizeConfig {
    /// The static scales of activations.
    pub(crate) const INPUT_SCALES: [&'static str; 2] = ["w13_input_scale", "w2_input_scale"];
}

impl Operation for RequantizeConfig {
    fn keys() -> &'static [&'static str] {
        &["num_experts", "hidden_size", "intermediate_size", "requantize", "fp8_type"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        Ok(Self {
            num_experts: r.size("num_experts")?,
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
            requantize: r.name("requantize", RULES)?,
            fp8_type: r.optional_name("fp8_type", TYPES)?.unwrap_or_default(),
        })
    }

    fn json(&self) -> Value {
        json!({
            "num_experts": self.num_experts, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "requantize": name_of(RULES, &self.requantize),
            "fp8_type": name_of(TYPES, &self.fp8_type),
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let e = is(self.num_experts);
        let weight = [e, is(w13_size_n(self.intermediate_size, true)), is(self.hidden_size)];
        let mut rules = vec![
            input("w13_weight", E4M3, &weight),
            input("w13_weight_scale", F32, &[e, is(2)]),
            output("w13_weight", E4M3, &weight),
            output("w13_weight_scale", F32, &[e]),
        ];
        for name in Self::INPUT_SCALES {
            rules.extend([optional(name, F32, &[e]), output(name, F32, &[is(1)])]);
        }
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        inputs.values().filter(|t| t.name().ends_with("_scale")).try_for_each(positive)
    }

    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for requantize in [Requantize::Exact, Requantize::UpstreamCuda, Requantize::UpstreamCpu] {
            for fp8_type in [Fp8Type::E4m3fn, Fp8Type::E4m3fnuz] {
                for (num_experts, hidden_size, intermediate_size) in
                    [(1, 256, 1), (3, 16, 5), (8, 1, 32)]
                {
                    all.push(RequantizeConfig {
                        num_experts,
                        hidden_size,
                        intermediate_size,
                        requantize,
                        fp8_type,
                    });
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Requantization::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Requantization>()
    }
}

/// `process_fp8_weight_tensor_strategy_moe` and `process_fp8_input_tensor_strategy_moe`.
#[derive(Debug, Clone)]
struct Requantization {
    config: RequantizeConfig,
    /// Codes of each expert's w13, `[2I, H]`.
    experts: Vec<Vec<u8>>,
    /// Scales of w1 and w3.
    scales: Vec<[f32; 2]>,
    /// Static scales of the activations, if the case has them.
    inputs: [Option<Vec<f32>>; 2],
    /// The scale of both halves; by definition the larger one.
    target: fn([f32; 2]) -> f32,
    /// Whether the codes are requantized.
    rewrites: bool,
    largest: fn(&[f32]) -> f32,
    /// Final mapping of every code.
    end: fn(u8) -> u8,
}

impl Requantization {
    fn new(case: &Case<'_>, c: &RequantizeConfig) -> Result<Self> {
        let per = 2 * c.intermediate_size * c.hidden_size;
        let scales = case.input("w13_weight_scale")?.elements::<f32>();
        let inputs = RequantizeConfig::INPUT_SCALES
            .map(|name| case.inputs.get(name).map(|t| t.elements::<f32>().into_owned()));
        Ok(Self {
            config: c.clone(),
            experts: case.input("w13_weight")?.bytes().chunks(per).map(<[u8]>::to_vec).collect(),
            scales: scales.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect(),
            inputs,
            target: |[w1, w3]| w1.max(w3),
            rewrites: true,
            largest: largest_scale,
            end: |code| code,
        })
    }

    /// One expert's codes and scale.
    fn expert(&self, codes: &[u8], scales: [f32; 2]) -> Result<(Vec<u8>, f32)> {
        let c = &self.config;
        let mut codes = codes.to_vec();
        let target = (self.target)(scales);
        if !self.rewrites {
            return Ok((codes, target));
        }
        let rule = (c.requantize, c.fp8_type);
        if target == scales[0].max(scales[1]) {
            let widths = [c.intermediate_size; 2];
            let rows = rows_mut("in.w13_weight", &mut codes, c.hidden_size)?;
            let merged = merge_shards("in.w13_weight", rows, &widths, &scales, rule)?;
            return Ok((codes, merged));
        }
        let half = codes.len() / 2;
        for (shard, own) in codes.chunks_mut(half).zip(scales) {
            let table = c.requantize.table(c.fp8_type, own, target);
            shard.iter_mut().for_each(|code| *code = table[usize::from(*code)]);
        }
        Ok((codes, target))
    }

    fn with_rule(&mut self, rule: Requantize) {
        self.config.requantize = rule;
    }
}

impl Computation for Requantization {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        let (n, k) = (2 * c.intermediate_size, c.hidden_size);
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for (expert, own) in self.experts.iter().zip(&self.scales) {
            let (expert, scale) = self.expert(expert, *own)?;
            codes.extend(expert.iter().map(|&b| u32::from((self.end)(b))));
            scales.push(scale);
        }
        let mut all = vec![
            Expected {
                name: "w13_weight".to_owned(),
                dtype: DType::F8E4M3,
                shape: vec![c.num_experts, n, k],
                elements: codes,
                form: Form::lines(Rows::K, [k, n], 8, Some(c.num_experts)),
            },
            Expected::floats("w13_weight_scale", &[c.num_experts], &scales),
        ];
        for (name, input) in RequantizeConfig::INPUT_SCALES.into_iter().zip(&self.inputs) {
            let largest = input.as_ref().map(|scales| (self.largest)(scales));
            all.extend(largest.map(|scale| Expected::floats(name, &[1], &[scale])));
        }
        Ok(all)
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "first-scale-for-both", "w1's scale was taken for both, not the larger" =>
                |c| c.target = |[w1, _]| w1;
            "smaller-scale", "the smaller scale was taken: codes saturate" =>
                |c| c.target = |[w1, w3]| w1.min(w3);
            "codes-not-requantized", "the scale was replaced, the codes were not" =>
                |c| c.rewrites = false;
            "shards-exchanged", "w1's and w3's scales are exchanged" =>
                |c| c.scales.iter_mut().for_each(|pair| pair.swap(0, 1));
            "requantized-as-upstream-cuda", "the codes are those of upstream on a GPU" =>
                |c| c.with_rule(Requantize::UpstreamCuda);
            "requantized-as-upstream-cpu", "the codes are those of upstream on a CPU" =>
                |c| c.with_rule(Requantize::UpstreamCpu);
            "requantized-exactly", "the codes were rounded once; the rule is upstream's" =>
                |c| c.with_rule(Requantize::Exact);
            "e4m3-saturates-early", "codes saturate at 240, e4m3fnuz's largest number; e4m3fn's is 448" =>
                |c| c.end = |code| match code & 0x7f {
                    // e4m3fn: 0x77 is 240, 0x7f NaN.
                    0x78..=0x7e => code & 0x80 | 0x77,
                    _ => code,
                };
            "input-scale-first", "the first expert's activation scale was taken, not the largest" =>
                |c| c.largest = |scales| scales[0];
            "input-scale-smallest", "the smallest activation scale was taken, not the largest" =>
                |c| c.largest = |scales| scales.iter().copied().fold(f32::INFINITY, f32::min);
        }
    }
}
