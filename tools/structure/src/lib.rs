//! The structure of the workspace's product code, measured from its sources.
//!
//! The sources are parsed, never compiled. Tests (`#[cfg(test)]` items and files outside `src/`)
//! and comments do not count.
//!
//! | module | measures |
//! | --- | --- |
//! | [`source`] | the crates, their module trees, and what each module imports |
//! | [`graph`] | imports between siblings, and the cycles among them |
//! | [`size`] | lines of files and functions, parameters of functions |
//! | [`naming`] | which files name a format, a layout or an operation |
//! | [`surface`] | the public items |
//! | [`counts`] | what the house costs a newcomer, each number with its goal |
//! | [`rules`] | what ARCHITECTURE.md and `limits.txt` allow |
//! | [`wording`] | phrases that comments, strings and documents must not use |

pub mod counts;
pub mod graph;
pub mod naming;
pub mod rules;
pub mod size;
pub mod source;
pub mod surface;
mod tokens;
pub mod wording;
