//! A campaign in two processes, of which each ends what the other leaves when it is killed.
//!
//! The process that a user starts only waits: signals and the terminal reach it alone. It starts the
//! campaign as a child, with a pipe as its standard input. When the first process ends in whatever way,
//! the pipe ends, and the campaign ends its kernels, removes its folder and exits. When the campaign is
//! killed, the first process does the same.

use std::ffi::OsString;
use std::io::{self, Read as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use super::{exchange, tree};

/// Environment variable of the campaign's process: the number of the first process.
const VARIABLE: &str = "MARLINSPIKE_FUZZ_SUPERVISOR";
/// Exit code of a campaign whose first process was ended.
const INTERRUPTED: i32 = 130;

/// Runs a campaign in a child process, `program` with `arguments`, which must call [`supervised`] before
/// it starts a kernel. Returns its exit code.
///
/// # Errors
/// The system's, if the process cannot be started.
pub fn supervise(program: &Path, arguments: impl IntoIterator<Item = OsString>) -> io::Result<i32> {
    tree::adopt_orphans()?;
    let mut command = Command::new(program);
    command.args(arguments).env(VARIABLE, std::process::id().to_string());
    // In a group of its own, it outlives what a terminal sends to the first process.
    command.stdin(Stdio::piped()).process_group(0);
    let mut campaign = command.spawn()?;
    let alive = campaign.stdin.take();
    let status = campaign.wait()?;
    drop(alive);
    tree::end_children();
    if status.code().is_none() {
        exchange::remove_leftovers();
    }
    Ok(status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(INTERRUPTED))
}

/// Whether this process is the child of [`supervise`]. If so, it ends its kernels, removes its folder and
/// exits when its parent ends.
pub fn supervised() -> bool {
    let parent = std::env::var(VARIABLE).ok().and_then(|text| text.parse::<i32>().ok());
    let is_child = parent.is_some()
        && parent == rustix::process::getppid().map(|parent| parent.as_raw_nonzero().get());
    if is_child && tree::adopt_orphans().is_ok() {
        thread::spawn(|| {
            // Nothing is written to the pipe.
            let _ = io::stdin().lock().read(&mut [0; 1]);
            tree::stop();
            tree::end_children();
            exchange::remove_own();
            std::process::exit(INTERRUPTED);
        });
    }
    is_child
}
