//! Decoders: operations within their bounds, golden logits, bits in any batch, text.
#![allow(missing_docs)]

mod bounds;
mod golden;
mod gptq;
mod invariance;
mod text;

#[path = "../common/mod.rs"]
mod common;
