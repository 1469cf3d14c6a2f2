//! What a path is that was given in place of a model folder or a case file, and what to give instead.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use marlinspike::bounded_json;
use marlinspike::case::FORMAT;
use marlinspike::container::{ContainerError, FileKind, Header};
use marlinspike_model::model::{CONFIG_LIMIT, CONFIG_MEMORY};

use crate::error::Explained;

/// What a path is that is no model folder.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// Nothing, by a name like `owner/model`.
    ModelId,
    /// Nothing.
    Nothing,
    /// A file of a known kind, or safetensors.
    File(Option<FileKind>),
    /// The folder of a model in a Hugging Face cache, and the snapshot to use.
    CacheOfModel(Option<PathBuf>),
    /// A Hugging Face cache, and one of its models.
    Cache(PathBuf),
    /// A folder of case files.
    Cases,
    /// A folder with weights in files of another kind.
    Weights(PathBuf, FileKind),
    /// A folder of folders, one of which is a model.
    Parent(PathBuf),
    /// A folder without weights.
    NoWeights,
}

/// The kind of a file by its first bytes.
fn kind_of(path: &Path) -> Option<FileKind> {
    let mut start = Vec::new();
    let file = File::open(path).ok().filter(|f| f.metadata().is_ok_and(|m| m.is_file()))?;
    file.take(FileKind::BYTES as u64).read_to_end(&mut start).ok()?;
    FileKind::of(&start)
}

/// Whether a file is a case, by its header.
fn is_case(path: &Path) -> bool {
    let read = || {
        let mut file = File::open(path).ok()?;
        let len = file.metadata().ok().filter(fs::Metadata::is_file)?.len();
        let mut start = vec![0; 8];
        file.read_exact(&mut start).ok()?;
        let needed = Header::needed(&start, len).ok()?;
        file.take(needed - 8).read_to_end(&mut start).ok()?;
        Header::parse(&start, len).ok()
    };
    read().is_some_and(|h| h.metadata().get("format").is_some_and(|format| format == FORMAT))
}

/// The entries of a folder in the order of their names.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(10_000);
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn has_model(folder: &Path) -> bool {
    ["model.safetensors", "model.safetensors.index.json"].iter().any(|f| folder.join(f).exists())
}

/// The snapshot of a model's folder in a cache: that of `main`, else the newest.
fn snapshot(model: &Path) -> Option<PathBuf> {
    let main = fs::read_to_string(model.join("refs/main")).ok();
    let main = main.map(|commit| model.join("snapshots").join(commit.trim()));
    let changed = |path: &PathBuf| fs::metadata(path).and_then(|m| m.modified()).ok();
    let newest = || entries(&model.join("snapshots")).into_iter().max_by_key(changed);
    main.filter(|path| path.is_dir()).or_else(newest)
}

/// Whether a text is an id such as `Qwen/Qwen3-30B-A3B-GPTQ-Int4`.
fn is_model_id(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(plain)
    };
    text.split_once('/').is_some_and(|(owner, model)| part(owner) && part(model))
}

/// What `path` is; `None` for a folder with a model's files, or one that cannot be looked at.
fn found(path: &Path) -> Option<Found> {
    let Ok(metadata) = fs::metadata(path) else {
        if fs::symlink_metadata(path).is_ok() {
            return None;
        }
        let id = path.to_str().is_some_and(is_model_id);
        return Some(if id { Found::ModelId } else { Found::Nothing });
    };
    if !metadata.is_dir() {
        return Some(Found::File(kind_of(path)));
    }
    if has_model(path) {
        return None;
    }
    if path.join("snapshots").is_dir() {
        return Some(Found::CacheOfModel(snapshot(path)));
    }
    let entries = entries(path);
    let named = |prefix: &str, path: &Path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
    };
    let cache = entries.iter().find(|at| named("models--", at) && at.join("snapshots").is_dir());
    if let Some(model) = cache {
        return Some(Found::Cache(snapshot(model).unwrap_or_else(|| model.clone())));
    }
    let extension = |at: &Path, wanted: &[&str]| {
        at.extension().is_some_and(|e| wanted.iter().any(|wanted| e == *wanted))
    };
    if entries.iter().any(|at| extension(at, &["safetensors"]) && is_case(at)) {
        return Some(Found::Cases);
    }
    let weights =
        entries.iter().filter(|at| extension(at, &["gguf", "bin", "pt", "pth", "npz", "h5"]));
    let mut weights = weights.filter_map(|at| kind_of(at).map(|kind| (at, kind)));
    if let Some((at, kind)) = weights.next() {
        return Some(Found::Weights(at.clone(), kind));
    }
    let model = entries.iter().find(|at| at.is_dir() && has_model(at));
    Some(model.map_or(Found::NoWeights, |model| Found::Parent(model.clone())))
}

