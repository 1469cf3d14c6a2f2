//! The manifest: every golden file with its producer and hash.

use std::{
    collections::HashSet,
    fs,
    path::{Component, Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{GoldenError, Result, find_root};

/// Manifest version that this crate reads.
const VERSION: u64 = 1;

/// A listed file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Path relative to the golden folder, with `/`.
    pub path: String,
    /// SHA-256 of the whole file, 64 lower-case hexadecimal digits.
    pub sha256: String,
    /// Length in bytes.
    pub bytes: u64,
}

/// A case file: inputs, configuration and upstream's outputs of one operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaseEntry {
    /// Path relative to the golden folder, with `/`.
    pub path: String,
    /// Operation: `linear`, `moe`, `router`, ...
    pub op: String,
    /// The case's own name.
    pub name: String,
    /// Program that produced the outputs: `vllm`, `kleidiai`.
    pub producer: String,
    /// Its version.
    pub version: String,
    /// SHA-256 of the whole file, 64 lower-case hexadecimal digits.
    pub sha256: String,
    /// Length in bytes.
    pub bytes: u64,
    /// The case's own statement of what produced the outputs.
    pub provenance: String,
    /// The diagnosis of the producer's known fault, where the recorded outputs are wrong:
    /// `upstream-k-slice-scales`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known_fault: Option<String>,
}

impl CaseEntry {
    /// The file itself.
    pub fn file(&self) -> FileEntry {
        FileEntry { path: self.path.clone(), sha256: self.sha256.clone(), bytes: self.bytes }
    }
}

/// A safetensors table that belongs to no operation: upstream's permutations, and
/// layouts that no supported layer uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableEntry {
    /// Path relative to the golden folder, with `/`.
    pub path: String,
    /// The table's own name.
    pub name: String,
    /// Program that produced it.
    pub producer: String,
    /// Its version.
    pub version: String,
    /// SHA-256 of the whole file, 64 lower-case hexadecimal digits.
    pub sha256: String,
    /// Length in bytes.
    pub bytes: u64,
    /// The table's own statement of what produced it.
    pub provenance: String,
}

impl TableEntry {
    /// The file itself.
    pub fn file(&self) -> FileEntry {
        FileEntry { path: self.path.clone(), sha256: self.sha256.clone(), bytes: self.bytes }
    }
}

/// A small model directory in the layout of a Hugging Face checkpoint, with weights
/// that the producing package computed from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointEntry {
    /// Name of the checkpoint and of its directory.
    pub name: String,
    /// Model directory, relative to the golden folder.
    pub dir: String,
    /// Checkpoint format: `gptq`, `awq`, `pack-quantized`, `fp8`, ...
    pub format: String,
    /// One sentence about what this checkpoint covers.
    pub about: String,
    /// Package that packed the weights.
    pub producer: String,
    /// Its version.
    pub version: String,
    /// The script that called it, relative to the repository.
    pub script: String,
    /// Files of the model directory.
    pub files: Vec<FileEntry>,
    /// Files outside the model directory. For each module `M` they hold `M.weight`, the
    /// dequantized float32 [N, K] as the package computes it, and, where vLLM's helpers produce
    /// them, `M.marlin_qweight`, `M.marlin_scales`, `M.marlin_zeros`, `M.marlin_global_scale`,
    /// `M.g_idx_sort_indices`, `M.sorted_g_idx`. The file's metadata names the producers.
    pub expected: Vec<FileEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestFile {
    version: u64,
    cases: Vec<CaseEntry>,
    tables: Vec<TableEntry>,
    checkpoints: Vec<CheckpointEntry>,
    #[serde(default)]
    models: Vec<CheckpointEntry>,
}

/// The golden data of one folder, as its `manifest.json` lists them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    root: PathBuf,
    cases: Vec<CaseEntry>,
    tables: Vec<TableEntry>,
    checkpoints: Vec<CheckpointEntry>,
    models: Vec<CheckpointEntry>,
}

impl Manifest {
    /// Reads the manifest of the folder that [`find_root`] finds. It reads only the list;
    /// [`Manifest::verify`] reads the files.
    ///
    /// # Errors
    /// Those of [`find_root`] and [`Manifest::load_from`].
    pub fn load() -> Result<Self> {
        Self::load_from(&find_root()?)
    }

