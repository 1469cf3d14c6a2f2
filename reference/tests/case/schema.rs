//! The schema of each operation against what the operation demands, config by config.

use marlinspike::case::{CaseConfig, Dim, Op};
use marlinspike::num::tensor::DType;
use marlinspike::schema::{self, Absence, KeyKind, TensorForm, describe, tensors};
use marlinspike::vectors::Generator;
use serde_json::{Map, Value, json};

/// Every config of every lattice: the forms that the schema states for it are those that the operation
/// demands, no more and no fewer.
#[test]
fn the_schema_agrees_with_every_config_of_the_lattice() {
    for &(name, op) in Op::NAMED {
        let schema = describe(op).unwrap();
        let lattice = marlinspike::vectors::lattice(op).unwrap();
        assert!(!lattice.is_empty(), "{name}");
        for (turn, config) in lattice.iter().enumerate() {
            assert_eq!(schema.disagreement(config, turn), None);
        }
    }
}

/// A schema that lacks a key's form, a tensor, or states another one, is noticed.
#[test]
fn another_schema_disagrees() {
    let config = &marlinspike::vectors::lattice(Op::Linear).unwrap()[0];
    let right = describe(Op::Linear).unwrap();
    assert_eq!(right.disagreement(config, 0), None);
    let changed = |change: &dyn Fn(&mut schema::OpSchema)| {
        let mut schema = right.clone();
        change(&mut schema);
        schema.disagreement(config, 0).expect("a disagreement")
    };
    let x = |s: &schema::OpSchema| s.tensors.iter().position(|t| t.name == "in.x").unwrap();
    let no_form = changed(&|s| s.keys.iter_mut().for_each(|key| key.forms.clear()));
    assert!(no_form.contains("key "), "{no_form}");
    let no_tensor = changed(&|s| drop(s.tensors.remove(x(s))));
    assert!(no_tensor.contains("tensor in.x is not stated"), "{no_tensor}");
    let no_shape = changed(&|s| {
        let at = x(s);
        s.tensors[at].forms[0].1.shape.pop();
    });
    assert!(no_shape.contains("tensor in.x: stated"), "{no_shape}");
    let optional = changed(&|s| {
        let at = x(s);
        s.tensors[at].forms[0].1.required ^= true;
    });
    assert!(optional.contains("tensor in.x: stated"), "{optional}");
}

/// Every key and tensor has a meaning, and no meaning is left of one that is gone.
#[test]
fn every_name_has_a_meaning() {
    let mut used = Vec::new();
    for op in schema::all().unwrap() {
        for key in &op.keys {
            assert!(!key.about.is_empty(), "{}: key {}", op.op, key.name);
            used.push(key.about);
        }
        for tensor in &op.tensors {
            assert!(!tensor.about.is_empty(), "{}: tensor {}", op.op, tensor.name);
            used.push(tensor.about);
        }
    }
    assert!(schema::meanings().count() > 100);
    for (name, about) in schema::meanings() {
        assert!(used.contains(&about), "no operation has {name}");
    }
}

/// Every key that a config writes is known. Every known key is read: a value of a type that no key has is
/// refused by the key's name.
#[test]
fn the_keys_are_those_that_the_operations_read() {
    for &(name, op) in Op::NAMED {
        let generator = Generator::new(op, 1).expect(name);
        for config in generator.lattice() {
            CaseConfig::from_json(op, &config.to_json()).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        let whole = generator.lattice().iter().map(CaseConfig::to_json);
        let whole = whole.max_by_key(Map::len).expect(name);
        let keys = describe(op).unwrap().keys;
        let unread = ["convention", "adversarial_rows"];
        let read = keys.iter().map(|key| key.name.as_str());
        for key in read.filter(|k| !unread.contains(k) && !k.contains('.')) {
            let mut map = whole.clone();
            map.insert(key.to_owned(), json!([{"no": "such"}]));
            let error = CaseConfig::from_json(op, &map);
            let error = error.expect_err(&format!("{name}: `{key}` is not read")).to_string();
            assert!(error.contains(&format!("`{key}`")), "{name}: {key}: {error}");
        }
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
    assert_eq!(scales.shape, [Dim::Is(4), Dim::Is(64)]);
    assert_eq!(scales.dtypes, [DType::BF16]);
    let wrong = json!({"checkpoint_format": "gptq"});
    assert!(tensors(Op::Linear, wrong.as_object().unwrap(), None).is_err());
}
