//! The int4 path for CPUs.
#![allow(missing_docs)]

mod bound;
mod check;
mod engine;
mod family;
mod golden;
mod int8;
mod kernels;
mod layers;
mod layout;
mod linear;
mod moe;
mod mxfp4;
mod pack;
mod stored;
mod tables;
mod torch_layer;
