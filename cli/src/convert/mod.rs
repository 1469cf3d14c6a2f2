//! `marlinspike convert`: converts a checkpoint into a kernel's format; `convert --verify` verifies
//! it.

mod args;
mod choices;
pub mod preparation;
mod progress;
mod verify;

use std::io::ErrorKind;
use std::path::Path;
use std::time::Instant;

use marlinspike_model::convert::error::{ConvertError, Refused};
use marlinspike_model::convert::settings::Format;
use marlinspike_model::convert::side::LeftOut;
use marlinspike_model::convert::{self, Summary};
use serde_json::json;

use crate::error::Explained;
use crate::output::print;
use crate::style::{counted, printable, size};
use crate::{Outcome, hint};
pub use args::Args;
use progress::Reporter;

/// Runs the command.
///
/// # Errors
/// The reason why the conversion was refused or failed, with a help line.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let begun = Instant::now();
    if let Some(dir) = &args.verify {
        return verify::run(dir, args.against.as_deref(), args.json);
    }
    let (Some(model_dir), Some(out_dir), Some(to)) = (&args.model_dir, &args.out_dir, args.to)
    else {
        anyhow::bail!("expected MODEL_DIR, OUT_DIR and --to");
    };
    hint::expect_model(model_dir)?;
    let options = args.options(to)?;
    let done = match args.json {
        true => convert::convert(model_dir, out_dir, &options, &()),
        false => convert::convert(model_dir, out_dir, &options, &Reporter::new()),
    };
    let summary = done.map_err(|error| explain(error, model_dir))?;
    let seconds = begun.elapsed().as_secs_f64();
    print(&match args.json {
        true => as_json(&summary, seconds),
        false if summary.already_complete => {
            format!("{}: already complete, every byte verified\n", out_dir.display())
        }
        false => as_text(&summary, options.format, seconds),
    })?;
    Ok(Outcome::Pass)
}

/// The summary as one JSON object on one line.
fn as_json(summary: &Summary, seconds: f64) -> String {
    let unsupported = |r: &Refused| json!({"module": r.module, "reasons": r.reasons});
    let left_out = |l: &LeftOut| json!({"name": l.name, "reason": l.reason});
    let value = json!({
        "converted": summary.converted,
        "activations_quantized": summary.activations_quantized,
        "copied_tensors": summary.copied,
        "unsupported": summary.unsupported.iter().map(unsupported).collect::<Vec<_>>(),
        "notes": summary.notes,
        "files": summary.files,
        "kept_files": summary.kept,
        "rewritten_files": summary.rewritten,
        "side_files": summary.side.copied,
        "left_out": summary.side.left_out.iter().map(left_out).collect::<Vec<_>>(),
        "bytes": summary.bytes,
        "seconds": seconds,
        "already_complete": summary.already_complete,
    });
    format!("{value}\n")
}

/// The summary as text.
fn as_text(summary: &Summary, format: Format, seconds: f64) -> String {
    let mut text = format!(
        "converted {} to {}, copied {}: {} in {}, {seconds:.1} s\n",
        counted(summary.converted, "layer"),
        format.name(),
        counted(summary.copied, "tensor"),
        size(summary.bytes),
        counted(summary.files, "file"),
    );
    if summary.kept > 0 {
        text.push_str(&format!("{} finished by an earlier run\n", counted(summary.kept, "file")));
    }
    for name in &summary.rewritten {
        let line = format!("damaged since an earlier run, written again: {name}");
        text.push_str(&printable(&line));
        text.push('\n');
    }
    for l in &summary.side.left_out {
        text.push_str(&printable(&format!("not copied: {}: {}", l.name, l.reason)));
        text.push('\n');
    }
    if summary.activations_quantized > 0 {
        text.push_str(&format!(
            "{} of the layers had 16-bit activations (W4A16); they now run as W4A8, with \
             activations quantized to int8 per token\n",
            summary.activations_quantized
        ));
    }
    for note in &summary.notes {
        text.push_str(&printable(note));
        text.push('\n');
    }
    for r in &summary.unsupported {
        let line = format!("copied unchanged: {}: {}", r.module, r.reasons.join("; "));
        text.push_str(&printable(&line));
        text.push('\n');
    }
    text
}

/// Adds a help line to an error.
fn explain(error: ConvertError, model_dir: &Path) -> anyhow::Error {
    let help = match &error {
        ConvertError::Refused { .. } => {
            "copy these modules unchanged with `--skip-unsupported`; `marlinspike inspect` shows \
             the reasons for all"
        }
        ConvertError::Dtype { .. } => "give `--dtype float16` or `--dtype bfloat16`",
        ConvertError::Occupied { .. } => {
            "name another folder, or replace an older conversion with `--force`, which removes \
             only the files that its manifest lists"
        }
        ConvertError::Locked { .. } => {
            "wait for the other process or stop it; its lock ends with \
            it"
        }
        ConvertError::InputChanged { .. } => {
            "run again when no other program writes to the model \
            folder"
        }
        ConvertError::ReadBack { .. } => "another program or the disk changed the file; run again",
        ConvertError::NoManifest { .. } => "pass the output folder of a conversion",
        ConvertError::Io { source, .. } => io_help(source.kind()),
        ConvertError::Manifest { .. } => "name another folder, or empty this one",
        ConvertError::NotQuantized { .. }
            if let Some(layout) = hint::converted_layout(model_dir) =>
        {
            let help = format!(
                "the folder is the output of a conversion to {layout}: convert the original checkpoint, or \
                 use the folder with `marlinspike run` and `generate`"
            );
            return Explained::new(error, help).into();
        }
        ConvertError::NotQuantized { .. } => {
            "add a quantization_config to config.json, or a quantize_config.json"
        }
        _ => return error.into(),
    };
    Explained::new(error, help).into()
}

/// What to do after an error of the file system.
fn io_help(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "make the folder writable, or name another one"
        }
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "free space, then repeat the command to continue; finished files are kept"
        }
        ErrorKind::FileTooLarge => {
            "state a smaller --max-shard-size; finished files are kept where shards stay the same"
        }
        ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory => {
            "see that no other program changes the folder, then repeat the command to continue"
        }
        ErrorKind::InvalidFilename | ErrorKind::InvalidInput | ErrorKind::Unsupported => {
            "name another folder"
        }
        _ => "repeat the command to continue; finished files are kept",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_that_may_pass_are_to_be_tried_again() {
        for kind in [ErrorKind::PermissionDenied, ErrorKind::ReadOnlyFilesystem] {
            assert_eq!(io_help(kind), "make the folder writable, or name another one");
        }
        assert!(io_help(ErrorKind::StorageFull).starts_with("free space, then repeat"));
        assert!(!io_help(ErrorKind::InvalidFilename).contains("repeat"));
        assert!(io_help(ErrorKind::Interrupted).starts_with("repeat the command to continue"));
    }
}
