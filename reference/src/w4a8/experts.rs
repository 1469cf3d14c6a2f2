//! Stored experts of any format, ready to run.

use std::borrow::Cow;

use super::ENGINES;
use super::moe::{ExpertLayer, ExpertOptions};
use super::stored::{MoeDescription, expert_bytes};
use crate::container::Container;
use crate::layouts::cpu::CpuFormat;
use crate::{Error, Result};

/// Names of the kernels that run experts of `format` on this CPU, slowest first.
pub fn kernel_names(format: &CpuFormat) -> Vec<&'static str> {
    let engine = ENGINES.iter().find(|engine| engine.format == format);
    engine.map_or(Vec::new(), |engine| (engine.kernels)())
}

/// The experts of `module` (`model.layers.0.mlp.experts`) in a packed file, of any format. w13 and w2
/// borrow the file's bytes; a page of a mapped file is read when a token first needs it.
///
/// # Errors
/// As [`expert_bytes`] and [`layer`].
pub fn load<'a>(
    file: &Container<'a>,
    module: &str,
    options: ExpertOptions<'_>,
) -> Result<Box<dyn ExpertLayer + 'a>> {
    let (described, bytes) = expert_bytes(file, module)?;
    layer(described, bytes, options)
}

/// The layer of a description and the bytes of w13 and w2, `[E][packed_len]` each, from any source.
///
/// # Errors
/// [`Error::Size`] for a kernel that the format or this CPU lacks; [`Error::Unsupported`] for routing or
/// an activation that the format's layer lacks; [`Error::Shape`] for bytes that do not fit.
pub fn layer<'a>(
    described: MoeDescription,
    bytes: [Cow<'a, [u8]>; 2],
    options: ExpertOptions<'_>,
) -> Result<Box<dyn ExpertLayer + 'a>> {
    match ENGINES.iter().find(|engine| engine.format == described.format) {
        Some(engine) => (engine.load)(described, bytes, options),
        None => Err(Error::unsupported(described.format.name, "no layer runs this format")),
    }
}
