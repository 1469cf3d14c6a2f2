//! How `fuzz` ends: it leaves no process and no file behind, and its own failures are no findings.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

/// A patience that no working machine exhausts. What is waited for has no other limit of time.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until `done`.
#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let step = Duration::from_millis(5);
    for _ in 0..PATIENCE.as_millis() / step.as_millis() {
        if done() {
            return;
        }
        thread::sleep(step);
    }
    panic!("{what} did not happen");
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz-ends").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn fuzz(folder: &Path, more: &[&str]) -> Command {
    // A shell's background job ignores SIGINT, and what it starts inherits that.
    let mut command = Command::new("env");
    command.args(["--default-signal", env!("CARGO_BIN_EXE_marlinspike")]);
    command.args(["fuzz", "--op", "int4_fp8_preprocess", "--seed", "1", "--cases", "3"]);
    command.args(["--timeout", "1000", "--keep"]).arg(folder.join("kept")).args(more);
    command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn script(folder: &Path, lines: &str) -> String {
    let path = folder.join("kernel.sh");
    fs::write(&path, format!("{lines}\n")).unwrap();
    format!("sh {}", path.display())
}

fn lives(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

/// Writes its number, that of a child, that of one which leaves the session and its environment, and the
/// exchange folder; then waits.
const WAITS: &str = r#"
sleep 1000 &
one=$!
env -i setsid sleep 1000 &
two=$!
(setsid sleep 1000 & echo $! > orphan)
echo "$$ $one $two $(cat orphan) $FOLDER" > started.part
mv started.part started
sleep 1000
"#;

/// A kernel that waits, once it is under way; its processes and its folder.
fn waiting(folder: &Path, persistent: bool) -> (Child, Vec<String>, PathBuf) {
    let lines = match persistent {
        true => format!("read line; FOLDER=$(dirname \"${{line%%\t*}}\")\n{WAITS}"),
        false => format!("FOLDER=$(dirname \"$1\")\n{WAITS}"),
    };
    let kernel = script(folder, &lines);
    let more = [&["--cmd", &kernel][..], &["--persistent"][..usize::from(persistent)]].concat();
    let child = fuzz(folder, &more).spawn().unwrap();
    let started = folder.join("started");
    until("the kernel's start", || started.exists());
    let text = fs::read_to_string(started).unwrap();
    let mut words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
    let exchange = PathBuf::from(words.pop().unwrap());
    assert_eq!(words.len(), 4, "{text}");
    assert!(words.iter().all(|pid| lives(pid)) && exchange.is_dir(), "{text}");
    (child, words, exchange)
}

fn kill(signal: &str, pid: u32) {
    let done = Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status();
    assert!(done.unwrap().success());
}

/// The campaign's process, which `fuzz` starts.
fn campaign(fuzz: &Child) -> u32 {
    let path = format!("/proc/{0}/task/{0}/children", fuzz.id());
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

#[test]
fn any_signal_ends_every_process_and_removes_the_folder() {
    for (i, signal) in ["INT", "TERM", "HUP", "QUIT", "KILL"].into_iter().enumerate() {
        for of_campaign in [false, true] {
            let folder = folder(&format!("{signal}-{of_campaign}"));
            let (mut child, pids, exchange) = waiting(&folder, i % 2 == 1);
            kill(signal, if of_campaign { campaign(&child) } else { child.id() });
            let status = child.wait().unwrap();
            assert!(!status.success(), "{status}");
            until("the end of all processes", || !pids.iter().any(|pid| lives(pid)));
            until("the removal of the folder", || !exchange.exists());
        }
    }
}

#[test]
fn a_case_that_ends_leaves_none_of_its_processes() {
    let folder = folder("leaves");
    let lines =
        "(env -i setsid sleep 1000 & echo $! >> pids); sleep 1000 & echo $! >> pids; exit 1";
    let kernel = script(&folder, lines);
    let output = fuzz(&folder, &["--cmd", &kernel]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let pids = fs::read_to_string(folder.join("pids")).unwrap();
    assert!(pids.lines().count() >= 6, "{pids}");
    assert!(!pids.lines().any(lives), "{pids}");
}

#[test]
fn leftovers_of_killed_campaigns_are_removed_and_folders_in_use_stay() {
    let shared = Path::new("/dev/shm");
    let place = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    let make = |name: &str| {
        let folder = place.join(format!("marlinspike-fuzz-{}-{name}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        (File::create(folder.join("owner")).unwrap(), folder)
    };
    let ((used, in_use), (left, leftover)) = (make("used"), make("left"));
    used.lock().unwrap();
    drop(left);
    // A kernel that outlived both processes of its campaign.
    let mut kernel = Command::new("setsid");
    let kernel = kernel.args(["sleep", "1000"]).env("MARLINSPIKE_FUZZ_FOLDER", &leftover);
    let mut kernel = kernel.spawn().unwrap();
    let folder = folder("leftovers");
    let output = fuzz(&folder, &["--cmd", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(!leftover.exists() && in_use.exists());
    assert!(!kernel.wait().unwrap().success());
    fs::remove_dir_all(in_use).unwrap();
}

/// Exit code 2, no finding, and an error with these words.
#[track_caller]
fn fails_itself(output: &Output, words: &[&str]) {
    let (text, error) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(2), "{text}{error}");
    assert!(!text.contains("finding"), "{text}");
    for word in words {
        assert!(error.contains(word), "{word:?} is not in {error}");
    }
}

#[test]
fn a_folder_that_is_removed_is_no_finding() {
    let folder = folder("removed");
    for lines in ["rm -r $(dirname $1); exit 1", "rm -r $(dirname $1)"] {
        let kernel = script(&folder, lines);
        let output = fuzz(&folder, &["--cmd", &kernel]).output().unwrap();
        fails_itself(&output, &["marlinspike-fuzz-", "the folder was removed during the run"]);
    }
}

/// In a namespace of its own, `/dev/shm` can be as small as a test wants.
#[test]
fn a_full_folder_is_no_finding() {
    let folder = folder("full");
    let namespace = |lines: &str| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "sh", "-ec", lines]).current_dir(&folder);
        command.output()
    };
    if !namespace("mount -t tmpfs -o size=64k none /dev/shm").is_ok_and(|o| o.status.success()) {
        println!("SKIPPED (no mount namespaces): a_full_folder_is_no_finding");
        return;
    }
    let program = env!("CARGO_BIN_EXE_marlinspike");
    // Something else fills the memory after the inputs are written.
    let kernel = script(&folder, "cat /dev/zero > /dev/shm/other; cp $1 $2 || exit 1");
    for (size, words) in [("8k", "the inputs were not written: "), ("8m", "bytes free, expected ")]
    {
        let lines = format!(
            "mount -t tmpfs -o size={size} none /dev/shm\n\
             exec {program} fuzz --op int4_fp8_preprocess --seed 1 --cases 3 --keep kept --cmd '{kernel}'"
        );
        let output = namespace(&lines).unwrap();
        fails_itself(&output, &["/dev/shm/marlinspike-fuzz-", words]);
    }
}

#[test]
fn a_library_that_cannot_be_loaded_is_no_finding() {
    let folder = folder("unloadable");
    let source = folder.join("kernel.c");
    let compiled = |name: &str, text: &str| {
        fs::write(&source, text).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o", name]).arg(&source).current_dir(&folder);
        assert!(cc.status().expect("a C compiler").success());
    };
    fs::write(folder.join("text.so"), "no library").unwrap();
    compiled("empty.so", "int x;");
    compiled(
        "undefined.so",
        "extern int absent(void); int marlinspike_kernel_abi(void) { return absent(); }",
    );
    let abi = "int marlinspike_kernel_run(void *c) { return 1; } int marlinspike_kernel_abi(void) { return 9; }";
    compiled("abi.so", abi);
    let dies = "__attribute__((constructor)) static void f(void) { *(volatile int *)8 = 1; }";
    compiled("dies.so", dies);
    for (library, words) in [
        ("text.so", &["text.so", "file too short"][..]),
        ("empty.so", &["empty.so", "undefined symbol: marlinspike_kernel_abi"]),
        ("undefined.so", &["undefined.so", "undefined symbol: marlinspike_kernel_run"]),
        ("abi.so", &["abi.so", "found ABI version 9, expected 1"]),
        ("dies.so", &["dies.so", "the process that loads it ended: ended by signal 11"]),
    ] {
        fails_itself(&fuzz(&folder, &["--lib", library]).output().unwrap(), words);
    }
}

/// Only a library's tensors end where their pages end, and a signal has other causes as well.
#[test]
fn a_segmentation_fault_is_not_called_an_access_past_a_tensor() {
    let folder = folder("raised");
    let kernel = script(&folder, "kill -SEGV $$");
    let output = fuzz(&folder, &["--cmd", &kernel]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("SIGSEGV") && !text.contains("tensor ends"), "{text}");
    assert!(!text.contains("past the end of a tensor"), "{text}");
}
