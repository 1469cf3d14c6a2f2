//! FP8 experts on their way to a kernel: one scale for w1 and w3, e4m3fnuz.

use super::{Computation, Expected, Form, Mistake, known};
use crate::Result;
use crate::case::{Case, FnuzConfig, RequantizeConfig};
use crate::check::compare::Rows;
use crate::prepare::fnuz::{e4m3fnuz_to_f32, normalize_codes, normalize_scale};
use crate::prepare::fp8::largest_scale;
use crate::prepare::requantize::{Requantize, merge_shards};
use crate::scalar::{e4m3fn_to_f32, f32_to_e4m3fn_rne_saturating};
use crate::tensor::DType;

/// `process_fp8_weight_tensor_strategy_moe` and `process_fp8_input_tensor_strategy_moe`.
#[derive(Debug, Clone)]
pub(super) struct Requantization {
    config: RequantizeConfig,
    /// Codes of each expert's w13, `[2I, H]`.
    experts: Vec<Vec<u8>>,
    /// Of w1 and w3.
    scales: Vec<[f32; 2]>,
    /// Static scales of the activations, where the case has them.
    inputs: [Option<Vec<f32>>; 2],
    /// Which scale both halves get; the largest by definition.
    target: fn([f32; 2]) -> f32,
    /// Whether the codes are rewritten.
    rewrites: bool,
    largest: fn(&[f32]) -> f32,
    /// A last step of every code.
    end: fn(u8) -> u8,
}

impl Requantization {
    pub(super) fn new(case: &Case<'_>, c: &RequantizeConfig) -> Result<Self> {
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
            let merged =
                merge_shards("in.w13_weight", &mut codes, c.hidden_size, &widths, &scales, rule)?;
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

/// `normalize_e4m3fn_to_e4m3fnuz`.
#[derive(Debug, Clone)]
pub(super) struct Normalization {
    config: FnuzConfig,
    weight: Vec<u8>,
    /// `weight_scale` and `input_scale`.
    scales: [Option<Vec<f32>>; 2],
    codes: fn(&mut [u8]),
    scale: fn(f32) -> f32,
}

impl Normalization {
    pub(super) fn new(case: &Case<'_>, c: &FnuzConfig) -> Result<Self> {
        let scales = FnuzConfig::SCALES
            .map(|name| case.inputs.get(name).map(|t| t.elements::<f32>().into_owned()));
        Ok(Self {
            config: c.clone(),
            weight: case.input("weight")?.bytes().to_vec(),
            scales,
            codes: normalize_codes,
            scale: normalize_scale,
        })
    }
}

impl Computation for Normalization {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let (n, k) = (self.config.size_n, self.config.size_k);
        let mut codes = self.weight.clone();
        (self.codes)(&mut codes);
        let mut all = vec![Expected {
            name: "weight".to_owned(),
            dtype: DType::F8E4M3,
            shape: vec![n, k],
            elements: codes.iter().map(|&b| b.into()).collect(),
            form: Form::lines(Rows::K, [k, n], 8, None),
        }];
        for (name, scales) in FnuzConfig::SCALES.into_iter().zip(&self.scales) {
            let doubled: Option<Vec<f32>> =
                scales.as_ref().map(|s| s.iter().map(|&s| (self.scale)(s)).collect());
            all.extend(doubled.map(|s| Expected::floats(name, &[s.len()], &s)));
        }
        Ok(all)
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "scale-not-doubled", "the scale was not doubled: every number is half of what it was" =>
                |c| c.scale = |s| s;
            "scale-halved", "the scale was halved where it is doubled" => |c| c.scale = |s| s / 2.0;
            "minus-zero-kept", "-0 kept its bits, which are e4m3fnuz's NaN" => |c| c.codes = |_| {};
            "codes-converted", "the codes were converted by value although the scale is doubled" =>
                |c| c.codes = |codes| {
                    for code in codes {
                        // The code of the same value: e4m3fnuz's bits mean half as much.
                        let value = 2.0 * e4m3fn_to_f32(*code);
                        *code = match f32_to_e4m3fn_rne_saturating(value) {
                            0x80 => 0,
                            other => other,
                        };
                    }
                };
            "nan-rewritten", "the NaN codes 0x7f and 0xff became e4m3fnuz's NaN" =>
                |c| c.codes = |codes| {
                    normalize_codes(codes);
                    let broken = |code: &&mut u8| e4m3fnuz_to_f32(**code).abs() == 240.0;
                    codes.iter_mut().filter(broken).for_each(|code| *code = 0x80);
                };
        }
    }
}
