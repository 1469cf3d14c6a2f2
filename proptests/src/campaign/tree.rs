//! The processes of a kernel, with all that they start, and their end.
//!
//! A kernel leads a process group, but its children may leave the group (`setsid`) and may lose their
//! parent. On Linux a supervised campaign adopts such orphans ([`adopt_orphans`]), so that each of them
//! stays a descendant. In other programs, a variable of the environment marks a kernel's processes.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, kill_process, kill_process_group,
    waitid, waitpid,
};

/// Environment variable of a kernel's processes: the folder through which files are exchanged.
const MARKER: &str = "MARLINSPIKE_FUZZ_FOLDER";
/// How often a tree is searched again for processes that were started meanwhile.
const ROUNDS: u32 = 1000;

/// Whether orphans become children of this process.
static ADOPTING: AtomicBool = AtomicBool::new(false);
/// Whether no process may be started any more.
static STOPPED: Mutex<bool> = Mutex::new(false);

/// Makes orphaned descendants children of this process, whose other children [`end`] ends as well.
///
/// # Errors
/// The system's.
pub(super) fn adopt_orphans() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        rustix::process::set_child_subreaper(Some(getpid()))?;
        ADOPTING.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// Refuses every later [`spawn`]. A present one has finished when this returns.
pub(super) fn stop() {
    *STOPPED.lock().unwrap_or_else(PoisonError::into_inner) = true;
}

/// Starts a process of a kernel that exchanges files through `folder`.
///
/// # Errors
/// The system's.
pub(super) fn spawn(command: &mut Command, folder: &Path) -> io::Result<Child> {
    use std::os::unix::process::CommandExt as _;
    command.process_group(0).env(MARKER, folder);
    let stopped = STOPPED.lock().unwrap_or_else(PoisonError::into_inner);
    match *stopped {
        true => Err(io::ErrorKind::Interrupted.into()),
        false => command.spawn(),
    }
}

/// The exit status of a process that ends in time, and the end of what it leaves running.
pub(super) fn wait(child: &mut Child, timeout: Duration, folder: &Path) -> Option<ExitStatus> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(200);
    // Until it is waited for, its number and that of its group cannot be another process's.
    while !has_ended(child) {
        if start.elapsed() >= timeout {
            return None;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    Some(end(child, folder)).flatten()
}

fn pid_of(child: &Child) -> Option<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw)
}

fn has_ended(child: &Child) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    // A process that cannot be waited for is gone.
    pid_of(child).is_none_or(|pid| !matches!(waitid(WaitId::Pid(pid), options), Ok(None)))
}

/// Ends a process and those that it started.
pub(super) fn end(child: &mut Child, folder: &Path) -> Option<ExitStatus> {
    if let Some(pid) = pid_of(child) {
        kill_tree(pid);
    }
    let status = child.wait().ok();
    match ADOPTING.load(Ordering::Relaxed) {
        true => end_children(),
        false => end_marked(folder),
    }
    status
}

/// Ends all children of this process, with those that they started.
pub(super) fn end_children() {
    for round in 0..ROUNDS {
        let children = children(getpid());
        if children.is_empty() {
            return;
        }
        for child in children {
            kill_tree(child);
            let _ = waitpid(Some(child), WaitOptions::NOHANG);
        }
        if round > 0 {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Ends all processes that carry the mark of `folder`.
pub(super) fn end_marked(folder: &Path) {
    let mark = [MARKER.as_bytes(), b"=", folder.as_os_str().as_bytes()].concat();
    for _ in 0..ROUNDS {
        let is_marked = |pid: &Pid| {
            let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero()));
            let is_zombie = stat(*pid).is_none_or(|(_, state)| state == b'Z');
            let environment = environment.unwrap_or_default();
            !is_zombie && environment.split(|byte| *byte == 0).any(|variable| variable == mark)
        };
        let marked: Vec<_> = processes().into_iter().filter(is_marked).collect();
        if marked.is_empty() {
            return;
        }
        marked.into_iter().for_each(kill_tree);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Kills a process, its group and its descendants.
fn kill_tree(root: Pid) {
    for _ in 0..ROUNDS {
        let below = descendants(root);
        // Any of them may be gone, and the root may lead no group.
        let _ = kill_process_group(root, Signal::KILL);
        let _ = kill_process(root, Signal::KILL);
        for pid in &below {
            let _ = kill_process(*pid, Signal::KILL);
        }
        if below.is_empty() {
            return;
        }
    }
}

/// All living processes below `root`.
fn descendants(root: Pid) -> Vec<Pid> {
    let mut all: Vec<Pid> = children(root);
    let mut next = 0;
    while let Some(&pid) = all.get(next) {
        let below = children(pid);
        all.extend(below.into_iter().filter(|pid| *pid != root));
        next += 1;
    }
    all.retain(|pid| stat(*pid).is_some_and(|(_, state)| state != b'Z'));
    all
}

/// The children of a process, those that have ended and are not waited for included; empty where the
/// system has no `/proc`.
fn children(pid: Pid) -> Vec<Pid> {
    let tasks = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()));
    let tasks: Vec<_> = tasks.into_iter().flatten().flatten().map(|task| task.path()).collect();
    let lists: Option<Vec<String>> =
        tasks.iter().map(|task| fs::read_to_string(task.join("children")).ok()).collect();
    match lists {
        Some(lists) if !lists.is_empty() => {
            lists.iter().flat_map(|list| list.split_whitespace()).filter_map(parsed).collect()
        }
        // A kernel without lists of children, or a task that ended while they were read.
        _ => {
            let is_child =
                |child: &Pid| stat(*child).is_some_and(|(parent, _)| parent == Some(pid));
            processes().into_iter().filter(is_child).collect()
        }
    }
}

fn parsed(text: &str) -> Option<Pid> {
    text.parse().ok().and_then(Pid::from_raw)
}

/// All processes but this one.
fn processes() -> Vec<Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str().and_then(parsed));
    pids.filter(|pid| *pid != getpid()).collect()
}

/// Parent and state of a process.
fn stat(pid: Pid) -> Option<(Option<Pid>, u8)> {
    let stat = fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The name, in brackets, may hold anything.
    let after = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields = OsStr::from_bytes(stat.get(after..)?).to_str()?;
    let mut fields = fields.split_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    Some((fields.next().and_then(parsed), state))
}
