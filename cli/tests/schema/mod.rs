//! The part of JSON Schema that the published schema uses. Other keywords panic, so that no part
//! of the schema is ignored; keys that the schema does not list are violations.

use serde_json::Value;

/// What about `value` violates `schema`; `root` holds the definitions.
pub(crate) fn violations(root: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (keyword, rule) in schema.as_object().unwrap() {
        match keyword.as_str() {
            "$schema" | "$defs" | "title" | "description" => {}
            // Read with the properties, where there are any.
            "additionalProperties" if schema.get("properties").is_some() => {}
            "additionalProperties" => properties(root, schema, value, at, &mut found),
            "$ref" => {
                let name = rule.as_str().unwrap().strip_prefix("#/$defs/").unwrap();
                found.extend(violations(root, &root["$defs"][name], value, at));
            }
            "oneOf" => one_of(root, rule.as_array().unwrap(), value, at, &mut found),
            "enum" => {
                if !rule.as_array().unwrap().contains(value) {
                    found.push(format!("{at}: {value} is none of {rule}"));
                }
            }
            "type" => {
                let names = rule.as_array().cloned().unwrap_or_else(|| vec![rule.clone()]);
                if !names.iter().any(|name| is(name.as_str().unwrap(), value)) {
                    found.push(format!("{at}: {value} is no {rule}"));
                }
            }
            "required" => {
                let keys = rule.as_array().unwrap().iter().map(|key| key.as_str().unwrap());
                let missing = keys.filter(|key| value.is_object() && value.get(key).is_none());
                found.extend(missing.map(|key| format!("{at}: no {key}")));
            }
            "properties" => properties(root, schema, value, at, &mut found),
            "items" => {
                for (i, item) in value.as_array().into_iter().flatten().enumerate() {
                    found.extend(violations(root, rule, item, &format!("{at}[{i}]")));
                }
            }
            "anyOf" => {
                let rules = rule.as_array().unwrap();
                let each: Vec<_> = rules.iter().map(|r| violations(root, r, value, at)).collect();
                if each.iter().all(|found| !found.is_empty()) {
                    found.push(format!("{at}: fits none of {each:?}"));
                }
            }
            "maxItems" => {
                let most = rule.as_u64().unwrap() as usize;
                if value.as_array().is_some_and(|list| list.len() > most) {
                    found.push(format!("{at}: more than {most} items"));
                }
            }
            "minItems" => {
                let least = rule.as_u64().unwrap() as usize;
                if value.as_array().is_some_and(|list| list.len() < least) {
                    found.push(format!("{at}: fewer than {least} items"));
                }
            }
            "minimum" => {
                if value.as_f64().is_some_and(|x| x < rule.as_f64().unwrap()) {
                    found.push(format!("{at}: {value} is below {rule}"));
                }
            }
            "maximum" => {
                if value.as_f64().is_some_and(|x| x > rule.as_f64().unwrap()) {
                    found.push(format!("{at}: {value} is above {rule}"));
                }
            }
            other => panic!("{at}: keyword {other}"),
        }
    }
    found
}

fn is(name: &str, value: &Value) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("type {other}"),
    }
}

fn one_of(root: &Value, rules: &[Value], value: &Value, at: &str, found: &mut Vec<String>) {
    let each: Vec<_> = rules.iter().map(|rule| violations(root, rule, value, at)).collect();
    let fitting = each.iter().filter(|found| found.is_empty()).count();
    if fitting != 1 {
        found.push(format!("{at}: fits {fitting} of {} forms: {each:?}", rules.len()));
    }
}

fn properties(root: &Value, schema: &Value, value: &Value, at: &str, found: &mut Vec<String>) {
    for (key, part) in value.as_object().into_iter().flatten() {
        let at = format!("{at}.{key}");
        match schema["properties"].get(key).or_else(|| schema.get("additionalProperties")) {
            Some(Value::Bool(false)) => found.push(format!("{at}: not in the schema")),
            Some(rule) => found.extend(violations(root, rule, part, &at)),
            None => found.push(format!("{at}: not in the schema")),
        }
    }
}
