//! A small product in plain f64 over numbers decoded here, to plant mistakes in a golden case's
//! output without the code under test.

// Each test file uses a part of this module.
#![allow(dead_code)]

use marlinspike::case::{Case, CaseConfig, CheckpointFormat, QuantConfig};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::formats::mxfp8;
use marlinspike::formats::{awq, gptq, nvfp4};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_golden::Manifest;

pub(crate) fn golden(name: &str) -> Vec<u8> {
    let golden = Manifest::load().expect("the golden manifest");
    let file = format!("{name}.safetensors");
    let entry = golden.cases().iter().find(|c| c.path.ends_with(&file)).expect("the case");
    std::fs::read(golden.path(&entry.path)).expect("a golden file")
}

/// One matrix: (q − z) · s.
#[derive(Clone, Default)]
pub(crate) struct Matrix {
    pub(crate) q: Vec<f64>,
    /// `[groups, n]`.
    pub(crate) z: Vec<f64>,
    pub(crate) s: Vec<f64>,
    /// Group of each k.
    pub(crate) group: Vec<usize>,
    pub(crate) bias: Option<Vec<f64>>,
    pub(crate) global: Option<f64>,
}

/// A product with all of its operands.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) ty: ScalarType,
    pub(crate) matrices: Vec<Matrix>,
    /// Matrix of each row.
    pub(crate) expert: Vec<Option<usize>>,
    /// `[rows, k]`.
    pub(crate) x: Vec<f64>,
    pub(crate) router: Option<Vec<f64>>,
    /// How often bias and router weights are applied.
    pub(crate) biases: usize,
    pub(crate) routers: i32,
    /// The global scale after the bias, in the unit of its kernel form.
    pub(crate) fold_global: bool,
    /// The sum is rounded before the global scale.
    pub(crate) early: bool,
}

fn e4m3(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let magnitude = if exponent == 0 {
        mantissa / 512.0
    } else {
        (8.0 + mantissa) * f64::from(exponent - 10).exp2()
    };
    if byte >= 128 { -magnitude } else { magnitude }
}

const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// Nibble i of an AWQ word holds column `AWQ[i]`.
pub(crate) const AWQ: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

fn awq(words: &[u32], rows: usize, n: usize) -> Vec<f64> {
    let mut out = vec![0.0; rows * n];
    for (i, word) in words.iter().enumerate() {
        for (nibble, column) in AWQ.iter().enumerate() {
            out[i * 8 + column] = f64::from(word >> (4 * nibble) & 15);
        }
    }
    out
}

fn halves(t: &Tensor<'_>, ty: ScalarType) -> Vec<f64> {
    t.elements::<u16>().iter().map(|&b| ty.to_f64(b.into())).collect()
}

fn matrix(
    q: &QuantConfig,
    part: &dyn Fn(&str) -> Option<Tensor<'static>>,
    k: usize,
    n: usize,
) -> Matrix {
    let get = |name: &str| part(name).unwrap_or_else(|| panic!("{name}"));
    let mut m = Matrix { bias: part("bias").map(|b| halves(&b, q.dtype)), ..Matrix::default() };
    match q.checkpoint_format {
        CheckpointFormat::Int(f) if *f == gptq::FORMAT => {
            let bits = q.weight_type.size_bits();
            let (pack, offset) = (32 / bits as usize, f64::from(1u32 << (bits - 1)));
            let words = get("qweight").elements::<u32>().into_owned();
            m.q = (0..k * n)
                .map(|i| {
                    let word = words[i / n / pack * n + i % n];
                    f64::from(word >> ((i / n % pack) as u32 * bits) & ((1 << bits) - 1)) - offset
                })
                .collect();
            m.s = halves(&get("scales"), q.dtype);
        }
        CheckpointFormat::Int(f) if *f == awq::FORMAT => {
            m.q = awq(&get("qweight").elements::<u32>(), k, n);
            m.s = halves(&get("scales"), q.dtype);
            m.z = awq(&get("qzeros").elements::<u32>(), m.s.len() / n, n);
        }
        CheckpointFormat::Block(f) if *f == nvfp4::FORMAT => {
            let (bytes, scales) = (get("weight"), get("weight_scale"));
            let (bytes, scales) = (bytes.elements::<u8>(), scales.elements::<u8>());
            m.q = (0..k * n)
                .map(|i| {
                    let byte = bytes[i % n * k / 2 + i / n / 2];
                    let code = if (i / n).is_multiple_of(2) { byte & 15 } else { byte >> 4 };
                    let value = E2M1[usize::from(code & 7)];
                    if code >= 8 { -value } else { value }
                })
                .collect();
            let groups = k / 16;
            m.s = (0..groups * n).map(|i| e4m3(scales[i % n * groups + i / n])).collect();
        }
        CheckpointFormat::Block(format) if *format == mxfp8::FORMAT => {
            let (bytes, scales) = (get("weight"), get("weight_scale"));
            let (bytes, scales) = (bytes.bytes(), scales.bytes());
            m.q = (0..k * n).map(|i| e4m3(bytes[i % n * k + i / n])).collect();
            let groups = k / 32;
            let scale = |i: usize| (f64::from(scales[i % n * groups + i / n]) - 127.0).exp2();
            m.s = (0..groups * n).map(scale).collect();
        }
        other => panic!("{other}"),
    }
    let groups = m.s.len() / n;
    if m.z.is_empty() {
        m.z = vec![0.0; m.s.len()];
    }
    m.group = match part("g_idx") {
        Some(g_idx) => g_idx.elements::<i32>().iter().map(|&g| g as usize).collect(),
        None => (0..k).map(|i| i * groups / k).collect(),
    };
    m
}

