//! How a kernel is declared to compute, from the command line.

use anyhow::Result;
use marlinspike::check::Declared;
use marlinspike::gemm::{Class, Convention};

use crate::error::Explained;

/// The options that declare it.
#[derive(Debug, clap::Args)]
// Two groups of one name, that of the type, are an error of the command.
#[group(id = "declared")]
pub(crate) struct Args {
    /// What enters a product, and where scales, bias and roundings stand
    ///
    /// Without this option, and without a `convention` in the case's config, all known conventions
    /// are tried, and the exact result, rounded once, passes as well; the verdict names what fits.
    ///
    /// `marlin`: weights and group scales multiplied in the activation type; scales of whole columns,
    /// bias and router weight after the sum was rounded, each rounded. `stepwise`: likewise, with the
    /// scales of columns multiplied into the weights, too. `canonical`: weights as in `stepwise`,
    /// everything after the sum in f32, one rounding. `unrounded`: as canonical, with weights that
    /// are not rounded. `scaled_mm`: the codes of two 8-bit operands, and their scales on the f32 sum
    /// in any order; cases of FP8 products and layers are judged so, whatever is given.
    #[arg(long, value_name = "NAME")]
    convention: Option<String>,

    /// How products are added up: a name, or JSON
    ///
    /// `f32-any-order`: on a matrix unit from Turing on, or in f32, in any order; `hopper-any-order`;
    /// `marlin-hopper`: in the order of the Marlin kernels, which gives a bound many times narrower;
    /// `fused-f32`, `separate-f32`: without a matrix unit; `fp8-any-order`: e4m3 on a matrix unit
    /// from Ada on, with or without promotion to f32; `fp8-contiguous`: likewise, in ascending runs of k;
    /// `fp8-hopper`: in one of the orders of Hopper's kernels (promotion every 32, 64 or 128 k or none,
    /// split-K in up to 16 parts), which gives a bound of about one rounding. JSON as
    /// `{"name":"mine","adder":{"matrix_unit":{"products":16,"fraction_bits":25,"kept_bits":24}},
    /// "order":{"striped":{"block":16,"stripes":[]}},"reduction":{"f32":{"steps":1}}}`.
    #[arg(long, value_name = "CLASS", default_value = "f32-any-order")]
    class: String,
}

impl Args {
    /// The declaration.
    pub(crate) fn read(&self) -> Result<Declared> {
        let convention = self.convention.as_deref().map(named).transpose()?;
        let classes = Class::named();
        let class = match classes.iter().find(|c| c.name == self.class) {
            Some(class) => class.clone(),
            None if self.class.trim_start().starts_with('{') => {
                let class: Class = serde_json::from_str(&self.class).map_err(|e| {
                    Explained::new(format!("--class: {e}"), "see `marlinspike check --help`")
                })?;
                class.validate().map_err(|e| {
                    Explained::new(format!("--class: {e}"), "see `marlinspike check --help`")
                })?;
                class
            }
            None => {
                let names: Vec<_> = classes.iter().map(|c| c.name.as_str()).collect();
                let message = format!("no class `{}`", self.class);
                let help = format!("one of {}, or JSON", names.join(", "));
                return Err(Explained::new(message, help).into());
            }
        };
        Ok(Declared { convention, class, ..Declared::default() })
    }
}

/// The convention of this name.
fn named(name: &str) -> Result<Convention> {
    let found = Convention::NAMED.iter().find(|(known, _)| *known == name);
    let Some(&(_, convention)) = found else {
        let names: Vec<_> = Convention::NAMED.iter().map(|(name, _)| *name).collect();
        let help = format!("one of {}", names.join(", "));
        return Err(Explained::new(format!("no convention `{name}`"), help).into());
    };
    Ok(convention)
}
