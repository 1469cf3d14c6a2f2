//! The `marlinspike` program; everything it does is in the library of this crate.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    marlinspike_cli::run(&marlinspike_cli::Cli::parse())
}
