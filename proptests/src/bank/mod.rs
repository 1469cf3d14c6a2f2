//! The bug bank: bugs that shipped, or were proposed, as wrong kernels. A campaign must reject each.
//!
//! One row of [`bugs`] for each bug: where it was seen, the operation and the configurations that it
//! concerns, and a function that computes its wrong outputs, mostly by the reference on changed
//! inputs. Bugs of one format are in the file of its operations.
//! `cargo run -p marlinspike-proptests --example bug_bank` writes the table of the
//! documentation.

mod layers;
mod measure;
mod methods;
mod products;
mod races;
mod routing;
mod scales;
mod table;

pub use measure::{CASES, Measured, SEEDS, measure, on_all_cores};
pub use table::{Row, fixed, line, markdown, row, row_of};

pub use crate::bug::{Bug, Wrong, right};
use crate::ops;

/// The bank, in the order of its numbers: 31 bugs of published kernels and loaders, and 21 more.
pub fn bugs() -> Vec<Bug> {
    let matrices = [scales::bugs(), products::bugs(), races::bugs()].concat();
    let layers = [layers::bugs(), routing::bugs(), methods::bugs()].concat();
    let mut all = [matrices, layers, ops::bugs()].concat();
    all.sort_by_key(|bug| bug.number);
    all
}
