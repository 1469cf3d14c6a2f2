//! Unsafe code for foreign libraries. The only other unsafe code is in [`launch`](crate::launch) and, for callers that
//! lend streams and memory, in [`borrowed`](crate::borrowed).
#![allow(unsafe_code)]

use std::error::Error as _;

pub(crate) mod driver;
pub(crate) mod nccl;
pub(crate) mod nvrtc;
pub(crate) mod peers;
pub(crate) mod scratch;
pub(crate) mod stream;

/// The loader's message, which libloading keeps as the error's source.
fn words(error: &libloading::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
