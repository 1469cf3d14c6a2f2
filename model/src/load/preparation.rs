//! Options that change the values or sizes of experts between the file and a kernel's format.

use marlinspike::formats::global_scale::W13Scale;
use marlinspike::prepare::requantize::Requantize;

/// How experts are prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preparation {
    /// FP8 experts whose w1 and w3 have one scale each: how codes are requantized to the larger
    /// scale. `None` keeps both as column scales.
    pub requantize: Option<Requantize>,
    /// Experts whose w1 and w3 have different global scales: the scale to use.
    pub w13_scale: W13Scale,
    /// Whether the sizes of gpt-oss experts are rounded up as upstream's kernel requires.
    pub padding: bool,
}

impl Preparation {
    /// Upstream's preparation on a CUDA device.
    pub const UPSTREAM: Self = Self {
        requantize: Some(Requantize::UpstreamCuda),
        w13_scale: W13Scale::First,
        padding: true,
    };
    /// Values and sizes of the file, unchanged.
    pub const AS_STORED: Self = Self { requantize: None, w13_scale: W13Scale::Own, padding: false };
}
