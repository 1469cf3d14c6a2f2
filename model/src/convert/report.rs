//! Progress for people: a bar on a terminal, plain lines otherwise.

use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::style::printable;

/// Says how far a conversion is, on standard error.
#[derive(Debug)]
pub struct Reporter {
    bar: Option<ProgressBar>,
    lines: bool,
    total: u64,
    done: AtomicU64,
}

impl Reporter {
    /// A reporter for `total` bytes: a bar when standard error is a terminal, else lines; nothing
    /// when `quiet`.
    pub fn new(total: u64, quiet: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = (terminal && !quiet).then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            let template = "{bar:32} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left  {msg}";
            let style = ProgressStyle::with_template(template);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Self { bar, lines: !terminal && !quiet, total, done: AtomicU64::new(0) }
    }

    /// `bytes` more have been written.
    pub fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    /// A file has been begun.
    pub fn file(&self, name: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(printable(name).into_owned());
        }
        if self.lines {
            let (done, total) = (self.done.load(Ordering::Relaxed), self.total);
            eprintln!("{} ({} of {})", printable(name), size(done), size(total));
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A number of bytes for people.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.2} GiB", bytes as f64 / 1_073_741_824.0),
    }
}
