//! A bit-exact reference, in pure Rust, of the Marlin family of quantized linear and
//! Mixture-of-Experts kernels.
//!
//! ```
//! use marlinspike::{Generator, Op, Tensor, Verdict, check_case};
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
//! The items at the root serve most users; `examples/` has a program for each purpose:
//!
//! | to | root | example |
//! | --- | --- | --- |
//! | check a kernel's outputs | [`Case`], [`Op`], [`check_case`], [`CaseReport`], [`Verdict`] | `check` |
//! | draw inputs with their right outputs | [`Generator`] | `check`, `moe` |
//! | pack a weight for Marlin, and read it back | [`Weight`], [`pack_marlin`], [`MarlinOptions`], [`MarlinMatrix`] | `pack` |
//! | name types, sizes, tensors and orders of additions | [`ScalarType`], [`GroupSize`], [`Shape`], [`Tensor`], [`Schedule`] | `int4_layer` |
//!
//! Data enters in three ways: untrusted bytes ([`formats`]), floats ([`quantize`]) and generated
//! values ([`vectors`]). All of them produce a [`weight::Weight`], which a layout ([`layouts`])
//! packs for a kernel. Formats and layouts do not depend on each other. There is no I/O beyond bytes
//! in memory.
//!
//! | module | contents |
//! | --- | --- |
//! | [`num`] | number formats and their roundings, `LogicalK` and `PackedK`, intervals, named typed tensors |
//! | [`container`] | safetensors, read defensively |
//! | [`bounded_json`] | JSON of untrusted files within a stated amount of memory |
//! | [`weight`] | the hub: codes, scales, zeros, group map |
//! | [`formats`] | bytes to weight, one file per format |
//! | [`config`] | quantization configs as found in model folders |
//! | [`layers`] | parameter names, shapes and dtypes per rank and layer kind; sharding |
//! | [`act_order`] | sorting `g_idx`, permuting, tensor-parallel slices |
//! | [`layouts`] | kernel formats as objects: offset, pack, unpack, compare, locate |
//! | [`products`] | products: exact, bounded, scheduled; matrix units emulated bit for bit |
//! | [`moe`] | routing, activations, the sum over top-k; bounds on other kernels' results |
//! | [`method`] | layers as a checkpoint's method runs them: activations quantized, products exact or scheduled |
//! | [`select`] | (layer, capability) to backend, with the reason for each refusal |
//! | [`case`] | case files: inputs, configuration and outputs of one operation |
//! | [`check`] | the verdict on a case, with the first mismatch and its diagnosis |
//! | [`panics`] | panics as errors of one case |
//! | [`prepare`] | experts between file and kernel: requantized, reordered, padded |
//! | [`quantize`] | floats to codes and scales |
//! | [`schema`] | config keys and tensors of each operation, from the code that reads them |
//! | [`vectors`] | deterministic case files from a seed |
//! | [`w4a8`] | the CPU paths with int8 activations: products and layers of int4, MXFP4 and int8 weights |

pub mod act_order;
pub mod bounded_json;
pub mod case;
pub mod check;
pub mod config;
pub mod container;
mod dtype;
pub mod error;
pub mod formats;
mod judge;
pub mod layers;
pub mod layouts;
pub mod method;
pub mod moe;
mod named;
pub mod num;
mod ops;
pub mod panics;
pub mod prepare;
pub mod products;
pub mod quantize;
pub mod schema;
pub mod select;
pub mod vectors;
pub mod w4a8;
pub mod weight;

pub use case::{Case, Op};
pub use check::{CaseReport, Verdict, check_case};
pub use error::{Error, ModuleError, Result};
pub use layouts::marlin::{
    Options as MarlinOptions, Stored as MarlinMatrix, prepare as pack_marlin,
};
pub use num::dims::{GroupSize, Shape};
pub use num::scalar::ScalarType;
pub use num::tensor::Tensor;
pub use products::schedule::Schedule;
pub use vectors::Generator;
pub use weight::Weight;
#[cfg(all(test, emulated))]
extern crate self as marlinspike;
#[cfg(all(test, emulated))]
#[path = "../tests/emulated/mod.rs"]
mod emulated;

// The arrays and the 16-bit floats of the public functions.
pub use {half, ndarray};
