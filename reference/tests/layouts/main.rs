//! Layouts and quantizers.
#![allow(missing_docs)]

mod bijection;
mod blackwell;
mod blockscale;
mod e4m3;
mod fp8_blocks;
mod lattice;
mod positions;
mod quantize_act_order;
mod quantize_upstream;
mod restore;
mod trtllm;
mod trtllm_routing;
mod trtllm_rows;
