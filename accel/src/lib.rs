//! CUDA kernels for quantized linear and Mixture-of-Experts layers. Their outputs equal the
//! reference's bit for bit. The driver and NVRTC are loaded at run time: the crate builds on every
//! machine, and without a GPU every entry point returns an error that says what is missing.
//!
//! ```
//! use marlinspike_accel::{Device, registry};
//!
//! // The operations are known on every machine.
//! assert!(registry().iter().any(|row| row.name == "gptq_marlin_repack"));
//! match Device::open() {
//!     Ok(device) => println!("{}", device.name()),
//!     Err(error) => println!("no GPU here: {error}"),
//! }
//! ```
//!
//! | module | holds |
//! | --- | --- |
//! | [`backend`] | runs cases on a device and checks the outputs |
//! | [`borrowed`] | streams and memory of another library |
//! | [`device`] | [`Device`]: one GPU, and the modules loaded on it |
//! | [`limits`] | measured bandwidth and matrix throughput of a device |
//! | [`memory`] | [`Buffer`]: elements in a device's memory |
//! | [`cache`] | compiled modules on disk |
//! | [`call`] | [`call::Call`]: an operation on host memory, run by a device or the reference |
//! | [`nvrtc`] | [`nvrtc::Nvrtc`]: run-time compilation; needs no GPU |
//! | [`operation`] | the definition of an operation: source, required device, [`operation::Law`], arguments, mutants |
//! | [`ops`] | one file per launched operation |
//! | [`mod@registry`] | one row per operation, with its definition |
//! | [`mod@warm`] | filling the cache of compiled modules ahead of use |
//! | [`workload`] | products and layers for timing, on weights that are not in the caches |
//! | [`timing`] | recorded launches, and their times on the device |
//!
//! A new kernel is one `.cu` file and its name in `marlinspike-kernels`, one file in [`ops`], and one line in
//! [`mod@registry`].

pub mod backend;
pub mod borrowed;
pub mod cache;
pub mod call;
pub mod device;
pub mod error;
mod launch;
pub mod limits;
pub mod memory;
pub mod nvrtc;
pub mod operation;
pub mod ops;
mod parameters;
mod raw;
pub mod registry;
pub mod timing;
pub mod warm;
pub mod workload;

pub use device::Device;
pub use error::AccelError;
pub use memory::Buffer;
pub use registry::registry;
