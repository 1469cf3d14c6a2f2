//! The crate's only unsafe code: foreign libraries and kernel launches, each behind a function
//! that is safe to call because its arguments are types that can only hold valid values.
#![allow(unsafe_code)]

use std::error::Error as _;

pub(crate) mod driver;
pub(crate) mod nvrtc;
pub(crate) mod repack;

/// The loader's own words, which libloading keeps as the error's source.
fn words(error: &libloading::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
