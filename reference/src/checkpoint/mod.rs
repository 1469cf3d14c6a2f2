//! Checkpoint bytes to [`crate::weight::Weight`], one file per format.

mod values;

pub(crate) use values::unflatten;
pub use values::{expect_finite, float_type};
pub mod awq;
pub fn transpose_words(words: &[u32], rows: usize) -> Vec<u32> {
    let cols = words.len() / rows;
    (0..cols).flat_map(|c| (0..rows).map(move |r| words[r * cols + c])).collect()
}
