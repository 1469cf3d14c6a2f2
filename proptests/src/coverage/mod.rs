//! Which law is tested with which value of which axis, on the CPU and on CUDA.
//!
//! The tests of an operation with declared axes try the rows of a covering array whose last axis is the
//! laws. [`table`] counts those rows, so it states what the tests do.

mod cuda;
mod table;

pub use cuda::{LAYOUTS, cuda_objection};
pub use table::{Cell, Line, OPERATIONS, Table, markdown, table};

use marlinspike::Result;
use marlinspike::case::{CaseConfig, Op};
use marlinspike::vectors::{self, Axes};

/// The laws of every operation.
const COMMON: [&str; 3] = [
    "equals the reference",
    "same input twice gives the same bits",
    "every byte of the output is written",
];

/// The laws of products.
const PRODUCT: [&str; 3] = [
    "a row alone is as right as among others",
    "rows in another order are as right",
    "another division of the work is as right",
];

/// The laws of layers.
const LAYER: [&str; 14] = [
    "the same input gives the same bits again",
    "every value within the bound of a known convention",
    "tokens in another order give the rows in that order",
    "a batch in two parts gives the same bits",
    "a token alone gives the bits that it has in the batch",
    "tokens without experts are zero and change nothing",
    "experts without tokens change nothing",
    "experts in another order, ids with them, change nothing",
    "the sum of tensor-parallel ranks is within the bound of the whole",
    "the sum of expert-parallel ranks is the whole",
    "a sorted g_idx is no act-order",
    "permuted rows with their g_idx and columns of x change nothing",
    "router weights times two give y times two",
    "the batched form gives the bits of the flat one",
];

/// The law of cases.
const CASE: [&str; 1] = ["a row is the same alone as in a batch"];

/// The laws that the kit tests on an operation, by name.
pub fn laws(op: Op) -> Vec<&'static str> {
    let own: &[&str] = match op {
        Op::Moe => &LAYER,
        Op::Linear => &PRODUCT,
        Op::Router | Op::Align | Op::Preprocess => &[],
        _ => &CASE,
    };
    COMMON.iter().chain(own).copied().collect()
}

/// A row of the covering array of an operation's axes and laws.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// A value of each axis.
    pub values: Vec<usize>,
    /// The law.
    pub law: usize,
}

/// The covering array: every legal combination of `strength` values and laws is in a row.
pub fn rows(axes: &Axes, laws: &[&str], strength: usize) -> Vec<Row> {
    let all = axes.clone().and("law", laws.iter().map(|&law| law.to_owned()).collect());
    let row = |mut values: Vec<usize>| {
        let law = values.pop().unwrap_or_default();
        Row { values, law }
    };
    all.cover(strength).into_iter().map(row).collect()
}

/// The axes of an operation as far as the inputs of its laws have them.
///
/// # Errors
/// None.
pub fn axes(op: Op) -> Result<Option<Axes>> {
    let axes = vectors::axes(op)?;
    if op != Op::Moe {
        return Ok(axes);
    }
    let why = "the laws' layers have a row of x for each token; generated cases test the value";
    let is_on_x = |c: &CaseConfig| matches!(c, CaseConfig::Moe(c) if c.rules.router_weight_on_x);
    Ok(axes.map(|axes| axes.and_illegal(why, &["router_weight_on"], is_on_x)))
}

/// The axes of an operation as far as the CUDA kernels take its configurations.
pub fn axes_on_cuda(op: Op, axes: Axes) -> Axes {
    match cuda::deciding_axes(op) {
        Some(names) => {
            axes.and_illegal("no CUDA kernel", names, |config| cuda_objection(config).is_some())
        }
        None => axes,
    }
}
