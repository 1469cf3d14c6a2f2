//! Bugs that shipped, in the order of the bank.

use crate::{Run, layers, layouts, products};

pub(crate) fn runs() -> Vec<Run> {
    let mut runs = Vec::new();
    runs.extend(products::runs());
    runs.extend(layouts::runs());
    runs.extend(layers::runs());
    let number = |run: &Run| run.bug.parse::<usize>().expect("a number");
    runs.sort_by_key(number);
    runs
}
