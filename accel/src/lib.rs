//! The CUDA side, loaded dynamically: builds on every machine, and on one without a GPU every
//! entry point returns an error that says what is missing.
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
//! | [`backend`] | cases through the operations, judged |
//! | [`device`] | [`Device`]: one GPU, and the modules loaded on it |
//! | [`limits`] | what a device can read and multiply at most |
//! | [`memory`] | [`Buffer`]: elements in a device's memory |
//! | [`cache`] | compiled modules on disk |
//! | [`call`] | [`call::Call`]: an operation on host memory, by a device and by the reference |
//! | [`nvrtc`] | [`nvrtc::Nvrtc`]: run-time compilation; needs no GPU |
//! | [`operation`] | what an operation is: source, needs, law, arguments, wrong kernels |
//! | [`ops`] | one file per launched operation |
//! | [`mod@registry`] | one row per operation: its source, needs and law |
//! | [`mod@warm`] | filling the cache of compiled modules ahead of use |
//! | [`workload`] | products and layers to be timed, on weights that have left the caches |
//! | [`timing`] | recorded launches, and how long the device takes for them |
//!
//! A new kernel is one `.cu` file and its name in `marlinspike-kernels`, one file in [`ops`], and one line in
//! [`mod@registry`].

pub mod backend;
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
