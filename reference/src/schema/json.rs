//! A schema as JSON Schema, of an object `{"op", "config", "inputs", "outputs"}` in which a tensor is
//! `{"dtype", "shape"}`.

use serde_json::{Map, Value, json};

use super::{Absence, KeySchema, OpSchema, TensorSchema};
use crate::num::tensor::DType;
use crate::ops::schema::KeyKind;

/// Keys that any config may have and nothing reads.
const REMARKS: [&str; 4] = ["name", "note", "notes", "comment"];

const LARGEST: u64 = (1 << 31) - 1;

impl OpSchema {
    /// The schema as JSON Schema, draft 2020-12. Conditions on other keys are in descriptions.
    pub fn to_json(&self) -> Value {
        let mut config = self.config_json("");
        if let Some(properties) = config["properties"].as_object_mut() {
            for remark in REMARKS {
                properties
                    .entry(remark)
                    .or_insert_with(|| json!({"description": "a remark; not read"}));
            }
            properties.insert("min_power".to_owned(), min_power());
        }
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": self.op.name(),
            "description": self.about,
            "type": "object",
            "properties": {
                "op": {"enum": [self.op.name()]},
                "config": config,
                "inputs": self.tensors_json("in."),
                "outputs": self.tensors_json("out."),
            },
            "required": ["op", "config", "inputs"],
            "additionalProperties": false,
        })
    }

    /// The object of keys whose paths begin with `prefix`.
    fn config_json(&self, prefix: &str) -> Value {
        let mut properties = Map::new();
        let mut required = Vec::new();
        for key in &self.keys {
            let Some(name) = key.name.strip_prefix(prefix).filter(|name| !name.contains('.'))
            else {
                continue;
            };
            let mut schema = self.key_json(key);
            if key.is_required() {
                required.push(name);
            } else if let Value::Object(map) = &mut schema {
                // Null counts as absent.
                let description = map.remove("description");
                let kinds = vec![Value::Object(std::mem::take(map)), json!({"type": "null"})];
                map.extend(description.map(|text| ("description".to_owned(), text)));
                map.insert("anyOf".to_owned(), kinds.into());
            }
            properties.insert(name.to_owned(), schema);
        }
        json!({
            "type": "object", "properties": properties, "required": required,
            "additionalProperties": false,
        })
    }

    fn key_json(&self, key: &KeySchema) -> Value {
        let mut schema = match key.forms.first().map(|(_, form)| &form.kind) {
            Some(KeyKind::Size) => size_json(1),
            Some(KeyKind::Index) => size_json(0),
            Some(KeyKind::Sizes) => json!({"type": "array", "items": size_json(1), "minItems": 1}),
            Some(KeyKind::Integer) => json!({"type": "integer"}),
            Some(KeyKind::Flag) => json!({"type": "boolean"}),
            Some(KeyKind::Number) => json!({"type": "number"}),
            Some(KeyKind::Text) => json!({"type": "string"}),
            Some(KeyKind::Name(_)) => json!({"enum": key.names()}),
            Some(KeyKind::Schedule) => json!({"type": ["string", "object"]}),
            Some(KeyKind::Object) => self.config_json(&format!("{}.", key.name)),
            None => json!({}),
        };
        if let Value::Object(map) = &mut schema {
            map.insert("description".to_owned(), description(key).into());
        }
        schema
    }

    fn tensors_json(&self, prefix: &str) -> Value {
        let mut properties = Map::new();
        let mut required = Vec::new();
        for tensor in &self.tensors {
            let Some(name) = tensor.name.strip_prefix(prefix) else { continue };
            properties.insert(name.to_owned(), tensor_json(tensor));
            if matches!(tensor.forms.as_slice(), [(when, form)] if when.is_always() && form.required)
            {
                required.push(name);
            }
        }
        json!({
            "type": "object", "properties": properties, "required": required,
            "additionalProperties": false,
        })
    }
}

/// The key that every operation allows besides its own.
fn min_power() -> Value {
    let about = "the largest uniform error, in percent, that a pass may leave unnoticed; default 2; \
                 `--min-power` takes precedence";
    let kinds = [json!({"type": "number", "minimum": 0}), json!({"type": "null"})];
    json!({"description": about, "anyOf": kinds})
}

fn size_json(least: u64) -> Value {
    json!({"type": "integer", "minimum": least, "maximum": LARGEST})
}

fn description(key: &KeySchema) -> String {
    let mut text = key.about.to_owned();
    for constraint in &key.constraints {
        text += &format!("; {constraint}");
    }
    for (when, form) in &key.forms {
        let names = match &form.kind {
            KeyKind::Name(names) if key.forms.len() > 1 => format!(" is {}", names.join(" or ")),
            _ => String::new(),
        };
        let without = match &form.absent {
            Absence::Required => "required".to_owned(),
            Absence::Value(Value::Null) => "optional".to_owned(),
            Absence::Value(value) => format!("default {value}"),
            Absence::SameAs(key) => format!("default: {key}"),
            Absence::Computed => "default: computed".to_owned(),
        };
        text += &match (when.is_always(), names.as_str()) {
            (true, _) => format!("; {without}"),
            (false, names) => format!("; with {when}:{names} {without}"),
        };
    }
    text
}

/// The tensor's header; every element type that some config allows.
fn tensor_json(tensor: &TensorSchema) -> Value {
    let mut dtypes: Vec<&'static str> = Vec::new();
    let mut lens = Vec::new();
    let mut text = tensor.about.to_owned();
    for (when, form) in &tensor.forms {
        for name in &form.dtypes {
            let of_key = ["F16", "BF16", "F32", "I8", "F8_E4M3", "U8", "F8_E8M0"];
            match DType::from_name(name) {
                Some(dtype) => dtypes.push(dtype.name()),
                None => dtypes.extend(of_key),
            }
        }
        lens.push(form.shape.len());
        let shape: Vec<String> = form.shape.iter().map(ToString::to_string).collect();
        let under = if when.is_always() { String::new() } else { format!(" with {when}") };
        let needed = if form.required { ", required" } else { "" };
        text += &format!("; {} [{}]{under}{needed}", form.dtypes.join(" or "), shape.join(", "));
    }
    dtypes.sort_unstable();
    dtypes.dedup();
    let single = tensor.forms.iter().any(|(_, form)| form.or_single);
    let least = if single { 0 } else { lens.iter().copied().min().unwrap_or(0) };
    let most = lens.iter().copied().max().unwrap_or(0).max(usize::from(single));
    let size = json!({"type": "integer", "minimum": 0});
    json!({
        "description": text,
        "type": "object",
        "properties": {
            "dtype": {"enum": dtypes},
            "shape": {"type": "array", "items": size, "minItems": least, "maxItems": most},
        },
        "required": ["dtype", "shape"],
        "additionalProperties": false,
    })
}
