//! Benchmarks: what is computed, on a GPU too; and of the int4 path on a CPU, on which weights, how it
//! is timed, and what the machine could do at most.
//!
//! The program's `bench cpu` and the comparison with other libraries measure with the same parts:
//!
//! | module | knows |
//! | --- | --- |
//! | [`workload`] | products and layers by name; their multiply-accumulates |
//! | [`tile`] | weights: some columns, repeated until there are enough of them |
//! | [`routing`] | which experts a call takes |
//! | [`threads`] | pools of pinned threads |
//! | [`limits`] | bytes read and multiply-accumulates per second, of one instruction |
//! | [`timing`] | interleaved bursts of calls; best and median |
//! | [`ours`] | this project's product and layer, as something to time |
//! | [`machine`] | names and caches |
//!
//! Weights are cold: calls take turns over more of them than the last-level cache holds (see
//! [`machine::cold_bytes`]), as the layers of a model do.

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
