//! The options of single formats, from the table of formats.

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgMatches, Command};
use marlinspike_model::convert::target::{Choice, Format};
use marlinspike_model::model::ModelError;

/// The options of [`Choice`]s that were given: name and value.
#[derive(Debug, Clone, Default)]
pub struct ChoiceArgs {
    given: Vec<(Choice, String)>,
}

fn choices() -> impl Iterator<Item = (Format, Choice)> {
    Format::ALL.into_iter().filter_map(|f| Some((f, f.descriptor().choice?)))
}

fn arg(format: Format, choice: Choice) -> Arg {
    Arg::new(choice.name)
        .long(choice.name)
        .help(format!("{}: {}", format.name(), (choice.about)()))
        .value_name("NAME")
        .value_parser(PossibleValuesParser::new(choice.values))
}

impl ChoiceArgs {
    /// `format` with the options that were given.
    ///
    /// # Errors
    /// For an option that the format does not have.
    pub(super) fn apply(&self, format: Format) -> Result<Format, ModelError> {
        self.given.iter().try_fold(format, |format, (choice, value)| {
            format.with(choice.name, value).ok_or_else(|| {
                let owner = choices().find(|(_, c)| c == choice).map_or("", |(f, _)| f.name());
                let option = format!("--{}", choice.name);
                let reason = format!("found {option} with another format, expected --to {owner}");
                ModelError::module(option, reason)
            })
        })
    }
}

impl clap::Args for ChoiceArgs {
    fn augment_args(command: Command) -> Command {
        choices().fold(command, |command, (format, choice)| command.arg(arg(format, choice)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for ChoiceArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let value =
            |choice: Choice| Some((choice, matches.get_one::<String>(choice.name)?.clone()));
        Ok(Self { given: choices().filter_map(|(_, choice)| value(choice)).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
