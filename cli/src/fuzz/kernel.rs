//! The kernel that the arguments of `fuzz` name.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Result;
use marlinspike_proptests::campaign::{
    Fault, Kernel, LibraryKernel, Outputs, ProcessKernel, Protocol, Trial,
};

use super::{Args, explained};
use crate::error::Explained;
use crate::program;

/// The kernel of `--lib` or `--cmd`.
pub(super) fn of(args: &Args) -> Result<Box<dyn Kernel>> {
    if let Some(library) = &args.lib {
        let worker = [program::own()?.into_os_string(), OsString::from("fuzz-worker")];
        // A bare name would be searched for in the system's folders.
        let is_bare = library.parent().is_none_or(|folder| folder.as_os_str().is_empty());
        let library = if is_bare { Path::new(".").join(library) } else { library.clone() };
        let refused = |problem: String| {
            let message = format!("--lib: {}: {problem}", library.display());
            Explained::new(message, "name the shared library of the kernel")
        };
        let found = std::fs::metadata(&library).map_err(|e| refused(e.to_string()))?;
        if !found.is_file() {
            return Err(refused("found no regular file, expected a shared library".into()).into());
        }
        let kernel = LibraryKernel::new(&worker, &library, args.timeout).map_err(explained)?;
        return Ok(Box::new(kernel));
    }
    let command = args.cmd.as_deref().unwrap_or_default();
    let words = shlex::split(command).ok_or_else(|| {
        Explained::new(format!("--cmd: found `{command}`, a quote is open"), "close the quote")
    })?;
    let protocol = if args.persistent { Protocol::Persistent } else { Protocol::PerCase };
    Ok(Box::new(ProcessKernel::new(&words, protocol, args.timeout).map_err(explained)?))
}

/// A kernel that receives the reference's packed weights only if `reference` is set.
pub(super) struct ReferenceFilter<'k> {
    pub(super) kernel: &'k mut dyn Kernel,
    pub(super) reference: bool,
}

impl Kernel for ReferenceFilter<'_> {
    fn run(&mut self, trial: &Trial) -> Result<Outputs, Fault> {
        if self.reference {
            return self.kernel.run(trial);
        }
        self.kernel.run(&Trial { reference: Default::default(), ..trial.clone() })
    }
}
