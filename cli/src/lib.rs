//! The program `marlinspike`: its command line and its subcommands.
//!
//! ```
//! use clap::Parser as _;
//! use marlinspike_cli::{Cli, Command};
//!
//! let cli = Cli::try_parse_from(["marlinspike", "check", "--json", "mine.safetensors"])?;
//! assert!(matches!(cli.command, Command::Check(_)));
//! // `marlinspike_cli::run(&cli)` checks the file and returns the exit code.
//! # Ok::<(), clap::Error>(())
//! ```
//!
//! A subcommand is one module with an `Args` and a `run`, one variant of [`Command`] and one arm
//! of its match. Exit codes are [`Outcome`]'s.

#[cfg(not(all(feature = "bench", feature = "cuda", feature = "generate")))]
mod absent;
pub mod args;
mod backend;
#[cfg(feature = "bench")]
pub mod bench;
pub mod check;
pub mod convert;
pub mod error;
pub mod fuzz;
#[cfg(feature = "generate")]
pub mod generate;
pub mod help;
mod hint;
pub mod inspect;
pub mod output;
mod program;
pub mod run;
pub mod schema;
pub mod style;
pub mod vectors;
mod version;
#[cfg(feature = "cuda")]
pub mod warm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde_json::json;

#[cfg(not(feature = "bench"))]
use crate::absent::bench;
#[cfg(not(feature = "generate"))]
use crate::absent::generate;
#[cfg(not(feature = "cuda"))]
use crate::absent::warm;
use crate::error::Explained;
use crate::style::ColorChoice;

const EXAMPLES: &str = "\
Examples:
  marlinspike check                            check the repository's golden cases
  marlinspike check mine.safetensors cases/    check files and folders of cases
  marlinspike check --report report.html mine  also plot the mismatches
  marlinspike help check                       everything about one command

Exit codes:
  0  everything was checked and passed
  1  an output differs or was not checked
  2  bad input or usage";

/// Correctness oracle for the Marlin family of quantized linear and MoE kernels: checks packed
/// weights, products and layers, and converts checkpoints.
#[derive(Debug, Parser)]
#[command(name = "marlinspike", version = version::short(), long_version = version::long())]
#[command(after_long_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,

    /// When to use colours; `auto` uses them on a terminal unless NO_COLOR is set.
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN")]
    pub color: ColorChoice,
}

/// A subcommand.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Recompute the outputs of case files and compare them with the recorded ones.
    #[command(long_about = check::ABOUT)]
    Check(check::Args),
    /// Show the quantized layers of a model and the kernels that run them.
    Inspect(inspect::Args),
    /// Convert a checkpoint into a kernel's format.
    Convert(convert::Args),
    /// Run one quantized layer on the CPU or a GPU.
    Run(run::Args),
    /// Generate text on the CPU.
    Generate(generate::Args),
    /// Reads tokenizers and chat templates for `generate`.
    #[cfg(feature = "generate")]
    #[command(hide = true)]
    TextWorker,
    /// Write deterministic case files from a seed.
    Vectors(vectors::Args),
    /// Run a kernel on generated cases; shrink and keep each distinct failure.
    Fuzz(fuzz::Args),
    /// Calls the kernel of a shared library for `fuzz`.
    #[command(hide = true)]
    FuzzWorker(fuzz::WorkerArgs),
    /// Show the config keys and tensors of each operation.
    Schema(schema::Args),
    /// Time products and layers on the CPU or GPU and compare them with the hardware's limits.
    Bench(bench::Args),
    /// Compile the CUDA kernels ahead of use; needs NVRTC but no GPU.
    Warm(warm::Args),
    /// Print the completions of a shell.
    Completions(help::CompletionsArgs),
    /// Write man pages.
    Man(help::ManArgs),
}

impl Command {
    /// Whether the command prints JSON; then a failure is also printed as JSON.
    fn is_json(&self) -> bool {
        match self {
            Self::Check(args) => args.json,
            Self::Inspect(args) => args.json,
            Self::Convert(args) => args.json,
            Self::Run(args) => args.json && !args.list,
            #[cfg(feature = "generate")]
            Self::Generate(args) => args.json,
            Self::Fuzz(args) => args.is_json(),
            Self::Schema(args) => args.json,
            _ => false,
        }
    }
}

/// The result of a command as an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Exit code 0: everything was checked and passed.
    Pass = 0,
    /// Exit code 1: an output differs or was not checked.
    Mismatch = 1,
    /// Exit code 2: an input was invalid.
    BadInput = 2,
}

/// Runs the command as the program itself does: `fuzz` in a child process, which is this program again.
pub fn main(cli: &Cli) -> ExitCode {
    if let Command::Fuzz(args) = &cli.command {
        match fuzz::supervise_run(args) {
            Ok(Some(code)) => return ExitCode::from(code),
            Ok(None) => {}
            Err(error) => return ended(cli, Err(error)),
        }
    }
    run(cli)
}

/// Runs the command; an error goes to standard error and gives exit code 2.
pub fn run(cli: &Cli) -> ExitCode {
    let done = match &cli.command {
        Command::Check(args) => check::run(args, cli.color),
        Command::Inspect(args) => inspect::run(args, cli.color),
        Command::Convert(args) => convert::run(args),
        Command::Run(args) => run::run(args),
        Command::Generate(args) => generate::run(args),
        #[cfg(feature = "generate")]
        Command::TextWorker => generate::worker(),
        Command::Vectors(args) => vectors::run(args, cli.color),
        Command::Fuzz(args) => fuzz::run(args, cli.color),
        Command::FuzzWorker(args) => fuzz::worker(args),
        Command::Schema(args) => schema::run(args),
        Command::Bench(args) => bench::run(args, cli.color),
        Command::Warm(args) => warm::run(args),
        Command::Completions(args) => help::completions(args),
        Command::Man(args) => help::man(args),
    };
    ended(cli, done)
}

/// The exit code of a command, after its error is printed.
fn ended(cli: &Cli, done: anyhow::Result<Outcome>) -> ExitCode {
    let outcome = done.unwrap_or_else(|error| {
        if cli.command.is_json() {
            // A reader that closed standard output early does not change the exit code.
            let (error, help) = describe_error(&error);
            let _ = output::print(&format!("{}\n", json!({ "error": error, "help": help })));
        }
        report_error(&error, cli.color);
        Outcome::BadInput
    });
    ExitCode::from(outcome as u8)
}

/// The message and the help line of an error.
fn describe_error(error: &anyhow::Error) -> (String, &str) {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        // Most messages already contain that of their cause.
        if !text.contains(&cause) {
            text.push_str(&format!(": {cause}"));
        }
    }
    let help = error.chain().find_map(|e| e.downcast_ref::<Explained>()).map(Explained::help);
    let text = style::shortened(&text).into_owned();
    (text, help.unwrap_or("`marlinspike help` lists the commands and their options"))
}

/// Prints `error: ...` and `help: ...` on standard error.
pub fn report_error(error: &anyhow::Error, color: ColorChoice) {
    let paint = color.for_stderr();
    let (text, help) = describe_error(error);
    // Messages may quote file contents: no control character reaches the terminal.
    eprintln!("{} {}", paint.bad("error:"), style::printable(&text));
    eprintln!("{} {}", paint.strong("help:"), style::printable(help));
}
