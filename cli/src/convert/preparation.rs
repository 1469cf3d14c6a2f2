//! Options that `convert` and `run` share: how experts' numbers are prepared.

use marlinspike::formats::global_scale::W13Scale;
use marlinspike::prepare::requantize::Requantize;
use marlinspike_model::load::preparation::Preparation;

/// `--requantize`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum RequantizeArg {
    /// No requantization: w1 and w3 keep their scales.
    Own,
    /// The nearest code, rounded once.
    Exact,
    /// Through float16, scale included, as upstream does on a GPU.
    #[default]
    UpstreamCuda,
    /// Through float16, as upstream does on a CPU.
    UpstreamCpu,
}

impl RequantizeArg {
    /// The rule; `None` for [`RequantizeArg::Own`].
    pub const fn rule(self) -> Option<Requantize> {
        match self {
            Self::Own => None,
            Self::Exact => Some(Requantize::Exact),
            Self::UpstreamCuda => Some(Requantize::UpstreamCuda),
            Self::UpstreamCpu => Some(Requantize::UpstreamCpu),
        }
    }
}

/// `--w13-scale`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum W13ScaleArg {
    /// The scale of w1 for both, as upstream; a warning names experts whose w3 has another scale.
    #[default]
    First,
    /// Each keeps its own scale.
    Own,
}

/// Options that `convert` and `run` share.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct PreparationArgs {
    /// FP8 experts whose w1 and w3 have one scale each: how codes are requantized to the larger
    /// scale.
    #[arg(long, value_enum, default_value_t, value_name = "RULE")]
    pub requantize: RequantizeArg,
    /// NVFP4 experts: the global scale of w1 and w3 if the file has two.
    #[arg(long, value_enum, default_value_t, value_name = "WHICH")]
    pub w13_scale: W13ScaleArg,
}

impl PreparationArgs {
    /// The library's options, with or without padding.
    pub const fn preparation(self, padding: bool) -> Preparation {
        let w13_scale = match self.w13_scale {
            W13ScaleArg::First => W13Scale::First,
            W13ScaleArg::Own => W13Scale::Own,
        };
        Preparation { requantize: self.requantize.rule(), w13_scale, padding }
    }
}
