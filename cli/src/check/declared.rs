//! What the command line declares about a kernel's arithmetic.

use anyhow::Result;
use marlinspike::check::Declared;

use crate::error::Explained;

/// Options that declare the arithmetic of a kernel.
#[derive(Debug, clap::Args)]
// clap names a group after its type and rejects two groups of the same name.
#[group(id = "declared")]
pub(crate) struct Args {
    /// Where a kernel applies scales, bias and roundings
    ///
    /// Without this option, and without `convention` in the case's config, every known convention
    /// is tried, and the exact result rounded once also passes. The verdict names those that fit.
    ///
    /// `marlin`: group scales are multiplied into the weights in the activation type; column
    /// scales, bias and router weight are applied to the rounded sum, with a rounding after each.
    /// `stepwise`: like `marlin`, but column scales are also multiplied into the weights.
    /// `canonical`: weights as in `stepwise`; bias and router weight are applied to the f32 sum,
    /// which is rounded once. `unrounded`: as `canonical`, but scaled weights are not rounded.
    /// `scaled_mm`: the product of two 8-bit operands, their scales applied to the f32 sum in any
    /// order; FP8 products and layers are always judged by this convention.
    #[arg(long, value_name = "NAME")]
    convention: Option<String>,

    /// The order and precision in which products are summed: a name, or JSON
    ///
    /// `f32-any-order`: any order, in f32 or on tensor cores from Turing on. `hopper-any-order`:
    /// any order on Hopper's tensor cores. `marlin-hopper`: the order of the Marlin kernels; its
    /// bound is many times narrower. `fused-f32`, `separate-f32`: no tensor core; f32 with fused or
    /// separate multiply and add. `fp8-any-order`: e4m3 on tensor cores from Ada on, with or
    /// without promotion to f32. `fp8-contiguous`: likewise, in ascending runs of k. `fp8-hopper`:
    /// one of the orders of Hopper's kernels (promotion every 32, 64 or 128 k or none, split-K in
    /// up to 16 parts); its bound is about one rounding. `fp8-block-scaled`: the unit multiplies by
    /// scales that are powers of two (Blackwell). Without this option the class is `f32-any-order`,
    /// and products of e4m3 activations are tried with known schedules, `fp8-hopper`, `f32-any-order`
    /// and `fp8-any-order`, narrowest first. JSON as
    /// `{"name":"mine","adder":{"matrix_unit":{"products":16,"fraction_bits":25,"kept_bits":24}},
    /// "order":{"striped":{"block":16,"stripes":[]}},"reduction":{"f32":{"steps":1}}}`.
    #[arg(long, value_name = "CLASS")]
    class: Option<String>,

    /// Largest uniform error that a pass may leave unnoticed, in percent [default: 2]
    ///
    /// A bound that would accept every element times 1.02 says little about an output that it
    /// contains. Such an output is reported as not checked, with what to declare: a schedule, or a
    /// narrower class. A bound that is too weak is no way to a pass; an output with every bit of a
    /// known schedule passes nevertheless. Takes precedence over `min_power` in a case's config.
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    min_power: Option<f64>,
}

/// A number of percent as a share.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.trim_end_matches('%').trim().parse::<f64>().ok();
    match number.filter(|number| number.is_finite() && *number >= 0.0) {
        Some(number) => Ok(number / 100.0),
        None => Err(format!("found `{text}`, expected a number of percent, 0 or more")),
    }
}

impl Args {
    /// The options that differ from their defaults, as words of a command line.
    pub(crate) fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut option = |name: &str, value: &str| words.extend([name, value].map(str::to_owned));
        if let Some(convention) = &self.convention {
            option("--convention", convention);
        }
        if let Some(class) = &self.class {
            option("--class", class);
        }
        if let Some(share) = self.min_power {
            option("--min-power", &(share * 100.0).to_string());
        }
        words
    }

    /// Parses the options.
    pub(crate) fn read(&self) -> Result<Declared> {
        // The reference's errors begin with the name of the option.
        let stated = Declared::stated(self.convention.as_deref(), self.class.as_deref());
        let stated = stated.map(|stated| Declared { min_power: self.min_power, ..stated });
        stated.map_err(|e| {
            let help = "`marlinspike check --help` describes each convention and class, and has an \
                        example of JSON";
            Explained::new(format!("--{e}"), help).into()
        })
    }
}
