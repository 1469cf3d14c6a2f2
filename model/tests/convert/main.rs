//! Conversion of model folders.
#![allow(missing_docs)]

mod blocks;
mod contradictions;
mod corpus;
mod device;
mod families;
mod faults;
mod formats;
mod index;
mod int8_folders;
mod kleidi;
mod kleidi_tables;
mod mxfp4;
mod projections;
mod published;
mod quantized_blocks;
mod quantized_router;
mod ranks;
mod runs;
mod scale_groups;
mod shared_ranks;

#[path = "../common/mod.rs"]
mod common;
