//! Cases that the bugs are planted in.

use marlinspike::case::{Case, CaseConfig};
use marlinspike::check::{OutputReport, check_case};
use marlinspike::num::scalar::f64_to_f16_rne;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::{self, Rng};
use serde_json::{Map, Value};

use crate::product_model::golden;

/// One golden case.
pub(crate) fn case(name: &str) -> Case<'static> {
    Case::parse(Box::leak(golden(name).into_boxed_slice())).expect("a case")
}

/// A generated case of five rows or more, whose config is a golden one's with some keys changed.
pub(crate) fn generated(name: &str, keys: Value, seed: u64) -> Case<'static> {
    let model = case(name);
    let mut config: Map<String, Value> = model.config.to_json();
    let Value::Object(keys) = keys else { panic!("keys") };
    for (key, value) in keys {
        match value {
            Value::Null => config.remove(&key),
            value => config.insert(key, value),
        };
    }
    let config = CaseConfig::from_json(model.op, &config).expect("a config");
    // The number of rows of x is drawn as well; the cases need some rows.
    let rows = |case: &Case<'_>| case.input("x").expect("x").shape()[0];
    let mut case = (0..)
        .map(|i| vectors::case_of(config.clone(), &mut Rng::new(seed + 1000 * i)).expect("a case"))
        .find(|case| (5..100).contains(&rows(case)))
        .expect("a case of a few rows");
    case.name = format!("{name}, changed");
    case.provenance = "bug bank".to_owned();
    case
}

/// The case with activations of ordinary magnitude; generated ones have every magnitude.
pub(crate) fn ordinary(mut case: Case<'static>) -> Case<'static> {
    let x = case.input("x").expect("x");
    let (dtype, shape) = (x.dtype(), x.shape().to_vec());
    let value = |i: usize| f64_to_f16_rne(((i * 37 + i / 64 * 11) % 101) as f64 / 32.0 - 1.5);
    let values: Vec<u16> = (0..x.len()).map(value).collect();
    assert_eq!(dtype, DType::F16);
    case.add_input("x", Tensor::from_vec("x", dtype, shape, values).expect("x"));
    case
}

/// The report on one output.
pub(crate) fn report(case: &Case<'_>, output: &str) -> OutputReport {
    let report = check_case(case).expect("a report");
    report.outputs.into_iter().find(|o| o.name == output).expect("the output")
}

/// An output's elements, zero-extended.
pub(crate) fn elements(tensor: &Tensor<'_>) -> Vec<u32> {
    match tensor.dtype().bytes() {
        1 => tensor.elements::<u8>().iter().map(|&x| x.into()).collect(),
        2 => tensor.elements::<u16>().iter().map(|&x| x.into()).collect(),
        _ => tensor.elements::<u32>().into_owned(),
    }
}

/// Replaces an output by elements of its type.
pub(crate) fn set(case: &mut Case<'_>, name: &str, shape: Vec<usize>, values: &[u32]) {
    let dtype = case.output(name).expect("an output").dtype();
    let bytes: Vec<u8> =
        values.iter().flat_map(|x| x.to_le_bytes()[..dtype.bytes()].to_vec()).collect();
    case.add_output(name, Tensor::new(name, dtype, shape, bytes).expect("a tensor"));
}

/// The report on an output after `change` of its elements.
pub(crate) fn changed(
    mut case: Case<'_>,
    name: &str,
    change: impl FnOnce(Vec<u32>, &[usize]) -> Vec<u32>,
) -> OutputReport {
    let tensor = case.output(name).expect("an output").clone();
    let values = change(elements(&tensor), tensor.shape());
    set(&mut case, name, tensor.shape().to_vec(), &values);
    report(&case, name)
}

/// Column at position p of a permuted row: grouped scales.
pub(crate) fn grouped(p: usize) -> usize {
    p / 64 * 64 + p % 8 * 8 + p % 64 / 8
}

/// Column at position p of a permuted row: scales per column, biases.
pub(crate) fn single(p: usize) -> usize {
    p / 32 * 32 + 2 * (p % 32 / 8) + [0, 1, 8, 9, 16, 17, 24, 25][p % 8]
}

/// Rows with their columns permuted by an order of positions.
pub(crate) fn permuted(values: &[u32], n: usize, order: fn(usize) -> usize) -> Vec<u32> {
    values.chunks(n).flat_map(|row| (0..n).map(|p| row[order(p)])).collect()
}

/// Rows of f64 packed in one order of columns and read in another.
pub(crate) fn misread(
    values: &[f64],
    n: usize,
    packed: fn(usize) -> usize,
    read: fn(usize) -> usize,
) -> Vec<f64> {
    let mut out = values.to_vec();
    for (row, values) in out.chunks_mut(n).zip(values.chunks(n)) {
        (0..n).for_each(|p| row[read(p)] = values[packed(p)]);
    }
    out
}
