//! The int4 path next to other libraries: compared in speed with candle's and ggml's own 4-bit
//! products.
//!
//! | module | knows |
//! | --- | --- |
//! | [`candle`] | candle's Q4_K product, to be timed |
//! | [`ggml`] | ggml's products and layers, where it was built in |
//! | [`mxfp4`] | this project's layer with MXFP4 weights |
//! | [`compare`] | one race per case, and how far results are apart |

pub mod candle;
pub mod compare;
pub mod ggml;
pub mod mxfp4;
