//! Model folders: `inspect`, `convert`, `run` and `generate` as a user runs them.
#![allow(missing_docs)]

#[cfg(unix)]
mod convert_folder;
mod convert_hashes;
mod convert_input_dtype;
mod families;
mod fp8_blocks;
#[cfg(feature = "generate")]
mod generate;
#[cfg(all(feature = "generate", target_os = "linux"))]
mod generate_limits;
mod inspect;
mod int8;
mod methods;
mod run;

#[path = "../../../model/tests/common/mod.rs"]
mod common;
#[path = "../support/mod.rs"]
mod support;
