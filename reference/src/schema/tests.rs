//! The schema of an operation against what the operation demands, config by config.

use serde_json::json;

use super::sample::Sample;
use super::*;
use crate::ops::schema::TensorRule;

/// Every config of every lattice: the forms that the schema states for it are those that the operation
/// demands, no more and no fewer.
#[test]
fn the_schema_agrees_with_every_config_of_the_lattice() {
    for &(name, op) in Op::NAMED {
        let schema = describe(op).unwrap();
        let lattice = crate::vectors::lattice(op).unwrap();
        for (turn, config) in lattice.iter().enumerate() {
            let sample = Sample::read(op, &config.to_json(), turn).expect(name);
            for key in &schema.keys {
                let forms: Vec<_> =
                    key.forms.iter().filter(|(when, _)| when.holds(&sample)).collect();
                let read = sample.keys.iter().find(|(path, _)| *path == key.name);
                let kinds: Vec<_> = forms.iter().map(|(_, form)| &form.kind).collect();
                let expected: Vec<_> = read.iter().map(|(_, kind)| kind).collect();
                assert_eq!(kinds, expected, "{name}: {} under {:?}", key.name, sample.config);
            }
            for tensor in &schema.tensors {
                let rule = sample.rules.iter().find(|rule| rule.name == tensor.name);
                agrees(tensor, rule, &sample);
            }
            for rule in &sample.rules {
                assert!(
                    schema.tensors.iter().any(|t| t.name == rule.name),
                    "{name}: {}",
                    rule.name
                );
            }
        }
    }
}

fn agrees(tensor: &TensorSchema, rule: Option<&TensorRule>, sample: &Sample) {
    let at = || format!("{} under {:?}", tensor.name, sample.config);
    let forms: Vec<_> = tensor.forms.iter().filter(|(when, _)| when.holds(sample)).collect();
    let (form, rule) = match (forms.as_slice(), rule) {
        ([(_, form)], Some(rule)) => (form, rule),
        ([], None) => return,
        (forms, rule) => panic!("{}: {forms:?}, demanded {rule:?}", at()),
    };
    assert_eq!(form.required, rule.required, "{}", at());
    assert_eq!(form.or_single, rule.or_single, "{}", at());
    assert_eq!(form.dtypes_under(&sample.config), rule.dtypes, "{}", at());
    assert_eq!(form.shape.len(), rule.shape.len(), "{}", at());
    for (extent, dim) in form.shape.iter().zip(&rule.shape) {
        assert!(extent.fits(*dim, sample), "{}: {extent}, demanded {dim:?}", at());
    }
}

/// Facts about `linear` that its documentation states, written down here by hand.
#[test]
fn linear_has_the_documented_keys_and_shapes() {
    let linear = describe(Op::Linear).unwrap();
    let key = |name: &str| linear.keys.iter().find(|k| k.name == name).unwrap();
    assert!(key("checkpoint_format").is_required() && key("size_k").is_required());
    let default = |name: &str| match key(name).forms.as_slice() {
        [(when, form)] if when.is_always() => form.absent.clone(),
        forms => panic!("{name}: {forms:?}"),
    };
    assert_eq!(default("is_k_full"), Absence::Value(json!(true)));
    assert_eq!(default("desc_act"), Absence::Value(json!(false)));
    assert_eq!(default("input_dtype"), Absence::Value(Value::Null));
    let types = &key("weight_type").forms;
    let gptq = types.iter().find(|(when, _)| when.to_string() == "checkpoint_format gptq").unwrap();
    assert_eq!(gptq.1.kind, KeyKind::Name(vec!["uint4b8".to_owned(), "uint8b128".to_owned()]));
    assert_eq!(key("size_k").constraints[0], "a multiple of 16 (rows of a Marlin tile)");
    let form = |name: &str| {
        let tensor = linear.tensors.iter().find(|t| t.name == name).unwrap();
        let shape = |form: &TensorForm| {
            form.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        tensor.forms.iter().map(|(when, form)| (when.to_string(), shape(form))).collect::<Vec<_>>()
    };
    let is = |when: &str, shape: &str| (when.to_owned(), shape.to_owned());
    assert_eq!(form("in.x"), [is("always", "size_m, size_k")]);
    assert_eq!(form("out.y"), [is("always", "size_m, size_n")]);
    assert!(form("in.qweight").contains(&is("weight_type uint4b8", "size_k / 8, size_n")));
    assert!(form("in.qzeros").iter().any(|(when, shape)| {
        when.contains("weight_type uint4") && shape == "groups(size_k), size_n / 8"
    }));
}

/// The shape of one config, by hand.
#[test]
fn tensors_of_one_config() {
    let config = json!({
        "checkpoint_format": "gptq", "weight_type": "uint4b8", "dtype": "bfloat16",
        "group_size": 32, "size_m": 3, "size_n": 64, "size_k": 128,
    });
    let rules = tensors(Op::Linear, config.as_object().unwrap(), None).unwrap();
    let scales = rules.iter().find(|rule| rule.name == "in.scales").unwrap();
    assert_eq!(scales.shape, [crate::case::Dim::Is(4), crate::case::Dim::Is(64)]);
    assert_eq!(scales.dtypes, [DType::BF16]);
    let wrong = json!({"checkpoint_format": "gptq"});
    assert!(tensors(Op::Linear, wrong.as_object().unwrap(), None).is_err());
}
