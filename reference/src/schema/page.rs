//! Schemas as text: for a terminal, and as the page of the book.

use super::{Absence, KeyForm, KeySchema, OpSchema, TensorForm, TensorSchema, example};
use crate::Result;
use crate::ops::schema::KeyKind;

const HEAD: &str = "\
# Case schema

<!-- Written by `marlinspike schema --markdown`; a test fails when it is stale. -->

This page lists the config keys and tensors of every operation. It is generated from the code that reads cases:
`marlinspike schema --op OP` prints one operation, `--json` prints JSON Schema, and `--config JSON` prints the exact tensors,
shapes and types under one config.

- Sizes are integers from 1 to 2^31 - 1. Null counts as absent. The keys `name`, `note`, `notes` and `comment` are free for
  remarks; any other unknown key is an error.
- `dtype` in a type column is the type that the config key states: `float16` is F16, `bfloat16` is BF16.
- `groups(K)` is K / `group_size`, or 1 where `group_size` is -1. `w13_size_n` is 2 * `intermediate_size`, or
  `intermediate_size` for an activation without an up projection. `local_experts` is the number of experts of this rank.
- `round_up(a, b)` is the smallest multiple of b that is at least a. \"computed\" sizes are printed by `--config`.
- act-order is on with `desc_act` and a `group_size` other than -1. A rank holds a slice of K where `is_k_full` is false or
  `tensor_parallel.style` is `row`.
- `uint4b8` is a code less 8, `uint8b128` a code less 128, `uint4` and `uint8` a code less its zero point. Where `qweight` is
  [size_k / 8 or / 4, size_n], a word holds consecutive k of one column, the first in its lowest bits. Where it is divided along
  N, a word of `qweight` and `qzeros` holds consecutive columns: of 8 columns, the fields from the lowest bits up are 0, 2, 4, 6,
  1, 3, 5 and 7; of 4 columns, 0, 2, 1 and 3.
- [Operations](operations.md) says what each operation computes, and [Layouts](layouts.md) where a kernel's layout has each value.
- Outputs that a case lacks are not checked.
- Instead of its keys, `router` takes a model's `config.json`, or a [stated routing](models.md#state-a-routing).

Examples write a case with random inputs; add your kernel's outputs and run `marlinspike check case.safetensors`. The Python
examples import this module:

";

/// The page of the book.
///
/// # Errors
/// None for the operations in the table.
pub fn page(schemas: &[OpSchema]) -> Result<String> {
    let mut page = HEAD.to_owned();
    page += &format!("```python\n# case_file.py\n{}```\n\n", example::PYTHON);
    page += &format!(
        "The C++ examples include this header:\n\n```cpp\n// case_file.hpp\n{}```\n",
        example::CPP
    );
    for schema in schemas {
        page += &format!("\n## `{}`\n\n{}\n", schema.op, schema.about);
        page += "\n| key | value | without it | meaning |\n| --- | --- | --- | --- |\n";
        page.extend(schema.keys.iter().flat_map(key_rows));
        for (title, prefix) in [("Input", "in."), ("Output", "out.")] {
            page += &format!("\n| {title} | type | shape | meaning |\n| --- | --- | --- | --- |\n");
            let of_kind = schema.tensors.iter().filter(|tensor| tensor.name.starts_with(prefix));
            page.extend(of_kind.flat_map(tensor_rows));
        }
        page += &format!("\n```python\n{}```\n\n", schema.python_example()?);
        page += &format!("```cpp\n{}```\n", schema.cpp_example()?);
    }
    Ok(page)
}

fn kind(form: &KeyForm) -> String {
    match &form.kind {
        KeyKind::Size => "size".to_owned(),
        KeyKind::Sizes => "list of sizes".to_owned(),
        KeyKind::Index => "integer from 0".to_owned(),
        KeyKind::Integer => "integer".to_owned(),
        KeyKind::Flag => "true or false".to_owned(),
        KeyKind::Number => "number".to_owned(),
        KeyKind::Text => "text".to_owned(),
        KeyKind::Name(names) => {
            names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")
        }
        KeyKind::Schedule => {
            "`canonical`, `canonical_v2`, `canonical_wgmma` or an object".to_owned()
        }
        KeyKind::Object => "object".to_owned(),
    }
}

