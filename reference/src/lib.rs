//! The definition: a bit-exact, pure-Rust reference of the Marlin family of quantized
//! Mixture-of-Experts kernel formats.
//!
//! ```
//! use marlinspike::case::Op;
//! use marlinspike::check::{Verdict, check_case};
//! use marlinspike::tensor::Tensor;
//! use marlinspike::vectors::Generator;
//!
//! // The inputs and outputs of one linear layer with quantized weights.
//! let mut case = Generator::new(Op::Linear, 1)?.case(0)?;
//! assert_eq!(check_case(&case)?.verdict, Verdict::Pass);
//!
//! // Flip one bit of the packed weights: the check fails, and says where.
//! let packed = &case.outputs["marlin_qweight"];
//! let (dtype, shape) = (packed.dtype(), packed.shape().to_vec());
//! let mut words = packed.elements::<u32>().into_owned();
//! words[7] ^= 1;
//! case.add_output("marlin_qweight", Tensor::from_vec("marlin_qweight", dtype, shape, words)?);
//!
//! let report = check_case(&case)?;
//! assert_eq!(report.verdict, Verdict::Fail);
//! let wrong = report.outputs.iter().find(|output| output.name == "marlin_qweight").unwrap();
//! assert_eq!(wrong.mismatches, 1);
//! println!("{:?}", wrong.first_mismatch);
//! # Ok::<(), marlinspike::Error>(())
//! ```
//!
//! Data enters at three doors ([`checkpoint`]: untrusted bytes, [`quantize`]: floats,
//! [`vectors`]: generated), becomes a [`weight::Weight`], and leaves through a layout
//! ([`layout`]). Formats and layouts never see each other. There is no I/O here but bytes.
//!
//! | module | knows |
//! | --- | --- |
//! | [`scalar`] | number formats, their ids, every rounding |
//! | [`dims`] | `LogicalK`, `PackedK`, `GroupSize`: a mix-up is a type error |
//! | [`tensor`] | named, typed, shaped bytes |
//! | [`container`] | safetensors, read defensively |
//! | [`bounded_json`] | JSON of untrusted files within a stated memory |
//! | [`weight`] | the hub: codes, scales, zeros, group map |
//! | [`checkpoint`] | bytes to weight, one file per format |
//! | [`config`] | quantization configs as found in model folders |
//! | [`layers`] | parameter names, shapes and dtypes per rank and layer kind; sharding |
//! | [`act_order`] | sorting `g_idx`, permuting, tensor-parallel slices |
//! | [`layout`] | kernel formats as objects: offset, pack, unpack, compare, locate |
//! | [`gemm`] | matrix units emulated bit for bit |
//! | [`interval`] | what an implementation may produce, followed through its operations |
//! | [`moe`] | routing, activations, the sum over top-k; bounds on others' results |
//! | [`method`] | layers as a checkpoint's method runs them: activations quantized, products exact or scheduled |
//! | [`select`] | (layer, capability) to backend, with the reason for each refusal |
//! | [`case`] | case files: inputs, configuration and outputs of one operation |
//! | [`check`] | the verdict on a case, with the first mismatch and its diagnosis |
//! | [`panics`] | panics as errors of one case |
//! | [`prepare`] | experts between file and kernel: requantized, reordered, padded |
//! | [`quantize`] | floats to codes and scales |
//! | [`vectors`] | deterministic case files from a seed |
//! | [`w4a8`] | the Arm int4 path: activations quantized per row, its product and layer |

pub mod act_order;
pub mod bounded_json;
pub mod case;
pub mod check;
pub mod checkpoint;
pub mod config;
pub mod container;
pub mod dims;
mod dtype;
pub mod error;
pub mod gemm;
pub mod interval;
mod judge;
pub mod layers;
pub mod layout;
pub mod method;
pub mod moe;
mod named;
mod ops;
pub mod panics;
pub mod prepare;
pub mod quantize;
pub mod scalar;
pub mod select;
pub mod tensor;
pub mod vectors;
pub mod w4a8;
pub mod weight;

pub use error::{Error, ModuleError, Result};
