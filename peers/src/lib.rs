//! The int4 path next to other libraries: as operators on candle's tensors, and compared in speed
//! with candle's and ggml's own 4-bit products.
//!
//! | module | knows |
//! | --- | --- |
//! | [`op`] | `candle_core::CustomOp1` and `CustomOp2` over the product and the layer |
//! | [`candle`] | candle's Q4_K product, to be timed |
//! | [`ggml`] | ggml's Q4_0 product and layer, where it was built in |
//! | [`compare`] | one race per case, and how far results are apart |

pub mod candle;
pub mod compare;
pub mod ggml;
pub mod op;
