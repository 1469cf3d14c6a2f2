//! 4-bit linear and Mixture-of-Experts layers for [candle](candle_core), on CPUs.
//!
//! Weights are packed int4, and activations are quantized to 8 bits per row (W4A8). The layers run on
//! marlinspike's int4 path, with kernels for AVX2, AVX-512 VNNI, AMX, dotprod and i8mm, and implement
//! [`candle_core::Module`].
//! A row of the output has the same bits in any batch, with any number of threads and on every CPU.
//!
//! ```
//! use candle_core::{Device, Module, Tensor};
//! use marlinspike_candle::PackedFolder;
//!
//! # let checkpoint = marlinspike_golden::find_root()?.join("data/models/qwen3-moe-tiny");
//! # let temp = tempfile::tempdir()?;
//! # let packed = temp.path().join("packed");
//! # let format = marlinspike_model::convert::target::int4::FORMAT;
//! # let options = marlinspike_model::convert::settings::Options::new(format);
//! # marlinspike_model::convert(&checkpoint, &packed, &options, &())?;
//! // A folder that `marlinspike convert CHECKPOINT packed --to kleidiai` wrote.
//! let folder = PackedFolder::open(&packed)?;
//! let q_proj = folder.linear("model.layers.0.self_attn.q_proj")?;
//! let mlp = folder.moe_block("model.layers.0.mlp.experts")?;
//!
//! let hidden = mlp.experts().hidden_size();
//! let x = Tensor::randn(0f32, 1.0, (1, 5, hidden), &Device::Cpu)?;
//! assert_eq!(q_proj.forward(&x)?.dims(), [1, 5, q_proj.size_n()]);
//! assert_eq!(mlp.forward(&x)?.dims(), [1, 5, hidden]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | type | layer |
//! | --- | --- |
//! | [`Int4Linear`] | a linear layer with packed weights |
//! | [`MoeBlock`] | router, routed experts, shared expert |
//! | [`Int4Experts`] | routed experts, for router logits that the caller computes |
//! | [`Router`], [`SharedExpert`], [`DenseLinear`] | the block's other parts |
//! | [`PackedFolder`] | loads layers by name from mapped files |
//!
//! Weights from other sources are packed with [`marlinspike::w4a8::packed`] and wrapped with
//! [`Int4Linear::new`] and [`Int4Experts::new`].
//!
//! Layers are for inference: a backward pass through one is an error. Tensors are on the CPU; the
//! feature `cuda` adds the module `cuda`, with layers for CUDA tensors. The work runs on rayon's
//! current pool; each thread that calls a layer keeps one set of buffers, which grow with the largest
//! call.

mod block;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod experts;
mod folder;
mod linear;
mod operator;
mod shared;

pub use block::MoeBlock;
pub use error::{Error, Result};
pub use experts::{Int4Experts, Router};
pub use folder::PackedFolder;
pub use linear::{DenseLinear, Int4Linear};
pub use shared::{Projection, SharedExpert};
