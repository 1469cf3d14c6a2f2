//! A config as keys and values, so that a kernel in C need not parse JSON.

use std::ffi::{CStr, CString};

use serde_json::{Map, Value};

/// The keys of a config in JSON, each with its value as text. Nested keys have dots, elements of lists
/// their index; keys with null are absent.
pub(super) fn settings(config: &CStr) -> Result<Vec<[CString; 2]>, String> {
    let unreadable = |problem: String| format!("config: {problem}");
    let map: Map<String, Value> =
        serde_json::from_slice(config.to_bytes()).map_err(|e| unreadable(e.to_string()))?;
    let mut flat = Vec::new();
    map.iter().for_each(|(key, value)| flatten(key, value, &mut flat));
    let text = |text: String| CString::new(text).map_err(|e| unreadable(e.to_string()));
    flat.into_iter().map(|(key, value)| Ok([text(key)?, text(value)?])).collect()
}

fn flatten(key: &str, value: &Value, flat: &mut Vec<(String, String)>) {
    match value {
        Value::Null => {}
        Value::Object(map) => {
            map.iter().for_each(|(k, v)| flatten(&format!("{key}.{k}"), v, flat));
        }
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, v)| flatten(&format!("{key}.{i}"), v, flat));
        }
        Value::String(text) => flat.push((key.to_owned(), text.clone())),
        other => flat.push((key.to_owned(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_keys_have_dots_and_null_is_absent() {
        let config = c"{\"size_k\": 64, \"dtype\": \"float16\", \"tp\": {\"size\": 2, \"rank\": null},
            \"block\": [128, 64], \"desc_act\": true, \"factor\": 2.5, \"group\": -1, \"none\": null}";
        let found = settings(config).unwrap();
        let found: Vec<_> =
            found.iter().map(|kv| kv.each_ref().map(|c| c.to_str().unwrap())).collect();
        let expected = [
            ["size_k", "64"],
            ["dtype", "float16"],
            ["tp.size", "2"],
            ["block.0", "128"],
            ["block.1", "64"],
            ["desc_act", "true"],
            ["factor", "2.5"],
            ["group", "-1"],
        ];
        assert_eq!(found, expected);
        assert!(settings(c"[1]").unwrap_err().starts_with("config: "));
    }
}
