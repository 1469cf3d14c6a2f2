//! `check --backend`: cases through the operations of a device or of the reference.
#![allow(missing_docs)]

mod golden;
mod sweep_of_cases;

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "the reference's own sweep uses the rest")]
#[path = "../../../reference/tests/sweep/mod.rs"]
mod sweep;
#[path = "../wrong/mod.rs"]
mod wrong;
