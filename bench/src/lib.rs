//! Benchmarks of the int4 path on a CPU: weights, timing, and the machine's limits. The named products
//! and layers are used on GPUs too.
//!
//! ```
//! use marlinspike_bench::Workload;
//!
//! let layer: Workload = "qwen3-30b-a3b".parse()?;
//! println!("{} multiply-accumulates for 64 tokens", layer.macs(64));
//! assert_eq!(layer.macs(64), 64 * layer.macs(1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `marlinspike bench cpu` and the comparison with other libraries (`peers`) share these modules:
//!
//! | module | contents |
//! | --- | --- |
//! | [`workload`] | products and layers by name; their multiply-accumulates |
//! | [`tile`] | weights: a few columns, repeated to fill every matrix |
//! | [`routing`] | the experts of each call |
//! | [`threads`] | pools of pinned threads |
//! | [`limits`] | bytes read per second, and multiply-accumulates per second of one instruction |
//! | [`timing`] | interleaved bursts of calls; best and median |
//! | [`ours`] | this project's product and layer as contenders |
//! | [`machine`] | names and caches |
//!
//! Weights are cold, as in a model's layers: calls alternate between more of them than the last-level
//! cache holds (see [`machine::cold_bytes`]).

pub mod limits;
pub mod machine;
pub mod ours;
pub mod routing;
pub mod threads;
pub mod tile;
pub mod timing;
pub mod workload;

pub use timing::{Contender, Seconds};
pub use workload::Workload;
