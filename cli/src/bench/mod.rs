//! `marlinspike bench`: the speed of products and layers compared with the limits of the machine.

mod args;
mod gpu;
mod measure;
mod report;

pub use args::Args;

use anyhow::Result;

use crate::style::ColorChoice;
use crate::{Outcome, output};

/// Measures, then prints a table or JSON.
///
/// # Errors
/// Returns an error for arguments that contradict each other or exceed the machine.
pub fn run(args: &Args, color: ColorChoice) -> Result<Outcome> {
    let cpu = match &args.target {
        args::Target::Cpu(cpu) => cpu,
        args::Target::Gpu(gpu) => return gpu::run(gpu, color),
    };
    let plan = measure::Plan::new(cpu)?;
    let report = plan.measure()?;
    let text = match cpu.json {
        true => format!("{}\n", serde_json::to_string(&report)?),
        false => report.text(color.for_stdout()),
    };
    output::print(&text)?;
    Ok(Outcome::Pass)
}
