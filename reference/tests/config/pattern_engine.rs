//! The bounded matcher compared with `fancy-regex`, and the cost of hostile patterns.

use std::time::{Duration, Instant};

use marlinspike::config::{
    ConfigError, MAX_PROGRAMS, MAX_STEPS, PatternBudget, PyPattern, QuantConfig,
};
use marlinspike_golden::Tier;
use proptest::prelude::*;
use serde_json::{Map, json};

/// The result of `re.match` by `fancy-regex`: the leftmost match begins at 0 if and only if some
/// match does.
fn by_fancy_regex(pattern: &str, name: &str) -> Option<bool> {
    let regex = fancy_regex::RegexBuilder::new(pattern).backtrack_limit(100_000).build().ok()?;
    regex.find(name).ok().map(|m| m.is_some_and(|m| m.start() == 0))
}

/// Patterns over a small alphabet, with the syntax that both engines read alike.
fn pattern() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        6 => "[abc.]",
        1 => Just(r"\.".to_owned()),
        1 => Just(r"\w".to_owned()),
        1 => Just(r"\d".to_owned()),
        1 => Just("[^a.]".to_owned()),
        1 => Just("[a-b0-9]".to_owned()),
        1 => Just(r"\b".to_owned()),
        1 => Just("(?i:A)".to_owned()),
        1 => Just("^".to_owned()),
    ];
    leaf.prop_recursive(4, 24, 3, |inner| {
        let atom = inner.clone().prop_map(|p| format!("(?:{p})"));
        prop_oneof![
            3 => prop::collection::vec(inner.clone(), 2..4).prop_map(|v| v.concat()),
            2 => prop::collection::vec(inner.clone(), 2..4)
                .prop_map(|v| format!("(?:{})", v.join("|"))),
            3 => (atom.clone(), "[*+?]|\\{[0-3]\\}|\\{1,3\\}|\\{2,\\}|\\*\\?|\\+\\?")
                .prop_map(|(a, q)| {
                    // An assertion alone cannot be repeated in `fancy-regex`.
                    format!("(?:a?{a}){q}")
                }),
            1 => inner.clone().prop_map(|p| format!("(?={p})")),
            1 => inner.clone().prop_map(|p| format!("(?!{p})")),
            1 => inner.clone().prop_map(|p| format!("(?>{p})")),
            1 => "[abc]{1,2}".prop_map(|p| format!("(?<={p})")),
            1 => "[abc]{1,2}".prop_map(|p| format!("(?<!{p}|b)")),
            1 => inner.clone().prop_map(|p| format!("({p})")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(Tier::current().pick(500, 3000, 10_000)))]

    #[test]
    fn answers_as_fancy_regex(
        pattern in pattern(),
        tail in prop_oneof![3 => Just(""), 1 => Just(r"\1"), 1 => Just(r"(?(1)a|b)")],
        names in prop::collection::vec("[abcA0.]{0,8}", 4),
    ) {
        let pattern = match tail {
            "" => pattern,
            tail => format!("(a|b)?{pattern}{tail}"),
        };
        let Ok(compiled) = PyPattern::new(&pattern, &pattern) else { return Ok(()) };
        for name in &names {
            if let Some(expected) = by_fancy_regex(&pattern, name) {
                prop_assert_eq!(
                    compiled.matches_start(name).unwrap(), expected, "{:?} {:?}", pattern, name
                );
            }
        }
    }
}

fn gptq(rules: impl IntoIterator<Item = String>) -> Result<QuantConfig, ConfigError> {
    let dynamic: Map<_, _> = rules.into_iter().map(|r| (r, json!({"bits": 8}))).collect();
    QuantConfig::from_value(&json!({
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true,
        "dynamic": dynamic,
    }))
}

#[test]
fn many_large_rules_are_refused_together() {
    // 20 KB of config that took 34 s and 4.8 GB.
    let rules = (0..16_384).map(|i| format!("(?:\\w{{40}}){{3}}{i}"));
    let begun = Instant::now();
    match gptq(rules) {
        Err(ConfigError::PatternBudget { rule, what: "compiled instructions", limit }) => {
            assert!(rule.starts_with("(?:\\w{40}){3}"), "{rule}");
            assert_eq!(limit, MAX_PROGRAMS);
        }
        other => panic!("{other:?}"),
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    // The same number of small rules is an ordinary config.
    let config = gptq((0..16_384).map(|i| format!(r"model\.layers\.{i}\.mlp\..*"))).unwrap();
    assert_eq!(config.scheme_for("model.layers.16383.mlp.up_proj").unwrap().bits(), Some(8));
    assert_eq!(config.scheme_for("model.layers.16384.mlp.up_proj").unwrap().bits(), Some(4));
}

#[test]
fn many_slow_rules_are_refused_together() {
    let name = format!("{}b", "a".repeat(50_000));
    let one = PyPattern::new("slow", "(?=a*b)z").unwrap();
    let begun = Instant::now();
    assert!(!one.matches_start(&name).unwrap());
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());

    // A character class prevents a required literal.
    let config = gptq((0..16_384).map(|i| format!("(?=a*b)[z](?:{i})?"))).unwrap();
    match config.scheme_for(&name) {
        Err(ConfigError::PatternBudget { rule, what: "matching steps", .. }) => {
            assert!(rule.starts_with("(?=a*b)[z]"), "{rule}");
        }
        other => panic!("{other:?}"),
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

/// A config may be queried for every name: each query has its own step limit.
#[test]
fn questions_do_not_use_up_a_config() {
    let rules = (0..40).map(|i| format!(r"-:.*\.{i}\.(?:self_attn|mlp)\.\w+_proj$"));
    let config = gptq(rules).unwrap();
    for i in 0..20_000 {
        let name = format!("model.layers.{i}.mlp.experts.7.down_proj");
        config.scheme_for(&name).unwrap_or_else(|e| panic!("{i}: {e}"));
    }
}

#[test]
fn one_rule_has_a_limit_of_its_own() {
    // Backreferences require every alternative to be tried.
    let pattern = PyPattern::new("+:back", r"(a*)(a*)(a*)(a*)\1\2\3\4[b]").unwrap();
    match pattern.matches_start(&"a".repeat(200)) {
        Err(error @ ConfigError::PatternTooCostly { .. }) => {
            let message = error.to_string();
            assert!(message.contains("+:back") && message.contains(&MAX_STEPS.to_string()));
        }
        other => panic!("{other:?}"),
    }
    // Without them, nested repetitions take steps in proportion to the name's length.
    let nested = PyPattern::new("nested", "(?:(?:a*)*|(?:a|a)+)*[b]").unwrap();
    assert!(!nested.matches_start(&"a".repeat(5_000)).unwrap());
    for hostile in ["(){1000000000}a", "(?:a{0,4000000000})", "(?:(?:a{999}){999}){999}"] {
        match PyPattern::new(hostile, hostile) {
            Ok(p) => drop(p.matches_start("a")),
            Err(e) => assert!(matches!(e, ConfigError::InvalidPattern { .. }), "{e:?}"),
        }
    }
}

#[test]
fn groups_conditions_and_loops() {
    let m = |p: &str, n: &str| PyPattern::new(p, p).unwrap().matches_start(n).unwrap();
    // Each answer was computed with Python's `re.match`.
    assert!(m(r"(a|b)*c\1$", "abcb"));
    assert!(!m(r"(a|b)*c\1$", "abca"));
    assert!(m(r"(?=(a+))\1b", "aab"));
    assert!(!m(r"(?!(a))\1", "b"));
    assert!(m(r"(?:(a)|b)(?(1)c|d)$", "ac"));
    assert!(!m(r"(?:(a)|b)(?(1)c|d)$", "ad"));
    assert!(m(r"(?:(a)|b)(?(1)c|d)$", "bd"));
    assert!(m(r"(a?)*b\1", "aab"));
    assert!(m(r"(x{0})?a\1b", "ab"));
    assert!(!m(r"(?>a+)ab", "aaab"));
    assert!(
        m(r"(?i)(ab)-\1$", "aB-Ab") && !m(r"(ab)-\1$", "ab-Ab") && !m(r"(?i)(ab)-\1$", "ab-ac")
    );
    assert!(m(r"(?i)straße\.\w", "STRAßE.é"));
    assert!(m(r"(?<=^)a(?<!b)(?<!cc)", "a"));
    assert!(!m(r"a(?<!b|a)", "a"));
}

#[test]
fn lists_and_wildcards_have_a_limit() {
    let config = |key: &str, list: Vec<String>| {
        QuantConfig::from_value(&json!({
            "quant_method": if key == "ignore" { "modelopt" } else { "fp8" },
            "quant_algo": "NVFP4", "activation_scheme": "dynamic", key: list,
        }))
        .unwrap()
    };
    let name = "a".repeat(50_000);
    // Every `*` is followed by text that nearly matches everywhere.
    let slow = config("ignore", vec![format!("{}b", "*aaaaaaaaaaaaaaaa[b]".repeat(400))]);
    let begun = Instant::now();
    let one_by_one =
        config("ignore", (0..400).map(|i| format!("*{}b{i}", "a".repeat(99))).collect());
    for config in [slow, one_by_one] {
        match config.scheme_for(&name) {
            Err(ConfigError::PatternBudget { rule, what, .. }) => {
                assert!(rule.starts_with("*aaaa") && what.contains("list"), "{rule} {what}");
            }
            other => panic!("{other:?}"),
        }
    }
    let long = config("ignored_layers", (0..60_000).map(|i| format!("layer{i}")).collect());
    assert!(matches!(long.scheme_for(&name), Err(ConfigError::PatternBudget { .. })));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    // Long lists of real names are cheap.
    let name = "model.layers.3.mlp.down_proj";
    assert!(long.scheme_for(name).is_ok());
    let many = (0..5_000).map(|i| format!("model.layers.{i}.self_attn*")).collect();
    assert!(config("ignore", many).scheme_for(name).is_ok());
}

/// `convert` recognizes its own output by this pattern.
#[test]
fn a_config_is_shown_the_same_every_time() {
    let ignore: Vec<_> = (0..50).map(|i| format!("a{i}")).chain(["re:b.*".to_owned()]).collect();
    let value = json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ignore,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32,
        }}},
    });
    let [a, b] = [(); 2].map(|()| QuantConfig::from_value(&value).unwrap());
    a.scheme_for("model.layers.0.mlp.down_proj").unwrap();
    assert_eq!(format!("{a:?}"), format!("{b:?}"));
}

#[test]
fn a_budget_is_shared() {
    let budget = PatternBudget::new();
    let big = "a".repeat(30_000);
    let made = (0..100).map(|_| PyPattern::within("big", &big, &budget)).take_while(Result::is_ok);
    assert_eq!(made.count() as u64, MAX_PROGRAMS / 30_001);
    PyPattern::new("big", &big).unwrap();
}
