//! Which tensors an operation has, with the shapes and types that a config demands.

use super::config::{
    AlignConfig, CaseConfig, CheckpointFormat, DynQuantConfig, LinearConfig, MoeConfig,
    PreprocessConfig, QuantConfig, RouterConfig,
};
use crate::Error;
use crate::Result;
use crate::dims::GroupSize;
use crate::scalar::ScalarType;
use crate::tensor::{DType, Tensor};

/// One dimension's demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dim {
    /// Exactly this.
    Is(usize),
    /// 1 or more.
    Some,
    /// Anything, 0 included (lists whose length the values decide).
    Any,
}

/// A tensor that an operation knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRule {
    /// Name in the file, `in.` or `out.` included.
    pub name: String,
    /// Element types allowed.
    pub dtypes: Vec<DType>,
    /// Demanded shape.
    pub shape: Vec<Dim>,
    /// Whether a single value may stand for the whole shape, as `[1]` or without dimensions.
    pub or_single: bool,
    /// Whether the operation cannot do without it.
    pub required: bool,
}

impl TensorRule {
    pub(super) fn required(mut self, required: bool) -> Self {
        self.required = required;
        self
    }

    fn or_single(mut self) -> Self {
        self.or_single = true;
        self
    }

    /// Fails with [`Error::Dtype`] or [`Error::Shape`] unless `tensor` obeys.
    pub fn check(&self, tensor: &Tensor<'_>) -> Result<()> {
        tensor.expect_dtype(&self.dtypes)?;
        if self.fits(tensor.shape()) {
            return Ok(());
        }
        Err(Error::shape(tensor.name(), tensor.shape(), self.demanded()))
    }

    /// Whether the rule allows a tensor of this shape.
    pub fn fits(&self, shape: &[usize]) -> bool {
        let fits = |(rule, &dim): (&Dim, &usize)| match *rule {
            Dim::Is(expected) => dim == expected,
            Dim::Some => dim > 0,
            Dim::Any => true,
        };
        if shape.len() == self.shape.len() && self.shape.iter().zip(shape).all(fits) {
            return true;
        }
        self.or_single && matches!(shape, [] | [1])
    }

    /// The demanded shape as errors print it: `[16, 1 or more]`.
    pub(super) fn demanded(&self) -> String {
        let dims: Vec<String> = self
            .shape
            .iter()
            .map(|d| match d {
                Dim::Is(n) => n.to_string(),
                Dim::Some => "1 or more".to_owned(),
                Dim::Any => "any".to_owned(),
            })
            .collect();
        format!("[{}]", dims.join(", "))
    }

    /// Elements that the rule fixes; dimensions that it leaves open count once.
    pub(super) fn elements(&self) -> u64 {
        let size = |dim: &Dim| match *dim {
            Dim::Is(size) => size as u64,
            Dim::Some | Dim::Any => 1,
        };
        self.shape.iter().map(size).fold(1, u64::saturating_mul)
    }
}

pub(super) fn rule(name: impl Into<String>, dtypes: &[DType], shape: &[Dim]) -> TensorRule {
    TensorRule {
        name: name.into(),
        dtypes: dtypes.to_vec(),
        shape: shape.to_vec(),
        or_single: false,
        required: false,
    }
}

/// e8m0 scales are stored as bytes or under their own type.
const E8M0: &[DType] = &[DType::U8, DType::F8E8M0];
const I32: &[DType] = &[DType::I32];
const F32: &[DType] = &[DType::F32];

/// The stored type of 16- and 32-bit floats and activations.
pub(super) fn stored(ty: ScalarType) -> DType {
    match ty {
        ScalarType::FLOAT16 => DType::F16,
        ScalarType::BFLOAT16 => DType::BF16,
        ScalarType::INT8 => DType::I8,
        ScalarType::FLOAT8_E4M3FN => DType::F8E4M3,
        _ => DType::F32,
    }
}

impl CaseConfig {
    /// Every tensor that the operation knows under this config.
    ///
    /// `experts` is the leading axis of a MoE case's weights: the experts of this rank.
    pub fn rules(&self, experts: usize) -> Result<Vec<TensorRule>> {
        match self {
            Self::Linear(c) => linear(c),
            Self::Moe(c) => moe(c, experts),
            Self::Router(c) => Ok(router(c)),
            Self::Align(c) => Ok(align(c)),
            Self::Preprocess(c) => Ok(preprocess(c)),
            Self::DynQuant(c) => dyn_quant(c),
            Self::Method(c) => c.rules(),
        }
    }
}

/// The tensors of one quantized matrix: names, types and shapes without a leading axis.
struct Matrix<'c> {
    quant: &'c QuantConfig,
    /// `in.`, `in.w13_` or `in.w2_`.
    input: String,
    /// `out.`, `out.w13_` or `out.w2_`.
    output: String,
    /// Empty, or this rank's experts.
    lead: Vec<Dim>,
    size_k: usize,
    size_n: usize,
}

