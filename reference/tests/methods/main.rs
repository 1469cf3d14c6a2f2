//! Layers of a method: parameters, slices, selection and preparation.
#![allow(missing_docs)]

mod int4_rows;
mod int8;
mod int8_experts;
mod layers_slices;
mod layers_upstream;
mod method;
mod mxfp8;
mod prepare_fp8;
mod prepare_gpt_oss;
mod prepare_marlin;
mod prepare_requantize;
mod select_cuda;
mod select_marlin;
mod select_moe_backend;
mod select_release;
mod w4a8_fp8;
