//! Progress: a bar on a terminal, plain lines otherwise.

use std::io::IsTerminal as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use marlinspike_model::convert::progress::Progress;

use crate::style::{printable, size};

/// Prints the progress of a conversion to standard error.
#[derive(Debug)]
pub(super) struct Reporter {
    terminal: bool,
    bar: OnceLock<ProgressBar>,
    total: AtomicU64,
    done: AtomicU64,
}

impl Reporter {
    /// Creates a bar if standard error is a terminal, else prints lines.
    pub(super) fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        let (total, done) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { terminal, bar: OnceLock::new(), total, done }
    }
}

impl Progress for Reporter {
    fn begin(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
        if self.terminal {
            self.bar.get_or_init(|| {
                let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr());
                let template =
                    "{bar:32} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left  {msg}";
                let style = ProgressStyle::with_template(template);
                bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
                bar
            });
        }
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        if let Some(bar) = self.bar.get() {
            bar.inc(bytes);
        }
    }

    fn file(&self, name: &str) {
        match self.bar.get() {
            Some(bar) => bar.set_message(printable(name).into_owned()),
            None => {
                let (done, total) = (&self.done, &self.total);
                let [done, total] = [done, total].map(|n| size(n.load(Ordering::Relaxed)));
                eprintln!("{} ({done} of {total})", printable(name));
            }
        }
    }

    fn finish(&self) {
        if let Some(bar) = self.bar.get() {
            bar.finish_and_clear();
        }
    }
}
