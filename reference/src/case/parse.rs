//! JSON to [`CaseConfig`] and back.

use serde_json::{Map, Value, json};

use super::config::{
    AlignConfig, CaseConfig, CheckpointFormat, DynQuantConfig, GroupedTopk, LinearConfig,
    MoeConfig, Packing, ParallelStyle, PreprocessConfig, QuantConfig, RouterConfig, ScheduleChoice,
    TensorParallel,
};
use super::{CaseError, MethodConfig, Op, json::Reader, keys};
use crate::dims::GroupSize;
use crate::gemm::Convention;
use crate::moe::ScoringFunc;
use crate::moe::activation::Activation;
use crate::quantize::ActivationRule;
use crate::scalar::ScalarType;
use crate::w4a8::quantize::ActivationRounding;

type Result<T> = std::result::Result<T, CaseError>;

const HALF_TYPES: &[(&str, ScalarType)] =
    &[("float16", ScalarType::FLOAT16), ("bfloat16", ScalarType::BFLOAT16)];
const INPUT_TYPES: &[(&str, ScalarType)] =
    &[("int8", ScalarType::INT8), ("float8_e4m3fn", ScalarType::FLOAT8_E4M3FN)];
const DYN_QUANT_TYPES: &[(&str, ScalarType)] =
    &[("float32", ScalarType::FLOAT32), ("bfloat16", ScalarType::BFLOAT16)];

impl CaseConfig {
    /// Reads the config of `op`.
    ///
    /// # Errors
    /// An unknown or missing key, a value of another type or outside its domain, or two that
    /// contradict.
    pub fn from_json(op: Op, map: &Map<String, Value>) -> Result<Self> {
        keys::check(op, map)?;
        let r = Reader { map, op: op.name(), prefix: "" };
        if let Some(config) = MethodConfig::read(op, &r)? {
            return Ok(Self::Method(config));
        }
        Ok(match op {
            Op::Linear => Self::Linear(linear(&r)?),
            Op::Moe => Self::Moe(moe(&r)?),
            Op::Router => Self::Router(router(&r)?),
            Op::MoeAlignBlockSize => Self::Align(align(&r)?),
            Op::Int4Fp8Preprocess => Self::Preprocess(preprocess(&r)?),
            _ => Self::DynQuant(dyn_quant(&r)?),
        })
    }

