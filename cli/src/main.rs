//! The `marlinspike` program. The library of this crate implements it.

use std::process::ExitCode;

use clap::FromArgMatches as _;
use marlinspike_cli::{Cli, help};

fn main() -> ExitCode {
    let matches = help::command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    marlinspike_cli::main(&cli)
}