fn absent(form: &KeyForm) -> String {
    match &form.absent {
        Absence::Required => "required".to_owned(),
        Absence::Value(serde_json::Value::Null) => "optional".to_owned(),
        Absence::Value(serde_json::Value::String(text)) => format!("`{text}`"),
        Absence::Value(value) => value.to_string(),
        Absence::SameAs(key) => format!("`{key}`"),
        Absence::Computed => "computed".to_owned(),
    }
}

fn key_rows(key: &KeySchema) -> Vec<String> {
    let mut about = key.about.to_owned();
    for constraint in &key.constraints {
        about += &format!("; {constraint}");
    }
    if key.forms.is_empty() {
        return vec![format!("| `{}` | any | optional | {about} |\n", key.name)];
    }
    let row = |(i, (when, form)): (usize, &(super::When, KeyForm))| {
        let about = if i == 0 { about.as_str() } else { "" };
        let under = if when.is_always() { String::new() } else { format!("; with {when}") };
        format!("| `{}` | {}{under} | {} | {about} |\n", key.name, kind(form), absent(form))
    };
    key.forms.iter().enumerate().map(row).collect()
}

fn shape(form: &TensorForm) -> String {
    let sizes: Vec<String> = form.shape.iter().map(ToString::to_string).collect();
    let single = if form.or_single { " or [1]" } else { "" };
    format!("[{}]{single}", sizes.join(", "))
}

fn tensor_rows(tensor: &TensorSchema) -> Vec<String> {
    let row = |(i, (when, form)): (usize, &(super::When, TensorForm))| {
        let about = if i == 0 { tensor.about } else { "" };
        let under = if when.is_always() { String::new() } else { format!("; with {when}") };
        let optional = form.required || tensor.name.starts_with("out.");
        let optional = if optional { "" } else { " (optional)" };
        let dtypes = form.dtypes.join(" or ");
        format!("| `{}`{optional} | {dtypes} | {}{under} | {about} |\n", tensor.name, shape(form))
    };
    if tensor.forms.is_empty() {
        return vec![format!("| `{}` | | computed | {} |\n", tensor.name, tensor.about)];
    }
    tensor.forms.iter().enumerate().map(row).collect()
}

/// A schema for a terminal.
pub fn text(schema: &OpSchema) -> String {
    let mut text = format!("{}: {}\n\nConfig:\n", schema.op, schema.about);
    for key in &schema.keys {
        for (when, form) in &key.forms {
            let under = if when.is_always() { String::new() } else { format!("; with {when}") };
            let kind = kind(form).replace('`', "");
            let without = absent(form).replace('`', "");
            let without = match form.absent {
                Absence::Required | Absence::Value(serde_json::Value::Null) => without,
                _ => format!("default {without}"),
            };
            text += &format!("  {:<28} {kind} ({without}{under})\n", key.name);
        }
        text += &format!("  {:<28}   {}\n", "", key.about);
        for constraint in &key.constraints {
            text += &format!("  {:<28}   {constraint}\n", "");
        }
    }
    for (title, prefix) in [("Inputs", "in."), ("Outputs", "out.")] {
        text += &format!("\n{title}:\n");
        for tensor in schema.tensors.iter().filter(|tensor| tensor.name.starts_with(prefix)) {
            for (when, form) in &tensor.forms {
                let under = if when.is_always() { String::new() } else { format!("  with {when}") };
                let needed = if form.required { ", required" } else { "" };
                let (dtypes, shape) = (form.dtypes.join(" or "), shape(form));
                text += &format!("  {:<28} {dtypes} {shape}{needed}{under}\n", tensor.name);
            }
            text += &format!("  {:<28}   {}\n", "", tensor.about);
        }
    }
    text
}
