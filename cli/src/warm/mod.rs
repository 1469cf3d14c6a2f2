//! `marlinspike warm`: compiles the CUDA kernels into the cache ahead of use.

use std::path::PathBuf;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use marlinspike_accel::cache::{DEFAULT_LIMIT, FOLDER_VARIABLE, ModuleCache, Origin};
use marlinspike_accel::nvrtc::{Arch, Nvrtc};
use marlinspike_accel::registry::Row;
use marlinspike_accel::warm::{Job, jobs, warm};
use marlinspike_accel::{Device, registry};

use crate::Outcome;
use crate::error::{Explained, of_gpu};
use crate::output::print;

const DETAILS: &str = "\
Without this command a kernel is compiled on first use, which takes up to a second, and cached in a
folder: MARLINSPIKE_CACHE, or `marlinspike` in the user's cache folder. A cached module's key covers
everything that it was compiled from, so an outdated module is never loaded.

Examples:
  marlinspike warm                                    for this machine's GPU
  marlinspike warm --capability 9.0 --capability 8.0  for these GPUs, on any machine
  marlinspike warm --capability 9.0 --list            only list the modules

Exit codes:
  0  every module is in the cache
  1  a module could not be written to the cache
  2  bad input or usage, no GPU to compile for, or no compiler";

/// Compile the CUDA kernels ahead of use.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = DETAILS)]
pub struct Args {
    /// Compute capability to compile for; may be repeated [default: this machine's GPU].
    #[arg(long, value_parser = capability, value_name = "MAJOR.MINOR")]
    pub capability: Vec<(u32, u32)>,
    /// Operation to compile; may be repeated [default: all].
    #[arg(long, value_name = "NAME")]
    pub operation: Vec<String>,
    /// Compile only what packages ship: experts and linear layers of int4 and MXFP4 weights in bf16.
    #[arg(long)]
    pub common: bool,
    /// Folder of the cache.
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Only list the operations and their number of modules.
    #[arg(long)]
    pub list: bool,
}

/// `major.minor`, of a GPU that some operation runs on.
fn capability(text: &str) -> Result<(u32, u32), String> {
    let parse = || {
        let (major, minor) = text.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    };
    match parse() {
        Some((major, minor)) if (7..100).contains(&major) && minor < 10 => Ok((major, minor)),
        _ => Err(format!("found {text:?}, expected a compute capability such as 8.0 or 9.0")),
    }
}

/// The operations to compile.
fn rows(names: &[String]) -> anyhow::Result<Vec<&'static Row>> {
    let known = || registry().iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
    let find = |name: &String| {
        registry().iter().copied().find(|row| row.name == name).ok_or_else(|| {
            let message = format!("--operation: found {name:?}, expected an operation");
            Explained::new(message, format!("the operations are {}", known())).into()
        })
    };
    if names.is_empty() { Ok(registry().to_vec()) } else { names.iter().map(find).collect() }
}

/// The architectures to compile for.
fn archs(capabilities: &[(u32, u32)]) -> anyhow::Result<Vec<Arch>> {
    if !capabilities.is_empty() {
        return Ok(capabilities.iter().copied().map(Arch::of_device).collect());
    }
    match Device::open() {
        Ok(device) => Ok(vec![Arch::of_device(device.compute_capability())]),
        Err(error) => {
            let help = "name the GPU to compile for: `marlinspike warm --capability 9.0`";
            Err(Explained::new(error, help).into())
        }
    }
}

/// The results for the modules of one operation.
#[derive(Debug, Default)]
struct Count {
    modules: usize,
    cached: usize,
    compiled: usize,
    not_kept: usize,
}

fn count<'j>(of: impl Iterator<Item = (&'j Job, Option<Origin>)>) -> Count {
    let mut count = Count::default();
    for (_, origin) in of {
        count.modules += 1;
        match origin {
            Some(Origin::Cached) => count.cached += 1,
            Some(Origin::Compiled) => count.compiled += 1,
            Some(Origin::NotKept) => count.not_kept += 1,
            None => {}
        }
    }
    count
}

fn table(rows: &[&'static Row], jobs: &[Job], origins: Option<&[Origin]>) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    let mut header = vec!["operation", "modules"];
    if origins.is_some() {
        header.extend(["cached before", "compiled", "not cached"]);
    }
    table.set_header(header);
    for row in rows {
        let mine = jobs.iter().enumerate().filter(|(_, job)| job.row.name == row.name);
        let c = count(mine.map(|(i, job)| (job, origins.map(|origins| origins[i]))));
        let mut line = vec![row.name.to_owned(), c.modules.to_string()];
        if origins.is_some() {
            line.extend([c.cached, c.compiled, c.not_kept].map(|n| n.to_string()));
        }
        table.add_row(line);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Runs the command.
///
/// # Errors
/// Returns an error for an unknown operation, without a compiler, if the compiler rejects a source,
/// and without a GPU if no capability is given.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let rows = rows(&args.operation)?;
    let archs = archs(&args.capability)?;
    let mut jobs = jobs(&rows, &archs)?;
    if args.common {
        jobs.retain(Job::is_common);
    }
    if args.list {
        print(&format!("{}\n", table(&rows, &jobs, None)))?;
        return Ok(Outcome::Pass);
    }
    let cache = match &args.cache {
        Some(folder) => ModuleCache::at(folder, DEFAULT_LIMIT),
        None => ModuleCache::from_environment(),
    };
    let Some(folder) = cache.folder() else {
        let help = format!("name a folder with --cache or in the variable {FOLDER_VARIABLE}");
        return Err(Explained::new("there is no cache to fill", help).into());
    };
    let nvrtc = Nvrtc::open();
    let origins = warm(&cache, &nvrtc, &jobs).map_err(of_gpu)?;
    let kept = !origins.contains(&Origin::NotKept);
    let text = format!("{}\n\ncache: {}\n", table(&rows, &jobs, Some(&origins)), folder.display());
    print(&text)?;
    Ok(if kept { Outcome::Pass } else { Outcome::Mismatch })
}
