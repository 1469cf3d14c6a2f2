//! A kernel in another process. A crash, a hang or a malformed answer is a finding, after which the
//! next case gets a new process.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use marlinspike::container::Container;
use tempfile::TempDir;

use super::regressions::read_file;
use super::{CampaignError, Fault, Kernel, Outputs, Trial};

/// Exit code, and first word of an answer, of a kernel that does not support a configuration.
const SKIP_CODE: i32 = 77;
/// Bytes of a process's output that a finding quotes.
const QUOTED: u64 = 2000;
/// Largest file of outputs: this plus 16 times the expected bytes.
const SPARE_BYTES: u64 = 1 << 20;

/// How a process receives its cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// One process per case: `program INPUT OUTPUT`. `{input}` and `{output}` in the arguments are
    /// replaced; without them, both paths are appended. Exit code 0: the outputs are written. 77: the
    /// configuration is not supported. Any other: a crash.
    PerCase,
    /// One process for all cases. It reads a line `INPUT<tab>OUTPUT` from standard input, writes the
    /// outputs, and answers with one line on standard output: `ok`, `skip REASON` or `error REASON`.
    Persistent,
}

/// A program that reads a case file with inputs and writes a safetensors file with outputs.
#[derive(Debug)]
pub struct ProcessKernel {
    program: String,
    arguments: Vec<String>,
    protocol: Protocol,
    timeout: Duration,
    folder: TempDir,
    running: Option<Running>,
}

/// A process that answers line by line.
#[derive(Debug)]
struct Running {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Drop for Running {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

impl ProcessKernel {
    /// A kernel that `command` runs; its first word is the program. Files are exchanged in memory
    /// (`/dev/shm`) if the system has it.
    ///
    /// # Errors
    /// [`CampaignError::Kernel`] for an empty command; [`CampaignError::Io`] if no temporary folder can
    /// be created. A program that cannot be started is [`Fault::NotStarted`] of its first case.
    pub fn new(
        command: &[String],
        protocol: Protocol,
        timeout: Duration,
    ) -> Result<Self, CampaignError> {
        let Some((program, arguments)) = command.split_first() else {
            let problem = "found an empty command, expected a program".to_owned();
            return Err(CampaignError::Kernel { kernel: String::new(), problem });
        };
        let shared = Path::new("/dev/shm");
        let at = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        let folder = tempfile::Builder::new().prefix("marlinspike-fuzz-").tempdir_in(&at);
        let folder = folder.map_err(|source| CampaignError::Io { path: at, source })?;
        let (program, arguments) = (program.clone(), arguments.to_vec());
        Ok(Self { program, arguments, protocol, timeout, folder, running: None })
    }

    fn per_case(&mut self, input: &Path, output: &Path) -> Result<(), Fault> {
        let log = self.folder.path().join("log");
        let crashed = |detail: String| Fault::Crashed { detail };
        let file = File::create(&log).map_err(|e| crashed(format!("its log: {e}")))?;
        let errors = file.try_clone().map_err(|e| crashed(format!("its log: {e}")))?;
        let mut command = Command::new(&self.program);
        command.args(placed(&self.arguments, input, output));
        command.stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0);
        let mut child = command.spawn().map_err(|e| self.not_started(&e))?;
        let status = match wait(&mut child, self.timeout) {
            Some(status) => status,
            None => {
                end(&mut child);
                return Err(Fault::TimedOut { limit: self.timeout });
            }
        };
        // Processes that a kernel leaves running must not write into the next case.
        end(&mut child);
        match status.code() {
            Some(0) => Ok(()),
            Some(SKIP_CODE) => Err(Fault::Unsupported { reason: tail(&log) }),
            _ => Err(crashed(format!("{}; {}", ending(status), tail(&log)))),
        }
    }

    fn persistent(&mut self, input: &Path, output: &Path) -> Result<(), Fault> {
        let line = format!("{}\t{}\n", input.display(), output.display());
        let running = match self.running.take() {
            Some(running) => running,
            None => self.start()?,
        };
        let mut running = running;
        let sent = running.stdin.write_all(line.as_bytes()).and_then(|()| running.stdin.flush());
        let answer = match sent {
            Ok(()) => running.lines.recv_timeout(self.timeout),
            Err(_) => Err(RecvTimeoutError::Disconnected),
        };
        match answer {
            Ok(answer) => {
                self.running = Some(running);
                let (word, reason) = answer.split_once(' ').unwrap_or((answer.as_str(), ""));
                match word {
                    "ok" => Ok(()),
                    "skip" => Err(Fault::Unsupported { reason: reason.to_owned() }),
                    "error" => Err(Fault::Crashed { detail: reason.to_owned() }),
                    "fault" => Err(Fault::from_json(reason)),
                    _ => {
                        let detail = format!("found answer `{answer}`, expected ok, skip or error");
                        Err(Fault::Unreadable { detail })
                    }
                }
            }
            Err(RecvTimeoutError::Timeout) => Err(Fault::TimedOut { limit: self.timeout }),
            Err(RecvTimeoutError::Disconnected) => {
                let status = wait(&mut running.child, Duration::from_secs(1));
                let how = status.map_or("it closed its standard output".to_owned(), ending);
                let log = self.folder.path().join("log");
                Err(Fault::Crashed { detail: format!("{how}; {}", tail(&log)) })
            }
        }
    }

