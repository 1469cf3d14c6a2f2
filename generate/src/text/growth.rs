//! By how much the components of a `tokenizer.json` can lengthen a text.
//!
//! Components run one after the other, so their factors multiply: 40 of them that each double a text
//! would fill any memory.

use serde_json::Value;

/// Largest product of the components' factors. Published tokenizers have at most 64.
pub(super) const LIMIT: u64 = 4096;

/// The product of the factors of all components in `section`: normalizers, pre-tokenizers or decoders.
pub(super) fn factor(section: &Value) -> u64 {
    match section {
        Value::Array(list) => list.iter().map(factor).fold(1, u64::saturating_mul),
        Value::Object(keys) => {
            let inner = keys.values().map(factor).fold(1, u64::saturating_mul);
            inner.saturating_mul(own(section))
        }
        _ => 1,
    }
}

/// The factor of one component, in bytes of UTF-8.
fn own(component: &Value) -> u64 {
    match component["type"].as_str() {
        Some("Replace") => {
            let content = component["content"].as_str().map_or(0, str::len) as u64;
            match component["pattern"]["String"].as_str().map_or(0, str::len) as u64 {
                // A regex can match the empty text before every byte.
                0 => content + 1,
                pattern => content.div_ceil(pattern).max(1),
            }
        }
        Some("NFKC" | "NFKD" | "Precompiled") => 11,
        Some("NFC" | "NFD" | "Metaspace") => 3,
        Some("ByteLevel" | "Lowercase" | "BertNormalizer") => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn factors_multiply_and_published_forms_are_small() {
        let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let doubles = replace(json!({"String": "c"}), "cc");
        assert_eq!(factor(&doubles), 2);
        assert_eq!(factor(&replace(json!({"String": "cc"}), "c")), 1);
        assert_eq!(factor(&replace(json!({"Regex": ""}), "ab")), 3);
        let many = json!({"type": "Sequence", "normalizers": vec![doubles; 13]});
        assert_eq!(factor(&many), 1 << 13);
        assert!(factor(&json!(vec![many; 9])) == u64::MAX, "no overflow");
        // As in SentencePiece's and in byte-level tokenizers.
        let spaces = replace(json!({"String": " "}), "▁");
        let pieces = json!({"type": "Sequence", "normalizers": [{"type": "Precompiled"}, spaces]});
        assert_eq!(factor(&pieces), 33);
        assert_eq!(factor(&Value::Null), 1);
    }
}
