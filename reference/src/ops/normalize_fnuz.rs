//! e4m3fn weights and their scales as e4m3fnuz.

use serde_json::{Value, json};

use crate::Result;
use crate::judge::compare::Rows;
use crate::num::scalar::{e4m3fn_to_f32, f32_to_e4m3fn_rne_saturating};
use crate::num::tensor::DType;
use crate::ops::Operation;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Form, Mistake, ids, known};
use crate::ops::schema::{CaseError, Reader, TensorRule};
use crate::ops::tensors::{E4M3, F32, input, is, optional, output};
use crate::prepare::fnuz::{e4m3fnuz_to_f32, normalize_codes, normalize_scale};

/// Config of `normalize_e4m3fn_to_e4m3fnuz`.
///
/// in: `weight` `[N, K]` e4m3fn, `weight_scale` of any shape, optionally `input_scale` of any
/// shape. out: the same names and shapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FnuzConfig {
    /// Rows of the weight.
    pub size_n: usize,
    /// Columns of the weight.
    pub size_k: usize,
    /// Scales of the weight.
    pub num_scales: usize,
}

impl FnuzConfig {
    /// The scales.
    pub(crate) const SCALES: [&'static str; 2] = ["weight_scale", "input_scale"];
}

impl Operation for FnuzConfig {
    fn keys() -> &'static [&'static str] {
        &["size_n", "size_k", "num_scales"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        Ok(Self {
            size_n: r.size("size_n")?,
            size_k: r.size("size_k")?,
            num_scales: r.size("num_scales")?,
        })
    }

    fn json(&self) -> Value {
        json!({"size_n": self.size_n, "size_k": self.size_k, "num_scales": self.num_scales})
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (weight, scales) = ([is(self.size_n), is(self.size_k)], [is(self.num_scales)]);
        Ok(vec![
            input("weight", E4M3, &weight),
            input("weight_scale", F32, &scales),
            optional("input_scale", F32, &[is(1)]),
            output("weight", E4M3, &weight),
            output("weight_scale", F32, &scales),
            output("input_scale", F32, &[is(1)]),
        ])
    }

    fn lattice() -> Result<Vec<Self>> {
        let sizes = [(1, 256, 1), (16, 48, 16), (33, 7, 2)];
        Ok(sizes.map(|(size_n, size_k, num_scales)| Self { size_n, size_k, num_scales }).into())
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Normalization::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Normalization>()
    }
}

/// `normalize_e4m3fn_to_e4m3fnuz`.
#[derive(Debug, Clone)]
struct Normalization {
    config: FnuzConfig,
    weight: Vec<u8>,
    /// `weight_scale` and `input_scale`.
    scales: [Option<Vec<f32>>; 2],
    codes: fn(&mut [u8]),
    scale: fn(f32) -> f32,
}

impl Normalization {
    fn new(case: &Case<'_>, c: &FnuzConfig) -> Result<Self> {
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
                        // The code of the same value: e4m3fnuz bits represent half the value.
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
