//! Quantization configs and the checkpoints that they describe.
#![allow(missing_docs)]

mod checkpoint_errors;
mod checkpoint_errors_float;
mod checkpoint_forms;
mod checkpoint_models;
mod checkpoint_roundtrip;
mod checkpoint_upstream;
mod configs;
mod ct;
mod gptq;
mod parse;
mod pattern_engine;
mod patterns;
mod refusals;
