//! Steps that prepare a checkpoint's FP8 and MXFP4 experts for a kernel: the part of upstream's
//! `process_weights_after_loading` that changes codes, scales or sizes before any kernel layout.
//!
//! | step | file |
//! | --- | --- |
//! | one scale for w1 and w3, codes requantized to it | [`requantize`] |
//! | e4m3fn to e4m3fnuz | [`fnuz`] |
//! | all steps of W8A8-FP8 experts | [`fp8`] |
//! | gate and up interleaved or in halves | [`gate_up`] |
//! | int4 with e4m3 activations: e4m3 codes | [`w4a8_fp8`] |
//! | sizes rounded up for a kernel, padded with zeros | [`pad`] |
//! | a rank's part of gpt-oss's experts, its order and its padding | [`padded_shard`] |

pub mod fnuz;
pub mod fp8;
pub mod gate_up;
pub mod pad;
pub mod padded_shard;
pub mod requantize;
pub mod w4a8_fp8;
