//! The int4 path for CPUs.
#![allow(missing_docs)]

mod check;
mod engine;
mod golden;
mod kernels;
mod layers;
mod layout;
mod linear;
mod moe;
mod pack;
mod stored;
