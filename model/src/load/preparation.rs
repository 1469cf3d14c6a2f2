//! Choices where experts' numbers change between the file and a kernel's format, or may.

use marlinspike::formats::global_scale::W13Scale;
use marlinspike::prepare::requantize::Requantize;

/// How experts are prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preparation {
    /// FP8 experts with one scale for w1 and one for w3: how codes go to the larger of the two.
    /// Absent: each keeps its own, as scales of columns.
    pub requantize: Option<Requantize>,
    /// Experts whose w1 and w3 have global scales that differ.
    pub w13_scale: W13Scale,
    /// Whether gpt-oss's sizes are rounded up as upstream's kernel wants them.
    pub padding: bool,
}

impl Preparation {
    /// As upstream prepares experts on a CUDA device.
    pub const UPSTREAM: Self = Self {
        requantize: Some(Requantize::UpstreamCuda),
        w13_scale: W13Scale::First,
        padding: true,
    };
    /// Numbers and sizes as the file has them.
    pub const AS_STORED: Self = Self { requantize: None, w13_scale: W13Scale::Own, padding: false };
}
