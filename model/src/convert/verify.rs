//! `convert --verify`: checks every byte of a converted folder against its manifest.

use std::collections::BTreeSet;
use std::path::Path;

use rayon::prelude::*;

use super::error::ConvertError;
use super::folder::is_model_file;
use super::io::{self, Disk, Storage};
use super::manifest::{MANIFEST, Manifest, PROGRESS};
use crate::model::files;

/// A file that does not match the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The file; an input with its folder.
    pub name: String,
    /// What was found and expected.
    pub reason: String,
}

/// What verification found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Verification {
    /// Files whose bytes were hashed.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Files that are damaged, missing or not listed; empty when every byte is right.
    pub damaged: Vec<Damage>,
}

/// Hashes every file of a converted folder and, if `against` names the model folder, every input.
///
/// # Errors
/// As [`verify_in`].
pub fn verify(dir: &Path, against: Option<&Path>) -> Result<Verification, ConvertError> {
    verify_in(&Disk, dir, against)
}

/// Like [`verify`], for a folder in any storage.
///
/// # Errors
/// [`ConvertError::NoManifest`]; [`ConvertError::Io`] for a folder that cannot be
/// listed. Files that cannot be read count as damaged.
pub fn verify_in(
    storage: &dyn Storage,
    dir: &Path,
    against: Option<&Path>,
) -> Result<Verification, ConvertError> {
    let path = dir.join(MANIFEST);
    let damage = |name: &str, reason: String| Damage { name: name.to_owned(), reason };
    let one = |d: Damage| Verification { damaged: vec![d], ..Verification::default() };
    let manifest = match Manifest::read(storage, &path) {
        Ok(Some(manifest)) if manifest.complete => manifest,
        Ok(Some(_)) => {
            return Ok(one(damage(
                MANIFEST,
                "does not say that the folder is complete".to_owned(),
            )));
        }
        Ok(None) if storage.stat(&dir.join(PROGRESS)).is_ok() => {
            return Ok(one(damage(PROGRESS, "the conversion is unfinished".to_owned())));
        }
        Ok(None) => return Err(ConvertError::NoManifest { dir: dir.to_owned() }),
        Err(ConvertError::Manifest { reason, .. }) => return Ok(one(damage(MANIFEST, reason))),
        Err(e) => return Err(e),
    };
    let mut found = Verification::default();
    let mut note = |name: &str, bytes: u64, result: Result<(), String>| {
        found.files += 1;
        found.bytes += bytes;
        found.damaged.extend(result.err().map(|reason| damage(name, reason)));
    };
    let outputs: Vec<_> = manifest
        .files
        .par_iter()
        .with_max_len(1)
        .map(|f| {
            let hashed = io::hash_file(storage, &dir.join(&f.name)).map_err(|e| e.to_string());
            hashed.and_then(|found| compare(&found, (f.bytes, &f.sha256)))
        })
        .collect();
    for (file, result) in manifest.files.iter().zip(outputs) {
        note(&file.name, file.bytes, result);
    }
    if let Some(model) = against {
        let hash = |name: &str| -> Result<(u64, String), String> {
            let (file, _) = files::open(&model.join(name)).map_err(|e| e.to_string())?;
            io::hash_of(file).map_err(|e| e.to_string())
        };
        let inputs = manifest.inputs.par_iter().with_max_len(1);
        let inputs: Vec<_> =
            inputs.map(|i| compare(&hash(&i.name)?, (i.bytes, &i.sha256))).collect();
        for (input, result) in manifest.inputs.iter().zip(inputs) {
            note(&model.join(&input.name).display().to_string(), input.bytes, result);
        }
    }
    let listed: BTreeSet<&str> = manifest.files.iter().map(|f| f.name.as_str()).collect();
    let missing = manifest.planned.iter().filter(|n| !listed.contains(n.as_str()));
    found.damaged.extend(missing.map(|n| damage(n, "the manifest has no hash of it".to_owned())));
    for name in storage.list(dir).map_err(ConvertError::io(dir))? {
        let name = name.to_string_lossy();
        if is_model_file(&name) && !listed.contains(&*name) {
            found.damaged.push(damage(&name, "the manifest does not list it".to_owned()));
        }
    }
    Ok(found)
}

fn compare(found: &(u64, String), expected: (u64, &String)) -> Result<(), String> {
    let ((bytes, sha256), (expected_bytes, expected_sha256)) = (found, expected);
    if *bytes != expected_bytes {
        return Err(format!("{bytes} bytes, expected {expected_bytes}"));
    }
    match sha256 == expected_sha256 {
        true => Ok(()),
        false => Err(format!("its SHA-256 is {sha256}, expected {expected_sha256}")),
    }
}
