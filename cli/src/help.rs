//! Help texts at the terminal's width, shell completions and man pages.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Command, CommandFactory as _};
use clap_complete::Shell;

use crate::output::{columns, hanging, print, write_whole};
use crate::style::{counted, printable};
use crate::{Cli, Outcome};

/// Width of help without a terminal.
const WIDTH: usize = 100;

/// Prints a completion script of a shell.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  marlinspike completions bash > ~/.local/share/bash-completion/completions/marlinspike
  marlinspike completions zsh > \"${fpath[1]}/_marlinspike\"
  marlinspike completions fish > ~/.config/fish/completions/marlinspike.fish")]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Writes man pages.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Example:
  marlinspike man ~/.local/share/man/man1 && man marlinspike-check")]
pub struct ManArgs {
    /// Folder for the pages, one for the program and one for each command; created if it does not exist.
    dir: PathBuf,
}

/// The program's command line with every help text wrapped once.
pub fn command() -> Command {
    let width = if columns() == usize::MAX { WIDTH } else { columns() };
    wrapped(Cli::command().term_width(width), width)
}

fn wrapped(mut command: Command, width: usize) -> Command {
    if let Some(text) = command.get_after_long_help().map(ToString::to_string) {
        command = command.after_long_help(reflowed(&text, width));
    }
    command.mut_subcommands(|sub| wrapped(sub, width))
}

/// A paragraph or item under construction: its indent, that of its further lines, and its text.
struct Paragraph {
    first: usize,
    rest: usize,
    text: String,
}

impl Paragraph {
    fn lines(self, width: usize) -> Vec<String> {
        hanging(&" ".repeat(self.first), &self.text, self.rest, width)
    }
}

/// Joins the lines of each paragraph and item, and wraps them at `width`. Other indented lines, such as
/// commands, keep their columns.
fn reflowed(text: &str, width: usize) -> String {
    let mut out: Vec<String> = Vec::new();
    let mut open: Option<Paragraph> = None;
    for line in text.lines() {
        let (indent, words) = (line.len() - line.trim_start().len(), line.trim());
        let continued = open.as_mut().filter(|p| {
            !words.is_empty() && indent == p.rest && (p.first == 0 || p.rest > p.first)
        });
        if let Some(paragraph) = continued {
            paragraph.text.push(' ');
            paragraph.text.push_str(words);
            continue;
        }
        out.extend(open.take().into_iter().flat_map(|p| p.lines(width)));
        let number = item(words).filter(|_| indent > 0);
        let heading = words.ends_with(':') && words.len() < 40;
        if words.is_empty() || (indent > 0 && number.is_none()) || heading {
            out.push(line.trim_end().to_owned());
        } else {
            let rest = indent + number.unwrap_or(0);
            open = Some(Paragraph { first: indent, rest, text: words.to_owned() });
        }
    }
    out.extend(open.into_iter().flat_map(|p| p.lines(width)));
    out.join("\n")
}

/// Columns from the start of an item's number, such as an exit code, to its text.
fn item(words: &str) -> Option<usize> {
    let digits = words.len() - words.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    (digits > 0 && words[digits..].starts_with("  ")).then_some(digits + 2)
}

/// Prints the script.
///
/// # Errors
/// If standard output cannot be written to.
pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "marlinspike", &mut script);
    print(&String::from_utf8(script).context("the script")?)?;
    Ok(Outcome::Pass)
}

/// Writes the pages.
///
/// # Errors
/// If the folder or a page cannot be written.
pub(crate) fn man(args: &ManArgs) -> anyhow::Result<Outcome> {
    let dir = &args.dir;
    std::fs::create_dir_all(dir)
        .with_context(|| format!("{}: cannot be created", dir.display()))?;
    let mut root = Cli::command();
    root.build();
    let mut pages = vec![("marlinspike".to_owned(), root.clone())];
    let visible = root.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help");
    pages.extend(visible.map(|c| (format!("marlinspike-{}", c.get_name()), c.clone())));
    for (name, command) in &pages {
        let mut page = Vec::new();
        clap_mangen::Man::new(command.clone()).render(&mut page)?;
        write_whole(&dir.join(format!("{name}.1")), &page)?;
    }
    let folder = dir.display().to_string();
    print(&format!("{} in {}\n", counted(pages.len(), "page"), printable(&folder)))?;
    Ok(Outcome::Pass)
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn paragraphs_are_wrapped_once_and_commands_not_at_all() {
        let text = "One two three four\nfive six.\n\nExamples:\n  marlinspike check a-long-name b\n\nExit codes:\n  \
                    0  everything was\n     checked\n  1  failed";
        let expected = "One two three\nfour five six.\n\nExamples:\n  marlinspike check a-long-name b\n\nExit \
                        codes:\n  0  everything\n     was checked\n  1  failed";
        assert_eq!(reflowed(text, 16), expected);
    }

    #[test]
    fn help_fits_its_width() {
        for width in [60, 80, 120] {
            let mut command = wrapped(Cli::command().term_width(width), width);
            command.build();
            for sub in command.get_subcommands_mut().filter(|sub| sub.get_name() != "help") {
                let help = sub.render_long_help().to_string();
                let prose =
                    help.lines().filter(|line| !line.starts_with(' ') && !line.contains('{'));
                let long: Vec<_> = prose.filter(|line| line.chars().count() > width).collect();
                assert!(
                    long.iter().all(|l| l.split_whitespace().count() < 4 || l.starts_with("Usage")),
                    "{long:?}"
                );
            }
        }
    }

    #[test]
    fn every_shell_has_a_script_with_every_command() {
        for shell in Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "marlinspike", &mut script);
            let script = String::from_utf8(script).unwrap();
            for name in ["check", "inspect", "convert", "fuzz", "vectors"] {
                assert!(script.contains(name), "{shell}: {name}");
            }
        }
    }
}