    /// The config as case files write it.
    pub fn to_json(&self) -> Map<String, Value> {
        let value = match self {
            Self::Linear(c) => {
                let mut v = quant_json(&c.quant);
                extend(&mut v, json!({"size_m": c.size_m, "size_n": c.size_n, "size_k": c.size_k}));
                optional(&mut v, "scale_factor", c.scale_factor);
                optional(&mut v, "schedule", c.schedule.as_ref().map(schedule_json));
                optional(&mut v, "quantizer", c.quantizer.map(ActivationRule::name));
                v
            }
            Self::Moe(c) => {
                let mut v = quant_json(&c.quant);
                extend(
                    &mut v,
                    json!({
                        "size_m": c.size_m, "num_experts": c.num_experts, "top_k": c.top_k,
                        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
                        "activation": c.activation.name(), "scoring_func": c.scoring_func.name(),
                        "renormalize": c.renormalize,
                        "apply_router_weight_on_input": c.apply_router_weight_on_input,
                        "block_size_m": c.block_size_m,
                        "ep_size": c.ep_size, "ep_rank": c.ep_rank,
                    }),
                );
                optional(&mut v, "scale_factor_w13", c.scale_factor_w13);
                optional(&mut v, "scale_factor_w2", c.scale_factor_w2);
                optional(&mut v, "schedule_w13", c.schedule_w13.as_ref().map(schedule_json));
                optional(&mut v, "schedule_w2", c.schedule_w2.as_ref().map(schedule_json));
                v
            }
            Self::Router(RouterConfig { rule: Some(rule), .. }) => {
                json!({ "routing": rule.to_json() })
            }
            Self::Router(c) => {
                let mut v = json!({
                    "scoring_func": c.scoring_func.name(), "top_k": c.top_k,
                    "renormalize": c.renormalize, "use_grouped_topk": c.grouped.is_some(),
                });
                if let Some(g) = c.grouped {
                    extend(
                        &mut v,
                        json!({
                            "num_expert_group": g.num_expert_group, "topk_group": g.topk_group,
                            "routed_scaling_factor": g.routed_scaling_factor,
                        }),
                    );
                }
                v
            }
            Self::Align(c) => json!({
                "block_size": c.block_size, "num_experts": c.num_experts, "top_k": c.top_k,
                "ep_size": c.ep_size, "ep_rank": c.ep_rank,
            }),
            Self::Preprocess(c) => json!({
                "checkpoint_format": c.checkpoint_format.name(),
                "size_k": c.size_k, "size_n": c.size_n,
            }),
            Self::DynQuant(c) => {
                let p = c.packing;
                let mut v = json!({
                    "weight_type": "int4", "dtype": c.dtype.name(),
                    "group_size": c.group_size.to_config(), "has_bias": c.has_bias,
                    "size_m": c.size_m, "size_n": c.size_n, "size_k": c.size_k,
                    "packing": {"mr": p.mr, "nr": p.nr, "kr": p.kr, "sr": p.sr},
                    "activation_rounding": c.activation_rounding.name(),
                });
                optional(&mut v, "kleidiai_variant", c.kleidiai_variant.clone());
                v
            }
            Self::Method(c) => c.json(),
        };
        match value {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }
}

fn extend(into: &mut Value, more: Value) {
    if let (Value::Object(into), Value::Object(more)) = (into, more) {
        into.extend(more);
    }
}

fn optional(into: &mut Value, key: &str, value: Option<impl Into<Value>>) {
    if let (Value::Object(into), Some(value)) = (into, value) {
        into.insert(key.to_owned(), value.into());
    }
}

fn quant_json(q: &QuantConfig) -> Value {
    let mut v = json!({
        "checkpoint_format": q.checkpoint_format.name(), "weight_type": q.weight_type.name(),
        "dtype": q.dtype.name(), "input_dtype": q.input_dtype.map(ScalarType::name),
        "group_size": q.group_size.to_config(), "desc_act": q.desc_act,
        "is_k_full": q.is_k_full, "has_bias": q.has_bias,
    });
    if let Some(tp) = q.tensor_parallel {
        let tp = json!({"size": tp.size, "rank": tp.rank, "style": tp.style.name()});
        extend(&mut v, json!({"tensor_parallel": tp}));
    }
    let name = |c: Convention| Convention::NAMED.iter().find(|(_, named)| *named == c);
    optional(&mut v, "convention", q.convention.and_then(name).map(|(name, _)| *name));
    v
}

pub(super) fn schedule_json(choice: &ScheduleChoice) -> Value {
    match choice {
        ScheduleChoice::Canonical => "canonical".into(),
        ScheduleChoice::Given(schedule) => schedule.to_json(),
    }
}

fn contradiction(key: &str, found: impl ToString, with: impl ToString) -> CaseError {
    CaseError::Contradiction {
        key: key.to_owned(),
        found: found.to_string(),
        with: with.to_string(),
    }
}

fn group_size(r: &Reader<'_>) -> Result<GroupSize> {
    let value = r.integer("group_size")?;
    let refuse = || r.refuse("group_size", value, "-1 or an integer from 1 to 2^31 - 1");
    if value >= 1 << 31 {
        return Err(refuse());
    }
    GroupSize::from_config(value).map_err(|_| refuse())
}

/// `{size, rank, ...}`: the rank must be one of them.
fn rank(r: &Reader<'_>, size_key: &str, rank_key: &str) -> Result<(usize, usize)> {
    let size = r.optional_size(size_key)?.unwrap_or(1);
    let rank = r.index(rank_key)?;
    if rank >= size {
        return Err(r.refuse(rank_key, rank, format!("a rank below {size}")));
    }
    Ok((size, rank))
}

fn quant(r: &Reader<'_>) -> Result<QuantConfig> {
    let checkpoint_format = r.name("checkpoint_format", CheckpointFormat::NAMED)?;
    let weight_types: Vec<_> =
        checkpoint_format.weight_types().iter().map(|t| (t.name(), *t)).collect();
    // Any known type first, so that a wrong combination is told apart from a wrong name.
    let weight_type = r.name("weight_type", ScalarType::NAMED)?;
    if !weight_types.iter().any(|(_, t)| *t == weight_type) {
        let with = format!("checkpoint_format {checkpoint_format}");
        return Err(contradiction("weight_type", weight_type, with));
    }
    let group_size = group_size(r)?;
    if let Some(fixed) = checkpoint_format.fixed_group()
        && group_size != fixed
    {
        let with = format!("checkpoint_format {checkpoint_format}, whose groups have {fixed} rows");
        return Err(contradiction("group_size", group_size, with));
    }
    let desc_act = r.flag("desc_act", false)?;
    if desc_act && checkpoint_format != CheckpointFormat::Gptq {
        let with = format!("checkpoint_format {checkpoint_format}, which has no act-order");
        return Err(contradiction("desc_act", desc_act, with));
    }
    let tensor_parallel =
        match r.object("tensor_parallel", "tensor_parallel.", &["size", "rank", "style"])? {
            None => None,
            Some(tp) => {
                tp.size("size")?;
                let (size, rank) = rank(&tp, "size", "rank")?;
                Some(TensorParallel { size, rank, style: tp.name("style", ParallelStyle::NAMED)? })
            }
        };
    let quant = QuantConfig {
        checkpoint_format,
        weight_type,
        dtype: r.name("dtype", HALF_TYPES)?,
        input_dtype: r.optional_name("input_dtype", INPUT_TYPES)?,
        group_size,
        desc_act,
        is_k_full: r.flag("is_k_full", true)?,
        has_bias: r.flag("has_bias", false)?,
        tensor_parallel,
        convention: r.optional_name("convention", Convention::NAMED)?,
    };
    let cut = |tp: TensorParallel| tp.size > 1 && tp.style == ParallelStyle::Row;
    if quant.is_k_full && quant.has_act_order() && tensor_parallel.is_some_and(cut) {
        let with = "a row-parallel rank with act-order, which holds a slice of K";
        return Err(contradiction("is_k_full", true, with));
    }
    Ok(quant)
}

/// NVFP4's power of two, which upstream finds from the block scales: 1 with f16.
fn scale_factor(r: &Reader<'_>, key: &str, q: &QuantConfig) -> Result<Option<f64>> {
    let Some(factor) = r.number(key)? else { return Ok(None) };
    if q.checkpoint_format != CheckpointFormat::Nvfp4 {
        let with = format!("checkpoint_format {}, which has none", q.checkpoint_format);
        return Err(contradiction(key, factor, with));
    }
    if q.dtype == ScalarType::FLOAT16 && factor != 1.0 {
        return Err(contradiction(key, factor, "dtype float16, whose factor is 1"));
    }
    if !(factor >= 1.0 && factor.log2().fract() == 0.0) {
        return Err(r.refuse(key, factor, "a power of two, 1 or more"));
    }
    Ok(Some(factor))
}

/// A size that a packed axis must fill.
fn divisible(key: &str, size: usize, by: usize, why: impl ToString) -> Result<()> {
    if size.is_multiple_of(by) {
        return Ok(());
    }
    let expected = format!("a multiple of {by} ({})", why.to_string());
    Err(CaseError::ConfigValue { key: key.to_owned(), found: size.to_string(), expected })
}

/// K must hold whole groups, unless a rank's slice may cut them; K and N whole Marlin tiles' rows.
fn check_matrix(q: &QuantConfig, k: (&str, usize), n: (&str, usize)) -> Result<()> {
    // Marlin's smallest unit of a packed row is 16 k; every packing along K divides it.
    divisible(k.0, k.1, 16, "rows of a Marlin tile")?;
    divisible(n.0, n.1, q.pack(), "codes of a packed word")?;
    if let GroupSize::Of(g) = q.group_size
        && q.scale_rows(k.1).is_err()
    {
        divisible(k.0, k.1, g, "whole groups")?;
    }
    Ok(())
}

fn linear(r: &Reader<'_>) -> Result<LinearConfig> {
    let quant = quant(r)?;
    let scale_factor = scale_factor(r, "scale_factor", &quant)?;
    let config = LinearConfig {
        quant,
        size_m: r.size("size_m")?,
        size_n: r.size("size_n")?,
        size_k: r.size("size_k")?,
        scale_factor,
        schedule: r.schedule("schedule")?,
        quantizer: r.optional_name("quantizer", ActivationRule::NAMED)?,
    };
    if let (Some(rule), None) = (config.quantizer, config.quant.input_dtype) {
        let with = "input_dtype null, which quantizes no activations";
        return Err(contradiction("quantizer", rule.name(), with));
    }
    check_matrix(&config.quant, ("size_k", config.size_k), ("size_n", config.size_n))?;
    Ok(config)
}

fn moe(r: &Reader<'_>) -> Result<MoeConfig> {
    let quant = quant(r)?;
    let factors = ["scale_factor_w13", "scale_factor_w2"].map(|key| scale_factor(r, key, &quant));
    let [scale_factor_w13, scale_factor_w2] = factors;
    let (ep_size, ep_rank) = rank(r, "ep_size", "ep_rank")?;
    let config = MoeConfig {
        quant,
        size_m: r.size("size_m")?,
        num_experts: r.size("num_experts")?,
        top_k: r.size("top_k")?,
        hidden_size: r.size("hidden_size")?,
        intermediate_size: r.size("intermediate_size")?,
        activation: r.name("activation", Activation::NAMED)?,
        scoring_func: r.name("scoring_func", ScoringFunc::NAMED)?,
        renormalize: r.flag("renormalize", false)?,
        apply_router_weight_on_input: r.flag("apply_router_weight_on_input", false)?,
        block_size_m: r.size("block_size_m")?,
        ep_size,
        ep_rank,
        scale_factor_w13: scale_factor_w13?,
        scale_factor_w2: scale_factor_w2?,
        schedule_w13: r.schedule("schedule_w13")?,
        schedule_w2: r.schedule("schedule_w2")?,
    };
    let (h, i) = (config.hidden_size, config.intermediate_size);
    at_most("top_k", config.top_k, "num_experts", config.num_experts)?;
    at_most("ep_size", ep_size, "num_experts", config.num_experts)?;
    check_matrix(&config.quant, ("hidden_size", h), ("intermediate_size", config.w13_size_n()))?;
    check_matrix(&config.quant, ("intermediate_size", i), ("hidden_size", h))?;
    Ok(config)
}

pub(super) fn at_most(key: &str, value: usize, limit_key: &str, limit: usize) -> Result<()> {
    if value <= limit {
        return Ok(());
    }
    Err(contradiction(key, value, format!("{limit_key} {limit}, the most there can be")))
}

fn router(r: &Reader<'_>) -> Result<RouterConfig> {
    if let Some(rule) = super::families::stated(r.map)? {
        return Ok(super::families::config(rule));
    }
    let grouped = if r.flag("use_grouped_topk", false)? {
        Some(GroupedTopk {
            num_expert_group: r.size("num_expert_group")?,
            topk_group: r.size("topk_group")?,
            routed_scaling_factor: r.number("routed_scaling_factor")?.unwrap_or(1.0),
        })
    } else {
        let given =
            keys::GROUPED_TOPK.iter().find(|&&key| r.map.get(key).is_some_and(|v| !v.is_null()));
        if let Some(key) = given {
            return Err(contradiction(
                key,
                &r.map[*key],
                "use_grouped_topk false, which never reads it",
            ));
        }
        None
    };
    if let Some(g) = grouped {
        at_most("topk_group", g.topk_group, "num_expert_group", g.num_expert_group)?;
    }
    Ok(RouterConfig {
        scoring_func: r.name("scoring_func", ScoringFunc::NAMED)?,
        top_k: r.size("top_k")?,
        renormalize: r.flag("renormalize", false)?,
        grouped,
        rule: None,
    })
}

fn align(r: &Reader<'_>) -> Result<AlignConfig> {
    let (ep_size, ep_rank) = rank(r, "ep_size", "ep_rank")?;
    let (num_experts, top_k) = (r.size("num_experts")?, r.size("top_k")?);
    at_most("ep_size", ep_size, "num_experts", num_experts)?;
    Ok(AlignConfig { block_size: r.size("block_size")?, num_experts, top_k, ep_size, ep_rank })
}

fn preprocess(r: &Reader<'_>) -> Result<PreprocessConfig> {
    let formats =
        [CheckpointFormat::Gptq, CheckpointFormat::Awq].map(|format| (format.name(), format));
    let checkpoint_format = r.name("checkpoint_format", &formats)?;
    let (size_k, size_n) = (r.size("size_k")?, r.size("size_n")?);
    match checkpoint_format {
        CheckpointFormat::Awq => divisible("size_n", size_n, 8, "codes of a packed word")?,
        _ => divisible("size_k", size_k, 8, "codes of a packed word")?,
    }
    Ok(PreprocessConfig { checkpoint_format, size_k, size_n })
}

fn dyn_quant(r: &Reader<'_>) -> Result<DynQuantConfig> {
    r.name("weight_type", &[("int4", ())])?;
    let p = r.needed_object("packing", "packing.", &["mr", "nr", "kr", "sr"])?;
    let packing =
        Packing { mr: p.size("mr")?, nr: p.size("nr")?, kr: p.size("kr")?, sr: p.size("sr")? };
    r.optional_name("checkpoint_format", &[("int4", ())])?;
    r.optional_name("input_dtype", &[("int8", ())])?;
    let variant = r.text("kleidiai_variant")?;
    let (group_size, size_k) = (group_size(r)?, r.size("size_k")?);
    if let GroupSize::Of(g) = group_size {
        divisible("size_k", size_k, g, "whole groups")?;
    }
    divisible("size_k", size_k, 2, "codes of a byte")?;
    Ok(DynQuantConfig {
        dtype: r.name("dtype", DYN_QUANT_TYPES)?,
        group_size,
        has_bias: r.flag("has_bias", false)?,
        size_m: r.size("size_m")?,
        size_n: r.size("size_n")?,
        size_k,
        packing,
        activation_rounding: r.name("activation_rounding", ActivationRounding::NAMED)?,
        kleidiai_variant: variant,
    })
}
