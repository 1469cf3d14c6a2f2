//! Options of layers outside the int4 path.

use marlinspike::formats::mxfp8;
use marlinspike::layouts::flashinfer::Nvfp4Backend;
use marlinspike::method::Arithmetic;
use marlinspike_model::run::options::{Activations, MethodOptions};

use crate::convert::preparation::{PreparationArgs, backend};

/// How products are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ArithmeticArg {
    /// The exact sum of products of the quantized numbers, rounded once.
    Exact,
    /// The canonical schedule, whose bits the CUDA kernels give.
    Canonical,
    /// Hopper's wgmma with e4m3 (F = 13), one chain over all of k.
    Wgmma,
    /// The same, moved to f32 every 128 k.
    WgmmaPromoted,
}

impl ArithmeticArg {
    fn arithmetic(self) -> Arithmetic {
        let [exact, canonical, wgmma, promoted] = Arithmetic::NAMED.map(|(_, a)| a);
        match self {
            Self::Exact => exact,
            Self::Canonical => canonical,
            Self::Wgmma => wgmma,
            Self::WgmmaPromoted => promoted,
        }
    }
}

/// How activations enter the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ActivationsArg {
    /// As the checkpoint says; of MXFP8, whose files need not say it, 16 bits.
    #[default]
    Auto,
    /// 16 bits, as Marlin's kernels have them.
    None,
    /// MXFP8: e4m3 with a power of two for each 32 k.
    Mxfp8,
}

/// Options of these layers.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct MethodArgs {
    /// How products are added up [default: exact]. Given for an int4 layer, it runs with 16-bit
    /// activations instead of on the int4 path.
    #[arg(long, value_enum, value_name = "NAME")]
    pub arithmetic: Option<ArithmeticArg>,
    /// How activations enter the products.
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    pub activations: ActivationsArg,
    /// NVFP4: the kernel, by upstream's name, whose rule gives the activations' global scales.
    #[arg(long, default_value = "FLASHINFER_TRTLLM", value_parser = backend, value_name = "NAME")]
    pub nvfp4_backend: Nvfp4Backend,
    /// How experts' numbers are prepared.
    #[command(flatten)]
    pub preparation: PreparationArgs,
    /// Write the stages (gate_up, activated, down) to the output file too.
    #[arg(long, requires = "output")]
    pub stages: bool,
}

impl MethodArgs {
    /// How products are added up, where it is given.
    pub(super) fn arithmetic(&self) -> Option<Arithmetic> {
        self.arithmetic.map(ArithmeticArg::arithmetic)
    }

    /// The options for the library.
    pub(super) fn options(&self) -> MethodOptions {
        MethodOptions {
            activations: match self.activations {
                ActivationsArg::Auto => Activations::Checkpoint,
                ActivationsArg::None => Activations::SixteenBit,
                ActivationsArg::Mxfp8 => Activations::Block(&mxfp8::FORMAT),
            },
            backend: self.nvfp4_backend,
            preparation: self.preparation.preparation(false),
        }
    }
}