impl Model {
    /// `y` of a linear case, or `gate_up` or `down` of a layer.
    pub(crate) fn new(case: &Case<'_>, output: &str) -> Self {
        let owned = |t: &Tensor<'_>| t.clone().into_owned();
        let blank = |n, k, q: &QuantConfig| Self {
            n,
            k,
            ty: q.dtype,
            matrices: Vec::new(),
            expert: Vec::new(),
            x: Vec::new(),
            router: None,
            biases: 1,
            routers: 1,
            fold_global: false,
            early: false,
        };
        match &case.config {
            CaseConfig::Linear(c) => {
                let mut model = blank(c.size_n, c.size_k, &c.quant);
                let part = |name: &str| case.inputs.get(name).map(owned);
                let mut m = matrix(&c.quant, &part, c.size_k, c.size_n);
                let global = case.inputs.get("weight_global_scale");
                m.global = global.map(|t| t.elements::<f32>()[0].into());
                model.matrices.push(m);
                model.expert = vec![Some(0); c.size_m];
                model.x = halves(case.input("x").expect("x"), c.quant.dtype);
                model
            }
            CaseConfig::Moe(c) => {
                let (h, i) = (c.hidden_size, c.intermediate_size);
                let (prefix, k, n) = match output {
                    "gate_up" if c.activation.is_gated() => ("w13_", h, 2 * i),
                    "gate_up" => ("w13_", h, i),
                    _ => ("w2_", i, h),
                };
                let mut model = blank(n, k, &c.quant);
                let stack = |name: &str| case.inputs.get(&format!("{prefix}{name}"));
                let first = stack("qweight").or(stack("weight")).expect("a weight");
                for e in 0..first.shape()[0] {
                    let part = |name: &str| {
                        stack(name).map(|t| t.index0(e).expect("an expert").into_owned())
                    };
                    let mut m = matrix(&c.quant, &part, k, n);
                    let global = stack("weight_global_scale");
                    m.global = global.map(|t| t.elements::<f32>()[e].into());
                    model.matrices.push(m);
                }
                let ids = case.output("topk_ids").expect("ids").elements::<i32>();
                let map = case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
                let local = |id: &i32| match &map {
                    Some(map) => usize::try_from(map[*id as usize]).ok(),
                    None => Some(*id as usize),
                };
                model.expert = ids.iter().map(local).collect();
                if output == "gate_up" {
                    let x = halves(case.input("x").expect("x"), c.quant.dtype);
                    let tokens = x.chunks(k).flat_map(|row| vec![row; c.top_k]);
                    model.x = tokens.flatten().copied().collect();
                } else {
                    let activated = case.output("activated").expect("activated");
                    model.x = halves(activated, c.quant.dtype);
                    let weights = case.output("topk_weights").expect("weights");
                    let weights = weights.elements::<f32>();
                    model.router = Some(weights.iter().map(|&w| w.into()).collect());
                }
                model
            }
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.expert.len()
    }

    /// Rounded to the activation type.
    pub(crate) fn round(&self, x: f64) -> f64 {
        self.ty.to_f64(bits(self.ty, x).into())
    }

    /// The output, with upstream's roundings.
    pub(crate) fn compute(&self) -> Vec<f64> {
        let mut out = vec![0.0; self.rows() * self.n];
        let weights: Vec<Vec<f64>> = self.matrices.iter().map(|m| self.weights(m)).collect();
        for (row, expert) in self.expert.iter().enumerate() {
            let Some(e) = *expert else { continue };
            let m = &self.matrices[e];
            let mut sums = vec![0.0; self.n];
            for (k, x) in self.x[row * self.k..][..self.k].iter().enumerate() {
                let w = &weights[e][k * self.n..][..self.n];
                sums.iter_mut().zip(w).for_each(|(sum, w)| *sum += x * w);
            }
            for (n, sum) in sums.into_iter().enumerate() {
                out[row * self.n + n] = self.finish(m, row, n, sum);
            }
        }
        out
    }

    fn weights(&self, m: &Matrix) -> Vec<f64> {
        let one = m.s.len() == self.n;
        let value = |i: usize| {
            let at = m.group[i / self.n] * self.n + i % self.n;
            let q = m.q[i] - m.z[at];
            if one { q } else { self.round(q * m.s[at]) }
        };
        (0..self.k * self.n).map(value).collect()
    }

    fn finish(&self, m: &Matrix, row: usize, n: usize, sum: f64) -> f64 {
        let router = self.router.as_ref().map(|r| r[row]);
        let global = m.global.unwrap_or(1.0);
        let folded = self.fold_global || m.bias.is_none() && router.is_some() && self.routers > 0;
        let mut y = if self.early {
            self.round(self.round(sum) * global)
        } else if folded && m.global.is_some() {
            // The kernel's values are the true ones times 2^-7.
            self.round(sum / 128.0)
        } else {
            self.round(sum * global)
        };
        if m.s.len() == self.n {
            y = self.round(y * m.s[n]);
        }
        for _ in 0..self.biases {
            y = self.round(y + m.bias.as_ref().map_or(0.0, |b| b[n]));
        }
        let Some(router) = router else { return y };
        let unit = if folded && m.global.is_some() && !self.early { global * 128.0 } else { 1.0 };
        match self.routers {
            0 => y,
            1 => self.round(y * self.round(router * unit)),
            _ => self.round(self.round(y * self.round(router * unit)) * self.round(router)),
        }
    }
}

fn bits(ty: ScalarType, x: f64) -> u16 {
    if ty == ScalarType::FLOAT16 {
        marlinspike::num::scalar::f64_to_f16_rne(x)
    } else {
        marlinspike::num::scalar::f64_to_bf16_rne(x)
    }
}

/// Replaces an output of the case.
pub(crate) fn put(case: &mut Case<'_>, output: &str, values: &[f64]) {
    let found = case.output(output).expect("an output");
    let (shape, dtype) = (found.shape().to_vec(), found.dtype());
    let ty = if dtype == DType::F16 { ScalarType::FLOAT16 } else { ScalarType::BFLOAT16 };
    let values: Vec<u16> = values.iter().map(|&x| bits(ty, x)).collect();
    case.add_output(output, Tensor::from_vec(output, dtype, shape, values).expect("a tensor"));
}

/// The report of `check` on the output.
pub(crate) fn judged(case: &mut Case<'_>, output: &str) -> OutputReport {
    let needed = ["topk_ids", "topk_weights", "activated"];
    case.outputs.retain(|name, _| {
        name == output || name.ends_with("sort_indices") || needed.contains(&name.as_str())
    });
    let report = check_case(case).expect("a report");
    report.outputs.into_iter().find(|o| o.name == output).expect("the output")
}

/// Checks that the output of a golden case fails after `plant`, which changes the computation or
/// its result, with diagnosis `id`, which explains every element.
pub(crate) fn expect(
    name: &str,
    output: &str,
    id: &str,
    plant: impl FnOnce(&mut Model) -> Vec<f64>,
) -> OutputReport {
    let report = planted(name, output, plant);
    assert_eq!(report.verdict, Verdict::Fail, "{name}, {id}");
    let diagnosis = report.diagnosis.clone().unwrap_or_else(|| panic!("{name}, {id}: none"));
    assert_eq!(diagnosis.id, id, "{name}: {diagnosis:?}");
    assert_eq!(diagnosis.unexplained, 0, "{name}: {diagnosis:?}");
    report
}

pub(crate) fn planted(
    name: &str,
    output: &str,
    plant: impl FnOnce(&mut Model) -> Vec<f64>,
) -> OutputReport {
    let bytes = golden(name);
    let mut case = Case::parse(&bytes).expect("a case");
    let values = plant(&mut Model::new(&case, output));
    put(&mut case, output, &values);
    judged(&mut case, output)
}

/// The diagnosis in words.
pub(crate) fn text(report: &OutputReport) -> String {
    report.diagnosis.clone().expect("a diagnosis").text
}