    /// The fault of a program that the system did not start.
    fn not_started(&self, error: &io::Error) -> Fault {
        // The system gives the same error for a script whose interpreter is missing.
        let problem = match error.kind() {
            io::ErrorKind::NotFound => "program not found: there is no such program, or the \
                interpreter that its `#!` line names does not exist"
                .to_owned(),
            _ => format!("the program cannot be started: {error}"),
        };
        Fault::NotStarted { program: self.program.clone(), problem }
    }

    fn start(&self) -> Result<Running, Fault> {
        let crashed = |e: io::Error| Fault::Crashed { detail: format!("its log: {e}") };
        let log = File::create(self.folder.path().join("log")).map_err(crashed)?;
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().map_err(|e| self.not_started(&e))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            end(&mut child);
            return Err(Fault::Crashed { detail: "no pipes".to_owned() });
        };
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            loop {
                let mut line = Vec::new();
                // An endless line of output must not exhaust the memory.
                let read = (&mut reader).take(1 << 16).read_until(b'\n', &mut line);
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                if read.unwrap_or(0) == 0 || send.send(text).is_err() {
                    return;
                }
            }
        });
        Ok(Running { child, stdin, lines })
    }
}

impl Kernel for ProcessKernel {
    fn run(&mut self, trial: &Trial) -> Result<Outputs, Fault> {
        let unreadable = |detail: String| Fault::Unreadable { detail };
        let input = self.folder.path().join("inputs.safetensors");
        let output = self.folder.path().join("outputs.safetensors");
        let bytes = trial.to_bytes().map_err(|e| unreadable(e.to_string()))?;
        let written = fs::write(&input, &bytes);
        written.map_err(|e| unreadable(format!("the inputs were not written: {e}")))?;
        // An old file of outputs must not be read as a new one.
        let _ = fs::remove_file(&output);
        match self.protocol {
            Protocol::PerCase => self.per_case(&input, &output)?,
            Protocol::Persistent => self.persistent(&input, &output)?,
        }
        outputs(&output, bytes.len() as u64)
    }
}

/// Reads the outputs, named `y` or `out.y`.
fn outputs(path: &Path, inputs: u64) -> Result<Outputs, Fault> {
    let unreadable = |detail: String| Fault::Unreadable { detail };
    let limit = inputs.saturating_mul(16) + SPARE_BYTES;
    let read = read_file(path, limit);
    let bytes = read.map_err(|e| unreadable(format!("the file of outputs: {e}")))?;
    let container = Container::parse(&bytes).map_err(|e| unreadable(e.to_string()))?;
    let mut outputs = Outputs::new();
    for tensor in container.tensors() {
        let tensor = tensor.map_err(|e| unreadable(e.to_string()))?.into_owned();
        let name = tensor.name().strip_prefix("out.").unwrap_or(tensor.name()).to_owned();
        outputs.insert(name, tensor);
    }
    Ok(outputs)
}

/// The arguments with both paths substituted, or appended.
fn placed(arguments: &[String], input: &Path, output: &Path) -> Vec<String> {
    let (input, output) = (input.display().to_string(), output.display().to_string());
    let has_place = arguments.iter().any(|a| a.contains("{input}") || a.contains("{output}"));
    let replace = |a: &String| a.replace("{input}", &input).replace("{output}", &output);
    let mut placed: Vec<String> = arguments.iter().map(replace).collect();
    if !has_place {
        placed.extend([input, output]);
    }
    placed
}

/// The exit status, if the process ends in time.
fn wait(child: &mut Child, timeout: Duration) -> Option<ExitStatus> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(200);
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if start.elapsed() >= timeout {
            return None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Ends the process and those that it started.
fn end(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
        // The process may already be gone or may never have led a group; both are fine.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let _ = child.wait();
}

/// Describes how a process ended.
fn ending(status: ExitStatus) -> String {
    let past_end = "; every tensor ends where its pages end, so that an access past it does this";
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(11)) => format!("ended by signal 11 (SIGSEGV){past_end}"),
        (None, Some(signal)) => format!("ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// The end of a process's output.
fn tail(log: &PathBuf) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(QUOTED)))?;
        let mut bytes = Vec::new();
        file.take(QUOTED).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    };
    match read() {
        Ok(text) if !text.is_empty() => format!("it printed: {text}"),
        _ => "it printed nothing".to_owned(),
    }
}
