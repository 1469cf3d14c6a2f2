//! A kernel in another process. A crash, a hang or a malformed answer is a finding, after which the
//! next case gets a new process.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use marlinspike::container::Container;

use super::exchange::Exchange;
use super::kernel::bytes_of;
use super::regressions::read_file;
use super::{CampaignError, Fault, Kernel, Outputs, Trial, tree};

/// Exit code, and first word of an answer, of a kernel that does not support a configuration.
const SKIP_CODE: i32 = 77;
/// Bytes of a process's output that a finding quotes.
const QUOTED: u64 = 2000;
/// Largest file of outputs: this plus 16 times the expected bytes.
const SPARE_BYTES: u64 = 1 << 20;
/// Least time limit of a process that loads a library before its first case.
const LOADING: Duration = Duration::from_secs(30);
/// What a process that answers line by line prints when it has loaded a library.
pub(super) const READY: &str = "ready";

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
    program: OsString,
    arguments: Vec<OsString>,
    protocol: Protocol,
    timeout: Duration,
    exchange: Exchange,
    /// The library that the process loads, for which it first prints [`READY`].
    library: Option<OsString>,
    running: Option<Running>,
}

/// A process that answers line by line.
#[derive(Debug)]
struct Running {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    folder: PathBuf,
}

impl Drop for Running {
    fn drop(&mut self) {
        tree::end(&mut self.child, &self.folder);
    }
}

impl ProcessKernel {
    /// A kernel that `command` runs; its first word is the program. Files are exchanged in memory
    /// (`/dev/shm`) if the system has it. Folders and processes of campaigns that were killed are removed.
    ///
    /// # Errors
    /// [`CampaignError::Kernel`] for an empty command; [`CampaignError::Io`] if no temporary folder can
    /// be created. A program that cannot be started is [`Fault::NotStarted`] of its first case.
    pub fn new<A: AsRef<OsStr>>(
        command: &[A],
        protocol: Protocol,
        timeout: Duration,
    ) -> Result<Self, CampaignError> {
        let Some((program, arguments)) = command.split_first() else {
            let problem = "found an empty command, expected a program".to_owned();
            return Err(CampaignError::Kernel { kernel: String::new(), problem });
        };
        let exchange = Exchange::new()?;
        let program = program.as_ref().to_owned();
        let arguments = arguments.iter().map(|a| a.as_ref().to_owned()).collect();
        let (library, running) = (None, None);
        Ok(Self { program, arguments, protocol, timeout, exchange, library, running })
    }

    /// The kernel of a library, which `command` loads before it prints [`READY`].
    pub(super) fn of_library(
        command: &[OsString],
        library: &OsStr,
        timeout: Duration,
    ) -> Result<Self, CampaignError> {
        let kernel = Self::new(command, Protocol::Persistent, timeout)?;
        Ok(Self { library: Some(library.to_owned()), ..kernel })
    }

    fn log(&self) -> PathBuf {
        self.exchange.path().join("log")
    }

    /// An empty log.
    fn new_log(&self) -> Result<File, Fault> {
        File::create(self.log()).map_err(|e| self.exchange.failed(format!("the log: {e}")))
    }

    fn per_case(&mut self, input: &Path, output: &Path) -> Result<(), Fault> {
        let crashed = |detail: String| Fault::Crashed { detail };
        let file = self.new_log()?;
        let errors = file.try_clone();
        let errors = errors.map_err(|e| self.exchange.failed(format!("the log: {e}")))?;
        let mut command = Command::new(&self.program);
        command.args(placed(&self.arguments, input, output));
        command.stdin(Stdio::null()).stdout(file).stderr(errors);
        let folder = self.exchange.path();
        let mut child = tree::spawn(&mut command, folder).map_err(|e| self.not_started(&e))?;
        let Some(status) = tree::wait(&mut child, self.timeout, folder) else {
            tree::end(&mut child, folder);
            return Err(Fault::TimedOut { limit: self.timeout });
        };
        match status.code() {
            Some(0) => Ok(()),
            Some(SKIP_CODE) => Err(Fault::Unsupported { reason: tail(&self.log()) }),
            _ => Err(crashed(format!("{}; {}", self.ending(status), tail(&self.log())))),
        }
    }

