//! (Layer, capability) to backend, with the reason for each refusal.
//!
//! Capability is plain data, so any device can be asked about anywhere. Facts follow vLLM
//! 0.21.0 `utils/marlin_utils.py`, `fused_moe/oracle/int_wna16.py`, `experts/marlin_moe.py`.

mod capability;
mod marlin;

pub use capability::{Capability, Platform};
pub use marlin::{
    MARLIN_GROUP_SIZES, MarlinRefusal, check_marlin_supported, check_marlin_supports_shape,
    check_moe_marlin_supports_layer, marlin_weight_types,
};
