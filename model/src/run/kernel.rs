//! Kernels by name.

use marlinspike::layouts::CPU_FORMATS;
use marlinspike::layouts::cpu::CpuFormat;
use marlinspike::w4a8::{experts, linears};

use super::error::RunError;

fn unknown(found: &str, known: Vec<&'static str>) -> RunError {
    RunError::Kernel { found: found.to_owned(), known }
}

/// Fails unless a format has a kernel of this name on this CPU.
pub(super) fn check_any(name: Option<&str>) -> Result<(), RunError> {
    let Some(name) = name else { return Ok(()) };
    let mut known: Vec<_> = CPU_FORMATS.iter().flat_map(|f| experts::kernel_names(f)).collect();
    known.dedup();
    match known.contains(&name) {
        true => Ok(()),
        false => Err(unknown(name, experts::kernel_names(CPU_FORMATS[0]))),
    }
}

/// Fails unless experts of `format` have a kernel of this name on this CPU.
pub(super) fn check_kernel(format: &CpuFormat, name: Option<&str>) -> Result<(), RunError> {
    let known = experts::kernel_names(format);
    match name {
        Some(name) if !known.contains(&name) => Err(unknown(name, known)),
        _ => Ok(()),
    }
}

/// Fails unless linear layers of `format` have a kernel of this name on this CPU.
pub(super) fn check_linear(format: &CpuFormat, name: Option<&str>) -> Result<(), RunError> {
    let known = linears::kernel_names(format);
    match name {
        Some(name) if !known.contains(&name) => Err(unknown(name, known)),
        _ => Ok(()),
    }
}
