//! Files with failing cases, which run first in the next campaign.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use marlinspike::case::{Case, Op};
use sha2::{Digest as _, Sha256};

use super::{Campaign, CampaignError, Finding, Trial};

/// Extension of cases that are being written.
const PART: &str = "safetensors-part";
/// Largest file that is read back.
const LIMIT: u64 = 1 << 30;

/// What turns the system's error about `path` into the campaign's.
pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> CampaignError {
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
    sweep(folder);
    let case = &finding.failure.case;
    let words: String = finding
        .signature
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    let config = serde_json::Value::Object(case.config.to_json()).to_string();
    let digest = hex(&Sha256::digest(config));
    let name = format!("{}-{words}-{}.safetensors", case.op, &digest[..8]);
    let path = folder.join(name.replace("--", "-"));
    let bytes = case.to_bytes()?;
    write(&path, &bytes)?;
    Ok(path)
}

/// Writes a whole case: under a temporary name, which is locked until the file has its own.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), CampaignError> {
    let part = path.with_extension(PART);
    let mut file = File::create(&part).map_err(io(&part))?;
    // Where files cannot be locked, none is removed as a leftover.
    let _ = file.lock();
    file.write_all(bytes).map_err(io(&part))?;
    fs::rename(&part, path).map_err(io(path))
}

/// Removes the temporary files of killed processes. Those of living ones are locked.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_part = path.extension().is_some_and(|e| e == PART);
        let file = || File::options().read(true).write(true).open(&path);
        if is_part
            && entry.file_type().is_ok_and(|t| t.is_file())
            && file().is_ok_and(|file| file.try_lock().is_ok())
        {
            // Another process may have removed it first.
            let _ = fs::remove_file(&path);
        }
    }
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 of a case's operation, config and inputs, which determine a rerun. Its name, its origin
/// and its outputs are left out.
pub(super) fn content(case: &Case<'_>) -> String {
    let mut hash = Sha256::new();
    // A length before each part, so that no two cases give the same bytes.
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(case.op.name().as_bytes());
    part(serde_json::Value::Object(case.config.to_json()).to_string().as_bytes());
    for (name, tensor) in &case.inputs {
        part(name.as_bytes());
        part(format!("{:?} {:?}", tensor.dtype(), tensor.shape()).as_bytes());
        part(tensor.bytes());
    }
    hex(&hash.finalize())
}

/// The inputs of the kept cases of the campaign's operation and filter in `folder`; empty if the folder
/// does not exist. Sizes and flags of the filter are not compared, since shrinking changes them.
///
/// # Errors
/// [`CampaignError::Io`], and [`CampaignError::Case`] for a file that is not a case.
pub fn kept(campaign: &Campaign, folder: &Path) -> Result<Vec<(PathBuf, Trial)>, CampaignError> {
    let mut trials = Vec::new();
    sweep(folder);
    for path in case_files(folder)? {
        let (_, case) = read_case(&path)?;
        if case.op == campaign.op() && campaign.filter.may_have_shrunk_to(&case.config) {
            trials.push((path, Trial::new(case, &campaign.outputs)?));
        }
    }
    Ok(trials)
}

/// The case files of a folder, sorted; empty if the folder does not exist.
pub(super) fn case_files(folder: &Path) -> Result<Vec<PathBuf>, CampaignError> {
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
    Ok(paths)
}

/// The bytes of a regular file of at most `limit` bytes.
pub(super) fn read_file(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let refused = |kind, problem: String| Err(io::Error::new(kind, problem));
    let found = fs::metadata(path)?;
    // A pipe would wait for its writer, and a device may have no end.
    if !found.is_file() {
        return refused(io::ErrorKind::InvalidInput, "not a regular file".to_owned());
    }
    if found.len() > limit {
        let problem = format!("found a file of {} bytes, expected at most {limit}", found.len());
        return refused(io::ErrorKind::FileTooLarge, problem);
    }
    fs::read(path)
}

/// The bytes of a case file, and the case.
pub(super) fn read_case(path: &Path) -> Result<(Vec<u8>, Case<'static>), CampaignError> {
    let bytes = read_file(path, LIMIT).map_err(io(path))?;
    let parsed = Case::parse(&bytes).map(owned);
    let case = parsed.map_err(|source| CampaignError::Case { path: path.to_owned(), source })?;
    Ok((bytes, case))
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
