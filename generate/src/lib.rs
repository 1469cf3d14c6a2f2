//! Text from quantized Mixture-of-Experts models on a CPU.
//!
//! [`Decoder`] runs Qwen3-MoE, Mixtral, DeepSeek-V3, DeepSeek-V2 and gpt-oss models
//! ([`config::ARCHITECTURES`]). 4-bit layers run on the int4 path ([`marlinspike::w4a8`]), from a
//! folder of `marlinspike convert --to kleidiai`, which is mapped, or from a 4-bit checkpoint, which
//! is packed first. gpt-oss's MXFP4 experts are multiplied by int8 activations if they are read from
//! such a folder, and by f32 activations if they are read from the checkpoint. Everything else is f32
//! with one order of additions ([`ops`]). A sequence's logits therefore have the same bits for any
//! number of threads, any batch, any split of the prompt, and every CPU.
//!
//! ```
//! use marlinspike_generate::{Decoder, Input, LogitsOf};
//! use marlinspike_model::model::{Model, ModelFiles};
//!
//! # let golden = marlinspike_golden::find_root()?;
//! # let folder = golden.join("data/models/qwen3-moe-tiny");
//! let files = ModelFiles::open(&folder)?;
//! let decoder = Decoder::load(&Model::new(&files)?, u64::MAX)?;
//! let mut cache = decoder.cache(32, u64::MAX)?;
//! let mut inputs = [Input { tokens: &[17, 4, 200], cache: &mut cache }];
//! let logits = decoder.forward(&mut inputs, LogitsOf::Last)?;
//! assert_eq!(logits.len(), decoder.config().vocab_size);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attention;
mod block;
mod cache;
pub mod config;
mod decoder;
mod error;
pub mod ops;
pub mod run;
pub mod sample;
#[cfg(feature = "text")]
pub mod text;
mod weights;

pub use attention::Input;
pub use cache::Cache;
pub use decoder::{Decoder, LogitsOf};
pub use error::{GenerateError, Result};
