//! The rule and the block that a router's config states.

use serde_json::{Map, Value};

use crate::Error;
use crate::moe::block::Block;
use crate::moe::families::{self, RoutingRule};
use crate::ops::schema::CaseError;

/// The rule that a config states: by `routing`, an object of a routing file's keys, or by
/// `model_type` and the keys that its family reads, with `layer` where they are lists.
pub(in crate::ops) fn rule(map: &Map<String, Value>) -> Result<Option<RoutingRule>, CaseError> {
    let refuse = |key: &str, e: Error| CaseError::ConfigValue {
        key: key.to_owned(),
        found: map.get(key).map_or("none".to_owned(), |v| match v {
            Value::Object(_) => "an object".to_owned(),
            other => other.to_string().chars().take(60).collect(),
        }),
        expected: format!("a routing that is known ({e})"),
    };
    if let Some(value) = map.get("routing") {
        return RoutingRule::from_json(value).map(Some).map_err(|e| refuse("routing", e));
    }
    if !map.contains_key("model_type") {
        return Ok(None);
    }
    let layer = map.get("layer").and_then(Value::as_u64).unwrap_or(0);
    let module = format!("model.layers.{layer}.mlp.experts");
    let resolved = families::resolve(&Value::Object(map.clone()), &module);
    resolved.map(|r| Some(r.rule)).map_err(|e| refuse("model_type", e))
}

/// The block that a config states next to its rule.
pub(in crate::ops) fn block(
    map: &Map<String, Value>,
    rule: &RoutingRule,
) -> Result<Option<Block>, CaseError> {
    let Some(value) = map.get("block").filter(|v| !v.is_null()) else { return Ok(None) };
    let refuse = |problem: String| CaseError::ConfigValue {
        key: "block".to_owned(),
        found: value.to_string().chars().take(60).collect(),
        expected: format!("sizes of a MoE block ({problem})"),
    };
    let block: Block =
        serde_path_to_error::deserialize(value).map_err(|e| refuse(e.to_string()))?;
    block.validate().and_then(|()| block.activation(rule)).map_err(|e| refuse(e.to_string()))?;
    Ok(Some(block))
}