impl Matrix<'_> {
    fn rule(&self, name: String, dtypes: &[DType], shape: &[Dim]) -> TensorRule {
        rule(name, dtypes, &[&self.lead[..], shape].concat())
    }

    fn rules(&self) -> Result<Vec<TensorRule>> {
        use CheckpointFormat as F;
        let Self { quant: q, size_k: k, size_n: n, .. } = *self;
        let (input, output) = (|s| format!("{}{s}", self.input), |s| format!("{}{s}", self.output));
        let half = [stored(q.dtype)];
        let pack = q.pack();
        let groups = q.scale_rows(k)?.map_or(Dim::Some, Dim::Is);
        let is = Dim::Is;
        let mut rules = Vec::new();
        let mut add = |name, dtypes: &[DType], shape: &[Dim], required| {
            rules.push(self.rule(name, dtypes, shape).required(required));
        };
        match q.checkpoint_format {
            F::Gptq => add(input("qweight"), I32, &[is(k / pack), is(n)], true),
            F::Awq => add(input("qweight"), I32, &[is(k), is(n / pack)], true),
            F::Fp8 | F::Mxfp8 => add(input("weight"), &[DType::F8E4M3], &[is(n), is(k)], true),
            F::Nvfp4 | F::Mxfp4 => add(input("weight"), &[DType::U8], &[is(n), is(k / 2)], true),
        }
        let e4m3 = [DType::F8E4M3];
        let processed = match q.checkpoint_format {
            F::Gptq | F::Awq => {
                add(input("scales"), &half, &[groups, is(n)], true);
                // int8 activations turn the scales into integers kept in the scale type's bits.
                let int8 = q.input_dtype == Some(ScalarType::INT8);
                if int8 { vec![half[0], DType::I16] } else { half.to_vec() }
            }
            F::Fp8 => {
                add(input("weight_scale"), &half, &[groups, is(n)], true);
                half.to_vec()
            }
            F::Mxfp8 | F::Mxfp4 => {
                add(input("weight_scale"), E8M0, &[is(n), is(k / 32)], true);
                E8M0.to_vec()
            }
            F::Nvfp4 => {
                add(input("weight_scale"), &e4m3, &[is(n), is(k / 16)], true);
                let name = input("weight_global_scale");
                // A single matrix has one value, a stack one for each expert.
                let shape: &[Dim] = if self.lead.is_empty() { &[is(1)] } else { &[] };
                add(name, F32, shape, true);
                add(output("marlin_global_scale"), F32, shape, false);
                e4m3.to_vec()
            }
        };
        add(output("marlin_qweight"), I32, &[is(k / 16), is(n * 16 / pack)], false);
        add(output("marlin_scales"), &processed, &[groups, is(n)], false);
        if q.checkpoint_format == F::Awq {
            add(input("qzeros"), I32, &[groups, is(n / pack)], true);
            add(output("marlin_zeros"), I32, &[groups, is(n / pack)], false);
        }
        if q.checkpoint_format == F::Gptq {
            add(input("g_idx"), I32, &[is(k)], q.has_act_order());
            add(output("g_idx_sort_indices"), I32, &[is(k)], false);
            add(output("sorted_g_idx"), I32, &[is(k)], false);
        }
        if q.has_bias {
            add(input("bias"), &half, &[is(n)], true);
            add(output("marlin_bias"), &half, &[is(n)], false);
        }
        if q.input_dtype == Some(ScalarType::INT8) {
            // One factor for the whole stack, which some producers repeat for each expert.
            let shape: &[Dim] = if self.lead.is_empty() { &[is(1)] } else { &[] };
            rules.push(self.rule(output("input_global_scale"), F32, shape).or_single());
        }
        Ok(rules)
    }
}

fn linear(c: &LinearConfig) -> Result<Vec<TensorRule>> {
    let (m, n, k) = (Dim::Is(c.size_m), Dim::Is(c.size_n), Dim::Is(c.size_k));
    let half = [stored(c.quant.dtype)];
    let matrix = Matrix {
        quant: &c.quant,
        input: "in.".to_owned(),
        output: "out.".to_owned(),
        lead: Vec::new(),
        size_k: c.size_k,
        size_n: c.size_n,
    };
    let mut rules = matrix.rules()?;
    rules.push(rule("in.x", &half, &[m, k]));
    if let Some(input) = c.quant.input_dtype {
        rules.push(rule("in.a_q", &[stored(input)], &[m, k]));
        rules.push(rule("in.a_scales", F32, &[m, Dim::Is(1)]));
    }
    rules.push(rule("out.y", &half, &[m, n]));
    Ok(rules)
}

