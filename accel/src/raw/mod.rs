//! The crate's only unsafe code: foreign libraries and kernel launches, each behind a function
//! that is safe to call because its arguments are types that can only hold valid values.
#![allow(unsafe_code)]

use std::error::Error as _;

use cudarc::driver::{DriverError, LaunchArgs, LaunchConfig, PushKernelArg};

use crate::{
    error::AccelError,
    memory::{Buffer, Element},
};

pub(crate) mod driver;
pub(crate) mod gemm;
pub(crate) mod gemm_a8;
pub(crate) mod gemm_many;
pub(crate) mod launch;
pub(crate) mod layout;
pub(crate) mod limits;
pub(crate) mod moe;
pub(crate) mod nvrtc;
pub(crate) mod quantize;
pub(crate) mod stream;

/// A grid of at least `elements` threads, of which there are at most 2^38.
fn one_thread_each(elements: u64) -> LaunchConfig {
    let blocks = u32::try_from(elements.div_ceil(256)).unwrap_or(u32::MAX);
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 }
}

/// How a launch ended, as this crate's error.
fn ended<T>(name: &'static str, launched: Result<T, DriverError>) -> Result<(), AccelError> {
    launched.map(drop).map_err(|error| AccelError::Driver { call: name, reason: error.to_string() })
}

/// The pointer that a kernel takes where a buffer is absent.
static NULL: u64 = 0;

/// Adds a buffer, or the null pointer, to a launch's arguments.
fn optional<'a, T: Element>(builder: &mut LaunchArgs<'a>, buffer: Option<&'a Buffer<T>>) {
    match buffer {
        Some(buffer) => builder.arg(buffer.slice()),
        None => builder.arg(&NULL),
    };
}

/// The loader's own words, which libloading keeps as the error's source.
fn words(error: &libloading::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
