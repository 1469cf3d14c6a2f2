//! Options that change the values or sizes of experts between the file and a kernel's format.

use marlinspike::formats::global_scale::W13Scale;
use marlinspike::prepare::requantize::Requantize;
use serde_json::{Value, json};

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

    /// The options by name, for manifests. Conversions continue only with equal text, so it states
    /// every option and changes with nothing else.
    pub(crate) fn json(&self) -> Value {
        let Self { requantize, w13_scale, padding } = self;
        let requantize = match requantize {
            None => "own",
            Some(Requantize::Exact) => "exact",
            Some(Requantize::UpstreamCuda) => "upstream-cuda",
            Some(Requantize::UpstreamCpu) => "upstream-cpu",
        };
        let w13_scale = match w13_scale {
            W13Scale::First => "first",
            W13Scale::Own => "own",
        };
        json!({"requantize": requantize, "w13_scale": w13_scale, "padding": padding})
    }
}
