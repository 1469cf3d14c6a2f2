//! Case files: the container, keys, operations, test vectors.
#![allow(missing_docs)]

mod container_hostile;
mod container_roundtrip;
mod format;
mod ops;
mod schema;
mod vectors;
