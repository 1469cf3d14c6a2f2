//! Options of layers outside the int4 path.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use marlinspike::formats::BLOCK_FORMATS;
use marlinspike::formats::blocks::BlockFormat;
use marlinspike::method::Arithmetic;
use marlinspike::quantize::Fp8GroupRule;
use marlinspike_model::run::options::{Activations, EXPERT_BACKEND, ExpertBackend, MethodOptions};

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

/// A parser of the activations' types: block formats of 8 bits, and the names that are no type.
fn activations() -> impl TypedValueParser<Value = Activations> {
    let general = [
        ("auto", "As the checkpoint states; 16 bits if it states nothing", Activations::Checkpoint),
        ("none", "16 bits, as in Marlin's kernels", Activations::SixteenBit),
    ]
    .map(|(name, help, found)| (PossibleValue::new(name).help(help), found));
    let blocks = BLOCK_FORMATS.into_iter().filter(|format| format.codes_per_byte() == 1);
    let blocks = blocks.map(|format| {
        let BlockFormat { name, element, scale, block, .. } = format;
        let help = format!("{}: {element}, a scale of {scale} for each {block} k", format.title());
        (PossibleValue::new(*name).help(help), Activations::Block(format))
    });
    let all: Vec<(PossibleValue, Activations)> = general.into_iter().chain(blocks).collect();
    let values: Vec<PossibleValue> = all.iter().map(|(value, _)| value.clone()).collect();
    PossibleValuesParser::new(values).try_map(move |name: String| {
        let found = all.iter().find(|(value, _)| value.get_name() == name);
        found.map(|(_, activations)| *activations).ok_or("no type has this name")
    })
}

/// Options of these layers.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct MethodArgs {
    /// Order and precision in which products are summed [default: exact]. With this option an int4
    /// layer runs with 16-bit activations instead of on the int4 path.
    #[arg(long, value_enum, value_name = "NAME")]
    pub arithmetic: Option<ArithmeticArg>,
    /// Type of the activations in the products.
    #[arg(long, default_value = "auto", value_parser = activations(), value_name = "HOW")]
    pub activations: Activations,
    /// NVFP4: upstream's name of the kernel whose rule gives the global scales of the activations.
    #[arg(long = EXPERT_BACKEND.name, default_value = ExpertBackend::NAMES[0], value_parser = backend, value_name = "NAME")]
    pub expert_backend: ExpertBackend,
    /// FP8 blocks: how each group of 128 activations is quantized. `quotient` is vLLM 0.21.0's CUDA
    /// operator, `scale_inverse` that of 0.33.0, `reciprocal` vLLM's Triton kernel, `deep_gemm`
    /// DeepGEMM's own function.
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
            activations: self.activations,
            backend: self.expert_backend,
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
fn backend(name: &str) -> Result<ExpertBackend, String> {
    let found = ExpertBackend::NAMED.iter().find(|(n, _)| *n == name);
    found.map(|(_, backend)| *backend).ok_or_else(|| {
        let names: Vec<_> = ExpertBackend::NAMED.iter().map(|(n, _)| *n).collect();
        format!("found {name:?}, expected one of {}", names.join(", "))
    })
}
