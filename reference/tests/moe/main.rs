//! The MoE block: routing, activations, layers, sums.
#![allow(missing_docs)]

mod activation;
mod activation_check;
mod activation_golden;
mod activation_math;
mod activation_widths;
mod batched;
mod block;
mod block_forms;
mod block_stages;
mod families;
mod fp8_layer;
mod golden;
mod known_schedules;
mod layer;
mod layer_stages;
mod norm_bound;
mod nvfp4_moe;
mod operands_applied;
mod router;
mod router_bound;
mod sum;
mod sum_orders;

#[path = "../layouts/blackwell/mod.rs"]
mod blackwell;
