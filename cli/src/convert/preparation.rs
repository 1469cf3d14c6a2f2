//! The options that `convert` and `run` share: how experts' numbers are prepared.

use marlinspike::formats::global_scale::W13Scale;
use marlinspike::layouts::flashinfer::Nvfp4Backend;
use marlinspike::prepare::requantize::Requantize;
use marlinspike_model::load::preparation::Preparation;

/// `--requantize`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum RequantizeArg {
    /// Not at all: w1 and w3 keep their scales.
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
    /// The rule, absent for [`RequantizeArg::Own`].
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
    /// w1's for both, as upstream takes it; a warning says where w3's is another.
    #[default]
    First,
    /// Each its own.
    Own,
}

/// The options that `convert` and `run` share.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct PreparationArgs {
    /// FP8 experts with one scale for w1 and one for w3: how codes go to the larger scale.
    #[arg(long, value_enum, default_value_t, value_name = "RULE")]
    pub requantize: RequantizeArg,
    /// NVFP4 experts: whose global scale w1 and w3 have where the file has two.
    #[arg(long, value_enum, default_value_t, value_name = "WHICH")]
    pub w13_scale: W13ScaleArg,
}

impl PreparationArgs {
    /// The choices, with or without padding.
    pub const fn preparation(self, padding: bool) -> Preparation {
        let w13_scale = match self.w13_scale {
            W13ScaleArg::First => W13Scale::First,
            W13ScaleArg::Own => W13Scale::Own,
        };
        Preparation { requantize: self.requantize.rule(), w13_scale, padding }
    }
}

/// A backend by upstream's name.
pub(crate) fn backend(name: &str) -> Result<Nvfp4Backend, String> {
    let found = Nvfp4Backend::NAMED.iter().find(|(n, _)| *n == name);
    found.map(|(_, backend)| *backend).ok_or_else(|| {
        let names: Vec<_> = Nvfp4Backend::NAMED.iter().map(|(n, _)| *n).collect();
        format!("found {name:?}, expected one of {}", names.join(", "))
    })
}
