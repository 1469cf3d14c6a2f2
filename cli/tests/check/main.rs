//! `check`, `vectors` and `fuzz` as a user runs them.
#![allow(missing_docs)]

#[cfg(feature = "cuda")]
mod backend;
mod explorer;
#[cfg(unix)]
mod fuzz;
#[cfg(target_os = "linux")]
mod fuzz_ends;
#[cfg(unix)]
mod fuzz_laws;
mod json;
mod limits;
mod report;
mod vectors;
mod verdicts;

#[path = "../schema/mod.rs"]
mod schema;
#[path = "../support/mod.rs"]
mod support;
