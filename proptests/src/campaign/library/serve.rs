//! The process that calls a library's kernel.

use std::ffi::{CString, OsStr};
use std::fmt::Display;
use std::fs::File;
use std::io::{BufRead as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use marlinspike::container::{Container, write_container};

use super::super::process::READY;
use super::super::{CampaignError, Fault};
use super::settings::settings;
use super::{InputFile, Loaded, Tensors, outputs};

/// Prints `ready` and answers the lines of [`Protocol::Persistent`](super::super::Protocol) with the kernel of a
/// library, until standard input ends. What the kernel prints goes to standard error.
///
/// # Errors
/// [`CampaignError::Kernel`] for a library that cannot be loaded, which is also printed as an answer.
pub fn serve(library: &Path) -> Result<(), CampaignError> {
    let name = library.display().to_string();
    let failed = |problem: String| CampaignError::Kernel { kernel: name.clone(), problem };
    let answers = rustix::io::dup(rustix::stdio::stdout()).map_err(|e| failed(e.to_string()))?;
    rustix::stdio::dup2_stdout(rustix::stdio::stderr()).map_err(|e| failed(e.to_string()))?;
    let mut answers = File::from(answers);
    let mut say = |answer: &str| writeln!(answers, "{answer}").is_ok();
    let loaded = Loaded::new(library).map_err(|problem| {
        let program = name.clone();
        say(&line(&Fault::NotStarted { program, problem: problem.clone() }));
        failed(problem)
    })?;
    if !say(READY) {
        return Ok(());
    }
    for files in std::io::stdin().lock().split(b'\n') {
        let Ok(files) = files else { break };
        let mut files = files.splitn(2, |byte| *byte == b'\t').map(OsStr::from_bytes);
        let (Some(input), Some(output)) = (files.next(), files.next()) else { break };
        let answer = match answer(&loaded, Path::new(input), Path::new(output)) {
            Ok(()) => "ok".to_owned(),
            Err(fault) => line(&fault),
        };
        if !say(&answer) {
            break;
        }
    }
    Ok(())
}

/// A fault as an answer.
fn line(fault: &Fault) -> String {
    match serde_json::to_string(fault) {
        Ok(json) => format!("fault {json}"),
        Err(_) => format!("error {fault}"),
    }
}

fn answer(loaded: &Loaded, input: &Path, output: &Path) -> Result<(), Fault> {
    // No kernel has run, or it has done its work: what fails here is not its fault.
    let failed = |what: &str, problem: &dyn Display| {
        let folder = output.parent().unwrap_or(output).display().to_string();
        Fault::Exchange { folder, problem: format!("{what}: {problem}") }
    };
    let bytes = std::fs::read(input).map_err(|e| failed("the inputs", &e))?;
    let container = Container::parse(&bytes).map_err(|e| failed("the inputs", &e))?;
    let text = |key: &str| {
        let text = container.metadata().get(key).cloned().unwrap_or_default();
        CString::new(text).map_err(|e| failed(key, &e))
    };
    let config = text("config")?;
    let settings = settings(&config).map_err(|e| failed("the config", &e))?;
    let file = InputFile { op: text("op")?, config, settings };
    let mut tensors = Tensors::read(&container).map_err(|e| failed("the inputs", &e))?;
    let outputs = outputs(loaded, &file, &mut tensors)?;
    let outputs: Vec<_> = outputs.into_values().collect();
    let written = write_container(&outputs, &Default::default(), Vec::new());
    let written = written.map_err(|e| failed("the outputs", &e))?;
    std::fs::write(output, written).map_err(|e| failed("the outputs were not written", &e))
}
