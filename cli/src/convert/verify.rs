//! `convert --verify`: compares every byte of a converted folder with its manifest.

use std::path::Path;

use marlinspike_model::convert::verify::{Damage, verify};
use serde_json::json;

use crate::Outcome;
use crate::output::print;
use crate::style::{counted, printable, size};

/// Runs `convert --verify`.
///
/// # Errors
/// See [`marlinspike_model::convert::verify::verify`].
pub(super) fn run(dir: &Path, against: Option<&Path>, json: bool) -> anyhow::Result<Outcome> {
    let found = verify(dir, against).map_err(|error| super::explain(error, dir))?;
    let mut text = String::new();
    if json {
        let damaged = |d: &Damage| json!({"name": d.name, "reason": d.reason});
        let value = json!({
            "verified": found.damaged.is_empty(),
            "files": found.files,
            "bytes": found.bytes,
            "damaged": found.damaged.iter().map(damaged).collect::<Vec<_>>(),
        });
        text = format!("{value}\n");
    } else {
        for Damage { name, reason } in &found.damaged {
            text.push_str(&printable(&format!("damaged: {name}: {reason}")));
            text.push('\n');
        }
        if found.damaged.is_empty() {
            let (files, bytes) = (found.files, size(found.bytes));
            text.push_str(&format!(
                "{}: {} verified, {bytes}\n",
                dir.display(),
                counted(files, "file")
            ));
        }
    }
    print(&text)?;
    Ok(if found.damaged.is_empty() { Outcome::Pass } else { Outcome::Mismatch })
}
