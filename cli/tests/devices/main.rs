//! `bench` and `warm`.
#![allow(missing_docs)]

#[cfg(feature = "bench")]
mod bench;
mod warm;

#[cfg(feature = "bench")]
#[path = "../support/mod.rs"]
mod support;
