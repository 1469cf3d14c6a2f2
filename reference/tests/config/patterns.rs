//! Patterns compared with Python: every cell of the table is the result of `re.match(pattern,
//! name)` (the `re` and `regex` modules agree on all of them).

use marlinspike::config::{ConfigError, PyPattern, wildcard};
use proptest::prelude::*;

const NAMES: [&str; 13] = [
    "model.layers.0.mlp.experts",
    "model.layers.12.mlp.experts.3.up_proj",
    "model.layers.12.mlp.down_proj",
    "model.layers.1.self_attn.q_proj",
    "lm_head",
    "model.layers.10.moe.gate",
    "a{b}c",
    "a[b]",
    "x-y",
    "model layers",
    "a\nb",
    "a\n",
    "",
];

/// Pattern, and one digit per name: 1 if Python finds a match.
#[rustfmt::skip]
const TABLE: &[(&str, &str)] = &[
    (r#".*\.(?:1[0-5])\..*"#, "0110010000000"),
    (r#".*\.moe\..*"#, "0000010000000"),
    (r#"model\.layers\.(?!1\.)\d+\.mlp"#, "1110000000000"),
    (r#"^(?=.*mlp)(?!.*experts).*$"#, "0010000000000"),
    (r#".*(?<!self_attn)\.q_proj"#, "0000000000000"),
    (r#".*(?<=mlp)\.down_proj$"#, "0010000000000"),
    (r#"(\w)\w*\.\1"#, "0000000000000"),
    (r#"layers"#, "0000000000000"),
    (r#"model"#, "1111010001000"),
    (r#""#, "1111111111111"),
    (r#"lm_head\Z"#, "0000100000000"),
    (r#"lm_hea\Z"#, "0000000000000"),
    (r#"a{b}c"#, "0000001000000"),
    (r#"a{b"#, "0000001000000"),
    (r#".{,3}m"#, "1111110001000"),
    (r#".{2,}$"#, "1111111111000"),
    (r#"[a[]b*"#, "0000001100110"),
    (r#"a[[]b]"#, "0000000100000"),
    (r#"a[]x[]b"#, "0000000100000"),
    (r#"[^]]*\]"#, "0000000100000"),
    (r#"[\w.-]+$"#, "1111110010010"),
    (r#"[a-z&&b]*x"#, "0000000010000"),
    (r#"[x~~y-]+$"#, "0000000010000"),
    (r#"(?i)MODEL"#, "1111010001000"),
    (r#"(?P<n>\d)?model(?P=n)?"#, "1111010001000"),
    (r#"(?:a|b)\Z"#, "0000000000000"),
    (r#"model\ layers"#, "0000000001000"),
    (r#"a$"#, "0000000000010"),
    (r#"a.b"#, "0000001100000"),
    (r#"(?s)a.b"#, "0000001100100"),
    (r#"\x6dodel"#, "1111010001000"),
    (r#"\155odel"#, "1111010001000"),
    (r#"\<model"#, "0000000000000"),
    (r#"model\.layers\.\d{1,2}\.(mlp|self_attn)\.(\w+_proj)$"#, "0011000000000"),
    (r#"(?P<first>m)(?:odel)(?#comment)\.layers"#, "1111010000000"),
    (r#"(a)?(?(1)\n|l)"#, "0000100000110"),
    (r#"[]-a]"#, "0000001100110"),
    (r#"[+--]*x"#, "0000000010000"),
    (r#".*experts(?!\.)"#, "1000000000000"),
    (r#"(?>model)\."#, "1111010000000"),
    (r#"model++\."#, "1111010000000"),
    (r#"\bmodel\b.*\bup_proj\b"#, "0100000000000"),
    (r#"\u006dodel"#, "1111010001000"),
    (r#"[\d-]*"#, "1111111111111"),
    (r#"x{0}model"#, "1111010001000"),
    (r#"(?m)a$"#, "0000000000110"),
];

#[test]
fn matches_as_python_does() {
    for (pattern, answers) in TABLE {
        let compiled = PyPattern::new(pattern, pattern).unwrap_or_else(|e| panic!("{e}"));
        for (name, answer) in NAMES.iter().zip(answers.chars()) {
            let found = compiled.matches_start(name).unwrap();
            assert_eq!(found, answer == '1', "{pattern:?} against {name:?}");
        }
    }
}

#[test]
fn backreferences_and_octal() {
    let m = |p: &str, n: &str| PyPattern::new(p, p).unwrap().matches_start(n).unwrap();
    assert!(m(r"(\w)\.\1$", "a.a"));
    assert!(!m(r"(\w)\.\1$", "a.b"));
    assert!(m(r"(\w)\.\1+0", "a.aa0"));
    assert!(m(r"a\0b", "a\0b"));
    assert!(m(r"a\0012", "a\u{1}2"));
}

#[test]
fn refuses_what_python_refuses() {
    let bad = [
        "(",
        ")",
        "[a",
        "a**",
        r"(?P<n>a)(?P<n>b",
        r"\q",
        "*a",
        "(?<n",
        r"\1",
        "(?(2)a|b)",
        "a{3,2}",
        "\\",
        "(?z)a",
        "[z-a]",
        r"\x1",
        r"\K",
        r"\G",
        r"\h",
        r"\e",
    ];
    for pattern in bad {
        match PyPattern::new(&format!("+:{pattern}"), pattern) {
            Err(ConfigError::InvalidPattern { rule, .. }) => {
                assert_eq!(rule, format!("+:{pattern}"));
            }
            other => panic!("{pattern:?}: {other:?}"),
        }
    }
}

#[test]
fn backtracking_is_bounded() {
    // With backreferences, every division of the name is a separate attempt.
    let pattern = PyPattern::new("-:slow", r"(?=a)(a*)(a*)(a*)(a*)(a*)\1\2\3\4\5[b]").unwrap();
    let name = "a".repeat(60);
    // Without them, nested repetitions have a result; Python would not terminate.
    let nested = PyPattern::new("nested", r"(?=a)(?:(?=a)a+)+(?=[b])b").unwrap();
    assert!(!nested.matches_start(&name).unwrap());
    match pattern.matches_start(&name) {
        Err(ConfigError::PatternTooCostly { rule, module }) => {
            assert_eq!(rule, "-:slow");
            assert_eq!(module, name);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn hostile_patterns_end_quickly() {
    let deep = "(".repeat(20_000) + &")".repeat(20_000);
    let huge = "a".repeat(70_000);
    let wide = "(?:a{1000}){1000}{1000}".to_owned();
    let sets = "[".repeat(30_000);
    for pattern in [deep, huge, wide, sets] {
        let result = PyPattern::new("rule", &pattern);
        assert!(matches!(result, Err(ConfigError::InvalidPattern { .. })), "{}", pattern.len());
    }
}

#[test]
fn wildcards_as_fnmatch() {
    // Computed with Python's `fnmatch.fnmatchcase`.
    let cases = [
        ("*", "", true),
        ("lm_head", "lm_head", true),
        ("lm_head*", "lm_head.x", true),
        ("*.gate", "a.b.gate", true),
        ("*.gate", "a.b.gate_proj", false),
        ("a?c", "abc", true),
        ("a?c", "ac", false),
        ("layer[0-3]", "layer2", true),
        ("layer[0-3]", "layer4", false),
        ("layer[!0-3]", "layer4", true),
        ("layer[!0-3]", "layer3", false),
        ("a[", "a[", true),
        ("[]]", "]", true),
        ("*a*a*a*b", &"a".repeat(500), false),
        ("*x*", "aXb", false),
        ("", "", true),
        ("", "a", false),
    ];
    for (pattern, name, expected) in cases {
        assert_eq!(wildcard(pattern, name), expected, "{pattern} {name}");
    }
}

proptest! {
    /// An escaped literal matches exactly the names that it begins.
    #[test]
    fn escaped_literals_are_prefixes(
        literal in "[ -~]{0,12}", tail in "[ -~]{0,6}", other in "[ -~]{0,12}",
    ) {
        // Python's `re.escape` puts a backslash before punctuation.
        let escaped: String = literal
            .chars()
            .flat_map(|c| (!c.is_alphanumeric()).then_some('\\').into_iter().chain([c]))
            .collect();
        let pattern = PyPattern::new("literal", &escaped).unwrap();
        let name = format!("{literal}{tail}");
        prop_assert!(pattern.matches_start(&name).unwrap());
        prop_assert_eq!(pattern.matches_start(&other).unwrap(), other.starts_with(&literal));
    }

    /// No pattern panics; every compiled pattern gives a result or the named error.
    #[test]
    fn no_pattern_panics(pattern in "[-a\\[\\](){}*+?.|^$\\\\0-9:P<>=!x#&~]{0,16}", name in "[-a.0-9x]{0,10}") {
        match PyPattern::new(&pattern, &pattern) {
            Ok(p) => match p.matches_start(&name) {
                Ok(_) | Err(ConfigError::PatternTooCostly { .. }) => {}
                Err(e) => prop_assert!(false, "{}", e),
            },
            Err(ConfigError::InvalidPattern { .. }) => {}
            Err(e) => prop_assert!(false, "{}", e),
        }
    }
}