fn moe(c: &MoeConfig, experts: usize) -> Result<Vec<TensorRule>> {
    let (h, i) = (c.hidden_size, c.intermediate_size);
    let half = [stored(c.quant.dtype)];
    let is = Dim::Is;
    // A rank without experts has nothing to compute; a stack of none is a mistake.
    let experts = experts.max(1);
    let matrix = |name: &str, size_k, size_n| Matrix {
        quant: &c.quant,
        input: format!("in.{name}_"),
        output: format!("out.{name}_"),
        lead: vec![is(experts)],
        size_k,
        size_n,
    };
    let mut rules = matrix("w13", h, c.w13_size_n()).rules()?;
    rules.extend(matrix("w2", i, h).rules()?);
    let rows = is(c.size_m.saturating_mul(c.top_k));
    rules.extend([
        rule("in.x", &half, &[is(c.size_m), is(h)]),
        rule("in.router_logits", F32, &[is(c.size_m), is(c.num_experts)]),
        // Without a map, the weights hold every expert.
        rule("in.expert_map", I32, &[is(c.num_experts)]).required(experts != c.num_experts),
        rule("out.gate_up", &half, &[rows, is(c.w13_size_n())]),
        rule("out.activated", &half, &[rows, is(i)]),
        rule("out.down", &half, &[rows, is(h)]),
        rule("out.y", &half, &[is(c.size_m), is(h)]),
    ]);
    rules.extend(topk(is(c.size_m), c.top_k));
    rules.extend(blocks());
    Ok(rules)
}

fn topk(m: Dim, top_k: usize) -> [TensorRule; 2] {
    let shape = [m, Dim::Is(top_k)];
    [rule("out.topk_weights", F32, &shape), rule("out.topk_ids", I32, &shape)]
}

fn blocks() -> [TensorRule; 3] {
    [
        rule("out.sorted_token_ids", I32, &[Dim::Any]),
        rule("out.expert_ids", I32, &[Dim::Any]),
        rule("out.num_tokens_post_padded", I32, &[Dim::Is(1)]),
    ]
}

fn router(c: &RouterConfig) -> Vec<TensorRule> {
    let logits = [DType::F32, DType::F16, DType::BF16];
    let mut rules = vec![
        rule("in.router_logits", &logits, &[Dim::Some, Dim::Some]).required(true),
        rule("in.e_score_correction_bias", F32, &[Dim::Some]),
        rule("in.expert_scale", F32, &[Dim::Some]),
        rule("out.token_expert_indices", I32, &[Dim::Some, Dim::Is(c.top_k)]),
    ];
    rules.extend(topk(Dim::Some, c.top_k));
    rules
}

fn align(c: &AlignConfig) -> Vec<TensorRule> {
    let mut rules = vec![
        rule("in.topk_ids", I32, &[Dim::Some, Dim::Is(c.top_k)]).required(true),
        rule("in.expert_map", I32, &[Dim::Is(c.num_experts)]).required(c.ep_size > 1),
    ];
    rules.extend(blocks());
    rules
}

fn preprocess(c: &PreprocessConfig) -> Vec<TensorRule> {
    let awq = c.checkpoint_format == CheckpointFormat::Awq;
    let shape = if awq {
        [Dim::Is(c.size_k), Dim::Is(c.size_n / 8)]
    } else {
        [Dim::Is(c.size_k / 8), Dim::Is(c.size_n)]
    };
    let mut rules =
        vec![rule("in.qweight", I32, &shape).required(true), rule("out.qweight", I32, &shape)];
    if awq {
        let zeros = [Dim::Some, Dim::Is(c.size_n / 8)];
        rules.push(rule("in.qzeros", I32, &zeros).required(true));
    }
    rules
}

fn dyn_quant(c: &DynQuantConfig) -> Result<Vec<TensorRule>> {
    let (m, n, k) = (c.size_m, c.size_n, c.size_k);
    let float = [stored(c.dtype)];
    let groups = c.group_size.groups(crate::dims::LogicalK(k))?;
    let scale = if c.group_size == GroupSize::Channel { DType::F32 } else { DType::BF16 };
    let is = Dim::Is;
    let mut rules = vec![
        rule("in.x", &float, &[is(m), is(k)]),
        rule("in.weight_u4", &[DType::U8], &[is(n), is(k / 2)]).required(true),
        rule("in.weight_scale", &[scale], &[is(n), is(groups)]).required(true),
        rule("out.lhs_packed", &[DType::U8], &[Dim::Any]),
        rule("out.rhs_packed", &[DType::U8], &[Dim::Any]),
        rule("out.y", &float, &[is(m), is(n)]),
    ];
    if c.has_bias {
        rules.push(rule("in.bias", F32, &[is(n)]).required(true));
    }
    Ok(rules)
}
