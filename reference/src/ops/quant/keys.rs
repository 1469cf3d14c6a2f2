//! The keys of quantized matrices, and helpers that other operations share.

use serde_json::{Value, json};

type Result<T> = std::result::Result<T, CaseError>;

use crate::layers::{ParallelStyle, TensorParallel};
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::ops::quant::{CheckpointFormat, QuantConfig};
use crate::ops::schema::{CaseError, Reader};
use crate::ops::tensors::HALF_TYPES;
use crate::products::Convention;
use crate::products::schedule::ScheduleChoice;

const INPUT_TYPES: &[(&str, ScalarType)] =
    &[("int8", ScalarType::INT8), ("float8_e4m3fn", ScalarType::FLOAT8_E4M3FN)];

/// Adds the keys of `more`.
pub(in crate::ops) fn extend(into: &mut Value, more: Value) {
    if let (Value::Object(into), Value::Object(more)) = (into, more) {
        into.extend(more);
    }
}

/// Adds a key that has a value.
pub(in crate::ops) fn insert_some(into: &mut Value, key: &str, value: Option<impl Into<Value>>) {
    if let (Value::Object(into), Some(value)) = (into, value) {
        into.insert(key.to_owned(), value.into());
    }
}

pub(in crate::ops) fn quant_json(q: &QuantConfig) -> Value {
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
    insert_some(&mut v, "convention", q.convention.and_then(name).map(|(name, _)| *name));
    v
}

pub(in crate::ops) fn contradiction(
    key: &str,
    found: impl ToString,
    with: impl ToString,
) -> CaseError {
    CaseError::Contradiction {
        key: key.to_owned(),
        found: found.to_string(),
        with: with.to_string(),
    }
}

pub(in crate::ops) fn group_size(r: &Reader<'_>) -> Result<GroupSize> {
    let value = r.integer("group_size")?;
    let refuse = || r.refuse("group_size", value, "-1 or an integer from 1 to 2^31 - 1");
    if value >= 1 << 31 {
        return Err(refuse());
    }
    GroupSize::from_config(value).map_err(|_| refuse())
}

/// `{size, rank, ...}`: the rank must be one of them.
pub(in crate::ops) fn rank(
    r: &Reader<'_>,
    size_key: &str,
    rank_key: &str,
) -> Result<(usize, usize)> {
    let size = r.optional_size(size_key)?.unwrap_or(1);
    let rank = r.index(rank_key)?;
    if rank >= size {
        return Err(r.refuse(rank_key, rank, format!("a rank below {size}")));
    }
    Ok((size, rank))
}

/// The keys that [`quant_keys`] reads.
pub(in crate::ops) const QUANT_KEYS: [&str; 10] = [
    "checkpoint_format",
    "weight_type",
    "dtype",
    "input_dtype",
    "group_size",
    "desc_act",
    "is_k_full",
    "has_bias",
    "tensor_parallel",
    "convention",
];

/// [`QUANT_KEYS`], then an operation's own.
pub(in crate::ops) const fn with_quant_keys<const OWN: usize, const ALL: usize>(
    own: [&'static str; OWN],
) -> [&'static str; ALL] {
    joined(QUANT_KEYS, own)
}

/// Keys that operations share, then an operation's own.
pub(in crate::ops) const fn joined<const SHARED: usize, const OWN: usize, const ALL: usize>(
    shared: [&'static str; SHARED],
    own: [&'static str; OWN],
) -> [&'static str; ALL] {
    assert!(ALL == SHARED + OWN, "no key is lost");
    let mut all = [""; ALL];
    let mut i = 0;
    while i < ALL {
        all[i] = if i < SHARED { shared[i] } else { own[i - SHARED] };
        i += 1;
    }
    all
}

pub(in crate::ops) fn quant_keys(r: &Reader<'_>) -> Result<QuantConfig> {
    let checkpoint_format = r.name("checkpoint_format", &CheckpointFormat::named())?;
    let weight_types: Vec<_> =
        checkpoint_format.weight_types().iter().map(|t| (t.name(), *t)).collect();
    // Parse any known type first, to distinguish a wrong combination from a wrong name.
    let weight_type = r.name("weight_type", ScalarType::NAMED)?;
    if !weight_types.iter().any(|(_, t)| *t == weight_type) {
        let with = format!("checkpoint_format {checkpoint_format}");
        return Err(contradiction("weight_type", weight_type, with));
    }
    r.narrow("weight_type", &weight_types);
    let group_size = group_size(r)?;
    if let Some(fixed) = checkpoint_format.fixed_group()
        && group_size != fixed
    {
        let with = format!("checkpoint_format {checkpoint_format}, whose groups have {fixed} rows");
        return Err(contradiction("group_size", group_size, with));
    }
    let desc_act = r.flag("desc_act", false)?;
    if desc_act && !checkpoint_format.has_act_order() {
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

/// The power of two of formats with a global scale, which upstream computes from the block scales;
/// 1 for f16.
pub(in crate::ops) fn scale_factor(
    r: &Reader<'_>,
    key: &str,
    q: &QuantConfig,
) -> Result<Option<f64>> {
    let Some(factor) = r.number(key)? else { return Ok(None) };
    if !q.checkpoint_format.has_global_scale() {
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

/// Checks that a size fills a packed axis.
pub(in crate::ops) fn divisible(
    key: &str,
    size: usize,
    by: usize,
    why: impl ToString,
) -> Result<()> {
    if size.is_multiple_of(by) {
        return Ok(());
    }
    let expected = format!("a multiple of {by} ({})", why.to_string());
    Err(CaseError::ConfigValue { key: key.to_owned(), found: size.to_string(), expected })
}

/// K must consist of whole groups, unless the slice of a rank may cut them; K and N must fill rows
/// of Marlin tiles.
pub(in crate::ops) fn check_matrix(
    q: &QuantConfig,
    k: (&str, usize),
    n: (&str, usize),
) -> Result<()> {
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

pub(in crate::ops) fn at_most(
    key: &str,
    value: usize,
    limit_key: &str,
    limit: usize,
) -> Result<()> {
    if value <= limit {
        return Ok(());
    }
    Err(contradiction(key, value, format!("{limit_key} {limit}, the most there can be")))
}

pub(in crate::ops) fn schedule_json(choice: &ScheduleChoice) -> Value {
    match choice {
        ScheduleChoice::Given(schedule) => schedule.to_json(),
        named => named.name().into(),
    }
}