    /// Reads `root/manifest.json`.
    ///
    /// # Errors
    /// [`GoldenError::Io`], [`GoldenError::ManifestSyntax`],
    /// [`GoldenError::ManifestVersion`], and [`GoldenError::UnsafePath`] or
    /// [`GoldenError::DuplicatePath`] for invalid entries.
    pub fn load_from(root: &Path) -> Result<Self> {
        let path = root.join("manifest.json");
        let text = fs::read_to_string(&path)
            .map_err(|source| GoldenError::Io { path: path.clone(), source })?;
        let file: ManifestFile = serde_json::from_str(&text)
            .map_err(|source| GoldenError::ManifestSyntax { path: path.clone(), source })?;
        if file.version != VERSION {
            return Err(GoldenError::ManifestVersion {
                path,
                found: file.version,
                expected: VERSION,
            });
        }
        let manifest = Self {
            root: root.to_path_buf(),
            cases: file.cases,
            tables: file.tables,
            checkpoints: file.checkpoints,
            models: file.models,
        };
        let mut seen = HashSet::new();
        for entry in manifest.files() {
            check_path(&entry.path)?;
            if !seen.insert(entry.path.clone()) {
                return Err(GoldenError::DuplicatePath { path: entry.path });
            }
        }
        for checkpoint in manifest.checkpoints.iter().chain(&manifest.models) {
            check_path(&checkpoint.dir)?;
        }
        Ok(manifest)
    }

    /// The golden folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// All cases, in the manifest's order (by path).
    pub fn cases(&self) -> &[CaseEntry] {
        &self.cases
    }

    /// Files of the cases of one operation, in the manifest's order; empty for
    /// an operation without cases.
    pub fn case_paths(&self, op: &str) -> Vec<PathBuf> {
        self.cases
            .iter()
            .filter(|case| case.op == op)
            .map(|case| self.root.join(&case.path))
            .collect()
    }

    /// Files of all cases, followed by those in the folder that `MARLINSPIKE_EXTRA_CASES` names,
    /// if it is set.
    ///
    /// # Errors
    /// [`GoldenError::Io`] when that folder cannot be read.
    pub fn all_case_paths(&self) -> Result<Vec<PathBuf>> {
        let mut paths: Vec<_> = self.cases.iter().map(|case| self.path(&case.path)).collect();
        if let Some(folder) = std::env::var_os("MARLINSPIKE_EXTRA_CASES").map(PathBuf::from) {
            let io_error = |source| GoldenError::Io { path: folder.clone(), source };
            for entry in fs::read_dir(&folder).map_err(io_error)? {
                paths.push(entry.map_err(io_error)?.path());
            }
        }
        Ok(paths)
    }

    /// All tables.
    pub fn tables(&self) -> &[TableEntry] {
        &self.tables
    }

    /// All checkpoints.
    pub fn checkpoints(&self) -> &[CheckpointEntry] {
        &self.checkpoints
    }

    /// The checkpoint of this name.
    ///
    /// # Errors
    /// [`GoldenError::UnknownCheckpoint`].
    pub fn checkpoint(&self, name: &str) -> Result<&CheckpointEntry> {
        self.checkpoints.iter().find(|entry| entry.name == name).ok_or_else(|| {
            GoldenError::UnknownCheckpoint {
                name: name.to_owned(),
                known: self.checkpoints.iter().map(|entry| entry.name.clone()).collect(),
            }
        })
    }

    /// Models that generate text, with tokenizers. Their expectations hold `input_ids`, `logits` in
    /// float64 rounded once, `logits_int8` with 8-bit activations, and greedy `new_tokens`.
    pub fn models(&self) -> &[CheckpointEntry] {
        &self.models
    }

    /// The absolute path of a manifest path.
    pub fn path(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }

    /// Every listed file: the cases, the tables, then the files and expectations of checkpoints and models.
    pub fn files(&self) -> impl Iterator<Item = FileEntry> + '_ {
        let cases = self.cases.iter().map(CaseEntry::file);
        let tables = self.tables.iter().map(TableEntry::file);
        let checkpoints = self
            .checkpoints
            .iter()
            .chain(&self.models)
            .flat_map(|entry| entry.files.iter().chain(&entry.expected).cloned());
        cases.chain(tables).chain(checkpoints)
    }
}

fn check_path(path: &str) -> Result<()> {
    let plain = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    if plain && path.starts_with("data/") && !path.contains('\\') {
        Ok(())
    } else {
        Err(GoldenError::UnsafePath { path: path.to_owned() })
    }
}