    fn persistent(&mut self, input: &Path, output: &Path) -> Result<(), Fault> {
        let (input, output) = (input.as_os_str().as_bytes(), output.as_os_str().as_bytes());
        let line = [input, b"\t", output, b"\n"].concat();
        let mut running = match self.running.take() {
            Some(running) => running,
            None => self.start()?,
        };
        let sent = running.stdin.write_all(&line).and_then(|()| running.stdin.flush());
        let answer = match sent {
            Ok(()) => running.lines.recv_timeout(self.timeout),
            Err(_) => Err(RecvTimeoutError::Disconnected),
        };
        match answer {
            Ok(answer) => {
                self.running = Some(running);
                answered(&answer)
            }
            Err(RecvTimeoutError::Timeout) => Err(Fault::TimedOut { limit: self.timeout }),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Fault::Crashed { detail: self.end_of(&mut running) })
            }
        }
    }

    /// How a process ended that no longer answers.
    fn end_of(&self, running: &mut Running) -> String {
        let folder = self.exchange.path();
        let status = tree::wait(&mut running.child, Duration::from_secs(1), folder);
        let how = match status {
            Some(status) => self.ending(status),
            None => "it closed its standard output".to_owned(),
        };
        format!("{how}; {}", tail(&self.log()))
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
        Fault::NotStarted { program: self.program.to_string_lossy().into_owned(), problem }
    }

    fn start(&self) -> Result<Running, Fault> {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(self.new_log()?);
        let folder = self.exchange.path();
        let mut child = tree::spawn(&mut command, folder).map_err(|e| self.not_started(&e))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            tree::end(&mut child, folder);
            return Err(self.exchange.failed("a process without pipes".to_owned()));
        };
        let (send, lines) = mpsc::channel();
        thread::spawn(move || {
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
        let mut running = Running { child, stdin, lines, folder: folder.to_owned() };
        if let Some(library) = &self.library {
            self.expect_ready(&mut running, library)?;
        }
        Ok(running)
    }

    /// Waits until a process has loaded its library. A library that cannot be loaded is no finding.
    fn expect_ready(&self, running: &mut Running, library: &OsStr) -> Result<(), Fault> {
        let limit = self.timeout.max(LOADING);
        let problem = match running.lines.recv_timeout(limit) {
            Ok(line) if line == READY => return Ok(()),
            Ok(line) => match line.split_once(' ') {
                Some(("fault", reason)) => return Err(Fault::from_json(reason)),
                _ => format!("found `{line}`, expected `{READY}` from the process that loads it"),
            },
            Err(RecvTimeoutError::Timeout) => format!("it was not loaded within {limit:?}"),
            Err(RecvTimeoutError::Disconnected) => {
                format!("the process that loads it ended: {}", self.end_of(running))
            }
        };
        Err(Fault::NotStarted { program: library.to_string_lossy().into_owned(), problem })
    }

    /// Describes how a process ended.
    fn ending(&self, status: ExitStatus) -> String {
        let at = rustix::process::Signal::SEGV.as_raw();
        match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit code {code}"),
            // Only a library's tensors lie between inaccessible pages.
            (None, Some(signal)) if signal == at && self.library.is_some() => format!(
                "ended by signal {at} (SIGSEGV); among its causes are an access past the end of a tensor, \
                 which is the end of its pages, a wrong pointer, and `raise`"
            ),
            (None, Some(signal)) if signal == at => format!("ended by signal {at} (SIGSEGV)"),
            (None, Some(signal)) => format!("ended by signal {signal}"),
            (None, None) => "ended".to_owned(),
        }
    }

    /// Runs the kernel on the files of the exchange.
    fn exchanged(&mut self, input: &Path, output: &Path, inputs: u64) -> Result<Outputs, Fault> {
        match self.protocol {
            Protocol::PerCase => self.per_case(input, output)?,
            Protocol::Persistent => self.persistent(input, output)?,
        }
        outputs(output, inputs)
    }
}

impl Kernel for ProcessKernel {
    fn run(&mut self, trial: &Trial) -> Result<Outputs, Fault> {
        let input = self.exchange.path().join("inputs.safetensors");
        let output = self.exchange.path().join("outputs.safetensors");
        let bytes = trial.to_bytes().map_err(|e| self.exchange.failed(e.to_string()))?;
        let written = fs::write(&input, &bytes);
        written.map_err(|e| self.exchange.failed(format!("the inputs were not written: {e}")))?;
        // An old file of outputs must not be read as a new one.
        let _ = fs::remove_file(&output);
        let inputs = bytes.len() as u64;
        let found = self.exchanged(&input, &output, inputs);
        let is_own = matches!(found, Err(Fault::Crashed { .. } | Fault::Unreadable { .. }));
        // A kernel that fills the disk itself is at fault.
        let written = [&output, &self.log()].map(|path| fs::metadata(path).map_or(0, |m| m.len()));
        if is_own
            && written.into_iter().max() <= Some(limit(inputs))
            && let Some(obstacle) = self.exchange.obstacle(trial.wanted.iter().map(bytes_of).sum())
        {
            return Err(obstacle);
        }
        found
    }
}

/// The largest file of outputs that is read for a file of inputs.
fn limit(inputs: u64) -> u64 {
    inputs.saturating_mul(16) + SPARE_BYTES
}

/// The meaning of a line of [`Protocol::Persistent`].
fn answered(answer: &str) -> Result<(), Fault> {
    let (word, reason) = answer.split_once(' ').unwrap_or((answer, ""));
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

/// Reads the outputs, named `y` or `out.y`.
fn outputs(path: &Path, inputs: u64) -> Result<Outputs, Fault> {
    let unreadable = |detail: String| Fault::Unreadable { detail };
    let read = read_file(path, limit(inputs));
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
fn placed(arguments: &[OsString], input: &Path, output: &Path) -> Vec<OsString> {
    let places = [(&b"{input}"[..], input), (b"{output}", output)];
    let mut has_place = false;
    let mut replace = |argument: &OsString| {
        let (mut rest, mut made) = (argument.as_bytes(), Vec::new());
        while let Some(&byte) = rest.first() {
            match places.iter().find(|(name, _)| rest.starts_with(name)) {
                Some((name, path)) => {
                    has_place = true;
                    made.extend(path.as_os_str().as_bytes());
                    rest = &rest[name.len()..];
                }
                None => {
                    made.push(byte);
                    rest = &rest[1..];
                }
            }
        }
        OsString::from_vec(made)
    };
    let mut placed: Vec<OsString> = arguments.iter().map(&mut replace).collect();
    if !has_place {
        placed.extend([input.into(), output.into()]);
    }
    placed
}

/// The end of a process's output.
fn tail(log: &Path) -> String {
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
