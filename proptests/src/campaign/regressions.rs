//! Files with failing cases, which run first in the next campaign.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use marlinspike::case::{Case, Op};

use super::{Campaign, CampaignError, Finding, Trial};

/// Largest file that is read back.
const LIMIT: u64 = 1 << 30;

/// What turns the system's error about `path` into the campaign's.
fn io(path: &Path) -> impl FnOnce(io::Error) -> CampaignError {
    let path = path.to_owned();
    move |source| CampaignError::Io { path, source }
}

/// Writes the minimal case of a finding into `folder`; the name follows from the finding's
/// signature and the case's config, so a repeated finding replaces its file.
///
/// # Errors
/// [`CampaignError::Io`]; [`CampaignError::Reference`] for a case that cannot be written.
pub fn keep(folder: &Path, finding: &Finding) -> Result<PathBuf, CampaignError> {
    fs::create_dir_all(folder).map_err(io(folder))?;
    let case = &finding.failure.case;
    let words: String = finding
        .signature
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    let config = serde_json::Value::Object(case.config.to_json()).to_string();
    let name = format!("{}-{words}-{:08x}.safetensors", case.op, fnv1a(config.as_bytes()));
    let path = folder.join(name.replace("--", "-"));
    let bytes = case.to_bytes()?;
    let part = path.with_extension("part");
    fs::write(&part, bytes).map_err(io(&part))?;
    fs::rename(&part, &path).map_err(io(&path))?;
    Ok(path)
}

/// 32-bit FNV-1a, for file names.
fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// The inputs of the kept cases of `op` in `folder`; empty if the folder does not exist.
///
/// # Errors
/// [`CampaignError::Io`], and [`CampaignError::Reference`] for a file that is not a case.
pub fn kept(campaign: &Campaign, folder: &Path) -> Result<Vec<(PathBuf, Trial)>, CampaignError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io(folder)(error)),
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(io(folder))?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            paths.push(path);
        }
    }
    paths.sort();
    let mut trials = Vec::new();
    for path in paths {
        let length = fs::metadata(&path).map_err(io(&path))?.len();
        if length > LIMIT {
            let problem = format!("found a file of {length} bytes, expected at most {LIMIT}");
            return Err(io(&path)(io::Error::new(io::ErrorKind::FileTooLarge, problem)));
        }
        let bytes = fs::read(&path).map_err(io(&path))?;
        let case = owned(Case::parse(&bytes)?);
        if case.op != campaign.op() {
            continue;
        }
        trials.push((path, Trial::new(case, &campaign.outputs)?));
    }
    Ok(trials)
}

/// The case, owning its tensors.
fn owned(case: Case<'_>) -> Case<'static> {
    let op: Op = case.op;
    let own =
        |tensors: std::collections::BTreeMap<String, marlinspike::num::tensor::Tensor<'_>>| {
            tensors.into_iter().map(|(name, tensor)| (name, tensor.into_owned())).collect()
        };
    Case {
        op,
        name: case.name,
        config: case.config,
        raw_config: case.raw_config,
        provenance: case.provenance,
        inputs: own(case.inputs),
        outputs: own(case.outputs),
    }
}
