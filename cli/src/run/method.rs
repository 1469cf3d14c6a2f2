//! Options of layers outside the int4 path.

use marlinspike::formats::mxfp8;
use marlinspike::method::Arithmetic;
use marlinspike::quantize::Fp8GroupRule;
use marlinspike_model::run::options::{Activations, MethodOptions, Nvfp4Backend};

use crate::convert::preparation::PreparationArgs;

/// Order and precision in which products are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ArithmeticArg {
    /// The exact sum of the products of quantized values, rounded once.
    Exact,
    /// The canonical schedule, which the CUDA kernels follow bit for bit.
    Canonical,
    /// int8 by int8: int32 sums, then f32 steps as in CUTLASS's epilogue.
    Cutlass,
    /// MXFP8 by MXFP8: Blackwell's block-scaled instruction, as reported by MMA-Sim.
    Tcgen05,
    /// Hopper's wgmma with e4m3 (F = 13), one chain over all of k.
    Wgmma,
    /// wgmma, promoted to f32 every 128 k.
    WgmmaPromoted,
}

impl ArithmeticArg {
    fn arithmetic(self) -> Arithmetic {
        let [exact, canonical, cutlass, tcgen05, wgmma, promoted] =
            Arithmetic::NAMED.map(|(_, a)| a);
        match self {
            Self::Exact => exact,
            Self::Canonical => canonical,
            Self::Cutlass => cutlass,
            Self::Tcgen05 => tcgen05,
            Self::Wgmma => wgmma,
            Self::WgmmaPromoted => promoted,
        }
    }
}

/// Type of the activations in the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ActivationsArg {
    /// As the checkpoint states; 16 bits for MXFP8 checkpoints that state nothing.
    #[default]
    Auto,
    /// 16 bits, as in Marlin's kernels.
    None,
    /// MXFP8: e4m3 with a power-of-two scale for each 32 k.
    Mxfp8,
}

/// Options of these layers.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct MethodArgs {
    /// Order and precision in which products are summed [default: exact]. With this option an int4
    /// layer runs with 16-bit activations instead of on the int4 path.
    #[arg(long, value_enum, value_name = "NAME")]
    pub arithmetic: Option<ArithmeticArg>,
    /// Type of the activations in the products.
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    pub activations: ActivationsArg,
    /// NVFP4: upstream's name of the kernel whose rule gives the global scales of the activations.
    #[arg(long, default_value = Nvfp4Backend::NAMES[0], value_parser = backend, value_name = "NAME")]
    pub nvfp4_backend: Nvfp4Backend,
    /// FP8 blocks: how each group of 128 activations is quantized. `quotient` is vLLM's CUDA
    /// operator, `reciprocal` its Triton kernel, `deep_gemm` DeepGEMM's own function.
    #[arg(long, default_value = Fp8GroupRule::NAMED[0].0, value_parser = rule, value_name = "RULE")]
    pub group_rule: Fp8GroupRule,
    /// How experts are prepared.
    #[command(flatten)]
    pub preparation: PreparationArgs,
    /// Also write the stages (gate_up, activated, down) to the output file.
    #[arg(long, requires = "output")]
    pub stages: bool,
}

impl MethodArgs {
    /// Order and precision in which products are summed; `None` if the option is absent.
    pub(super) fn arithmetic(&self) -> Option<Arithmetic> {
        self.arithmetic.map(ArithmeticArg::arithmetic)
    }

    /// The options of the library.
    pub(super) fn options(&self) -> MethodOptions {
        MethodOptions {
            activations: match self.activations {
                ActivationsArg::Auto => Activations::Checkpoint,
                ActivationsArg::None => Activations::SixteenBit,
                ActivationsArg::Mxfp8 => Activations::Block(&mxfp8::FORMAT),
            },
            backend: self.nvfp4_backend,
            group_rule: self.group_rule,
            preparation: self.preparation.preparation(false),
        }
    }
}

/// Parses the name of a rule.
fn rule(name: &str) -> Result<Fp8GroupRule, String> {
    let found = Fp8GroupRule::NAMED.iter().find(|(n, _)| *n == name);
    found.map(|(_, rule)| *rule).ok_or_else(|| {
        let names: Vec<_> = Fp8GroupRule::NAMED.iter().map(|(n, _)| *n).collect();
        format!("found {name:?}, expected one of {}", names.join(", "))
    })
}

/// Parses upstream's name of a backend.
fn backend(name: &str) -> Result<Nvfp4Backend, String> {
    let found = Nvfp4Backend::NAMED.iter().find(|(n, _)| *n == name);
    found.map(|(_, backend)| *backend).ok_or_else(|| {
        let names: Vec<_> = Nvfp4Backend::NAMED.iter().map(|(n, _)| *n).collect();
        format!("found {name:?}, expected one of {}", names.join(", "))
    })
}