/// Refuses a path that is no model folder, and says what to give instead.
///
/// # Errors
/// [`Explained`]. A folder with a model's files passes; whether they are right is not looked at.
pub(crate) fn expect_model(path: &Path) -> Result<(), Explained> {
    let shown = path.display();
    let Some(found) = found(path) else { return Ok(()) };
    let (problem, help) = match found {
        Found::ModelId => {
            let name = path.file_name().unwrap_or_default().display();
            let help = format!(
                "to download a model of that id: `hf download {shown} --local-dir {name}`, then give the \
                 folder {name}"
            );
            ("no such folder; the name looks like a model id".to_owned(), help)
        }
        Found::Nothing => {
            ("no such folder".to_owned(), "give the folder with the model's config.json".to_owned())
        }
        Found::File(None) => {
            let folder = match path.parent().filter(|p| !p.as_os_str().is_empty()) {
                Some(folder) => format!("give its folder: {}", folder.display()),
                None => "give its folder: .".to_owned(),
            };
            let help = if is_case(path) {
                format!("the file is a case: `marlinspike check {shown}`")
            } else {
                folder
            };
            ("found a file, expected a model folder".to_owned(), help)
        }
        Found::File(Some(kind)) => {
            (format!("found {}, expected a model folder", kind.name()), kind.remedy().to_owned())
        }
        Found::CacheOfModel(Some(snapshot)) => (
            "found a model's folder of a Hugging Face cache, expected one of its snapshots".to_owned(),
            format!("give {}", snapshot.display()),
        ),
        Found::CacheOfModel(None) => (
            "found a model's folder of a Hugging Face cache without a snapshot".to_owned(),
            "download the model with `hf download OWNER/MODEL`".to_owned(),
        ),
        Found::Cache(model) => (
            "found a Hugging Face cache, expected the folder of one model".to_owned(),
            format!("for example {}", model.display()),
        ),
        Found::Cases => (
            "found a folder of case files, expected a model folder".to_owned(),
            format!("`marlinspike check {shown}` checks the cases"),
        ),
        Found::Weights(at, kind) => {
            (format!("no safetensors files, but {}, {}", at.display(), kind.name()), kind.remedy().to_owned())
        }
        Found::Parent(model) => (
            "no model.safetensors or model.safetensors.index.json".to_owned(),
            format!("give one of its folders, such as {}", model.display()),
        ),
        Found::NoWeights => (
            "no model.safetensors or model.safetensors.index.json".to_owned(),
            "give the folder with the model's config.json and safetensors files; a folder without them is \
             not completely downloaded"
                .to_owned(),
        ),
    };
    Err(Explained::new(format!("{shown}: {problem}"), help))
}

/// The kernel format of a folder that `convert` wrote.
pub(crate) fn converted_layout(folder: &Path) -> Option<String> {
    let mut text = String::new();
    let config = File::open(folder.join("config.json")).ok()?;
    config.take(CONFIG_LIMIT).read_to_string(&mut text).ok()?;
    let config = bounded_json::parse(&text, CONFIG_MEMORY).ok()?;
    let layout = config.get("marlinspike")?.get("layout");
    Some(layout.and_then(|layout| layout.as_str()).unwrap_or("a kernel's format").to_owned())
}

/// The help line of a file that is no case: what it is, and the command for it.
pub(crate) fn instead_of_case(path: &Path, error: Option<&ContainerError>) -> Option<String> {
    if let Some(ContainerError::OtherKind { kind }) = error {
        return Some(kind.remedy().to_owned());
    }
    let folder = path
        .parent()
        .map_or(Path::new("."), |p| if p.as_os_str().is_empty() { Path::new(".") } else { p });
    let is_model = folder.join("config.json").is_file() && has_model(folder);
    is_model.then(|| {
        let folder = folder.display();
        format!("the file is of a model: `marlinspike inspect {folder}` describes it, `marlinspike run {folder}` runs its layers")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(path: &Path) -> (String, String) {
        let refused = expect_model(path).unwrap_err();
        (refused.to_string(), refused.help().to_owned())
    }

    #[test]
    fn ids_are_owner_and_name() {
        assert!(is_model_id("Qwen/Qwen3-30B-A3B-GPTQ-Int4") && is_model_id("openai/gpt-oss-20b"));
        for text in ["model", "./model", "../x", "/data/model", "a/b/c", "a/", "x y/z"] {
            assert!(!is_model_id(text), "{text}");
        }
        let (problem, help) = refusal(Path::new("an-owner/has-this-model"));
        assert!(problem.contains("model id"), "{problem}");
        assert!(help.contains("hf download an-owner/has-this-model"), "{help}");
    }

    #[test]
    fn each_kind_of_path_has_its_own_answer() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let write = |name: &str, bytes: &[u8]| {
            fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            fs::write(at(name), bytes).unwrap();
        };
        write("hub/models--a--b/refs/main", b"c0ffee\n");
        write("hub/models--a--b/snapshots/0badc0de/config.json", b"{}");
        write("hub/models--a--b/snapshots/c0ffee/config.json", b"{}");
        write("gguf/model-q4.gguf", b"GGUF\x03\0\0\0");
        write("torch/pytorch_model.bin", b"PK\x03\x04archive/data.pkl");
        write("parent/one/model.safetensors", b"");
        write("empty/readme.md", b"text");
        write("kernel.py", b"import numpy as np\n");
        for (name, problem, help) in [
            ("hub/models--a--b", "snapshots", "snapshots/c0ffee"),
            ("hub", "Hugging Face cache", "models--a--b/snapshots/c0ffee"),
            ("gguf", "a GGUF file", "safetensors checkpoint"),
            ("gguf/model-q4.gguf", "found a GGUF file", "safetensors checkpoint"),
            ("torch", "PyTorch", "save_file"),
            ("parent", "no model.safetensors", "parent/one"),
            ("empty", "no model.safetensors", "config.json"),
            ("kernel.py", "found a text file", "fuzz --cmd"),
            ("absent", "no such folder", "config.json"),
        ] {
            let found = refusal(&at(name));
            assert!(found.0.contains(problem) && found.1.contains(help), "{name}: {found:?}");
        }
        assert_eq!(expect_model(&at("parent/one")).map_err(|e| e.to_string()), Ok(()));
    }
}
