//! The `marlinspike` program. The library of this crate implements it.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    marlinspike_cli::main(&marlinspike_cli::Cli::parse())
}
