//! The manifest: what a folder was converted from, how, and the SHA-256 of each of its files.
//!
//! A finished folder has `marlinspike-manifest.json`, written after everything else is durable; while
//! a conversion is unfinished the same object is in `.marlinspike-progress.json`.
//!
//! | key | meaning |
//! | --- | --- |
//! | `version` | 1, the version of this object |
//! | `producer` | program and version |
//! | `complete` | whether all files are there |
//! | `options` | format, types, ranks and everything else that decides the output |
//! | `model` | SHA-256 over the names and hashes of the inputs |
//! | `inputs` | of each input file: `name`, `bytes`, `modified` (nanoseconds since 1970), `sha256` |
//! | `planned` | the names that this conversion writes, finished or not |
//! | `files` | of each finished output file: `name`, `bytes`, `sha256` |
//! | `digest` | SHA-256 of the object's compact JSON without this key |

use std::path::Path;

use marlinspike::moe::families::RoutingRule;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::error::ConvertError;
use super::io::{self, Storage};
pub use super::paths::{MANIFEST, PROGRESS};
use super::settings::Settings;

/// Version of the manifest.
const VERSION: u32 = 1;
/// Largest manifest that is read, in bytes: real ones have about 200 bytes per file.
const LIMIT: u64 = 8 << 20;

/// An input file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputRecord {
    /// Name in the model folder.
    pub name: String,
    /// Length.
    pub bytes: u64,
    /// Time of modification in nanoseconds since 1970, where the system has it.
    pub modified: Option<u64>,
    /// SHA-256; empty before the file has been read.
    pub sha256: String,
}

/// A finished output file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Name in the output folder.
    pub name: String,
    /// Length.
    pub bytes: u64,
    /// SHA-256.
    pub sha256: String,
}

/// The manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    version: u32,
    producer: String,
    /// Whether all files are there.
    pub complete: bool,
    options: Map<String, Value>,
    model: String,
    /// The input files, by name.
    pub inputs: Vec<InputRecord>,
    /// The names that the conversion writes.
    pub planned: Vec<String>,
    /// The finished files.
    pub files: Vec<FileRecord>,
}

/// The settings by the names of their options, and a hash of them. Every setting is named here: the
/// hash is of this JSON, so it is the same in every process and does not depend on how a type is printed.
fn options(settings: &Settings) -> Map<String, Value> {
    let Settings {
        format,
        // Options of the formats that read them.
        dtype: _,
        input: _,
        tp,
        ep,
        device,
        skip_unsupported,
        allow_underflow,
        shard_bytes,
        preparation,
        merge_projections,
    } = settings;
    let mut options = Map::new();
    let mut set = |key: &str, value: Value| options.insert(key.to_owned(), value);
    set("to", json!(format.name()));
    for (key, value) in format.target().options(settings) {
        set(key, value);
    }
    set("device", json!(device.to_string()));
    set("tp_size", json!(tp.size));
    set("tp_rank", json!(tp.rank));
    set("ep_size", json!(ep.size));
    set("ep_rank", json!(ep.rank));
    set("skip_unsupported", json!(skip_unsupported));
    // Manifests without the key are of conversions that lost no scale.
    if *allow_underflow {
        set("allow_underflow", json!(true));
    }
    set("max_shard_bytes", json!(shard_bytes));
    set("merge_projections", json!(merge_projections));
    set("preparation", preparation.json());
    let all = Sha256::new_with_prefix(Value::Object(options.clone()).to_string());
    options.insert("settings_sha256".to_owned(), json!(io::hex(all)));
    options
}

/// Whether a name is a plain file name: the manifest of an untrusted folder must not name others.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !matches!(name, "." | "..") && !name.contains(['/', '\\', '\0', ':'])
}

impl Manifest {
    /// The manifest of a new conversion.
    pub fn new(settings: &Settings, inputs: Vec<InputRecord>, planned: Vec<String>) -> Self {
        Self {
            version: VERSION,
            producer: concat!("marlinspike ", env!("CARGO_PKG_VERSION")).to_owned(),
            complete: false,
            options: options(settings),
            model: model(&inputs),
            inputs,
            planned,
            files: Vec::new(),
        }
    }

    /// Adds the routing that the user states instead of the family's, since it also decides the
    /// output.
    #[must_use]
    pub fn with_routing(mut self, stated: Option<&RoutingRule>) -> Self {
        if let Some(routing) = stated {
            self.options.insert("routing".to_owned(), routing.to_json());
        }
        self
    }

    /// Takes the inputs, now with their hashes.
    pub fn set_inputs(&mut self, inputs: Vec<InputRecord>) {
        self.model = model(&inputs);
        self.inputs = inputs;
    }

    /// The same conversion without finished files.
    #[must_use]
    pub fn unfinished(self) -> Self {
        Self { complete: false, files: Vec::new(), ..self }
    }

    /// A hash of the program's version, the options and the inputs: what decides the output.
    pub fn identity(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(&self.producer);
        hash.update(Value::Object(self.options.clone()).to_string());
        hash.update(&self.model);
        io::hex(hash)
    }

    /// The finished file of this name.
    pub fn file(&self, name: &str) -> Option<&FileRecord> {
        self.files.iter().find(|f| f.name == name)
    }

    /// How the conversion that `self` describes differs from `asked`, by options and by the inputs'
    /// names and lengths.
    pub fn difference(&self, asked: &Self) -> Option<String> {
        if self.producer != asked.producer {
            return Some(format!("{} wrote it, this is {}", self.producer, asked.producer));
        }
        let keys = asked.options.keys().chain(self.options.keys());
        if let Some(key) = keys.into_iter().find(|&k| self.options.get(k) != asked.options.get(k)) {
            let (there, asked) = (self.options.get(key), asked.options.get(key));
            let show = |v: Option<&Value>| v.map_or("nothing".to_owned(), ToString::to_string);
            return Some(format!("its {key} is {}, asked for is {}", show(there), show(asked)));
        }
        let names = |m: &Self| m.inputs.iter().map(|i| i.name.clone()).collect::<Vec<_>>();
        let (there, asked_names) = (names(self), names(asked));
        if let Some(name) = asked_names.iter().find(|n| !there.contains(n)) {
            return Some(format!("it is of another model: `{name}` is not among its inputs"));
        }
        if let Some(name) = there.iter().find(|n| !asked_names.contains(n)) {
            return Some(format!("it is of another model: its input `{name}` is not in this one"));
        }
        let differs =
            |i: &&InputRecord| asked.inputs.iter().any(|a| a.name == i.name && a.bytes != i.bytes);
        self.inputs.iter().find(differs).map(|i| {
            let found = asked.inputs.iter().find(|a| a.name == i.name).map_or(0, |a| a.bytes);
            let name = &i.name;
            format!("its input `{name}` had {} bytes and has {found} bytes now", i.bytes)
        })
    }

    /// The first input whose hash differs from `asked`'s.
    pub fn changed_input(&self, asked: &Self) -> Option<String> {
        let found = |i: &&InputRecord| {
            asked.inputs.iter().any(|a| a.name == i.name && a.sha256 != i.sha256)
        };
        self.inputs.iter().find(found).map(|i| i.name.clone())
    }

    /// The manifest as a file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut value = json!(self);
        let digest = io::hex(Sha256::new_with_prefix(value.to_string()));
        value["digest"] = json!(digest);
        format!("{value:#}\n").into_bytes()
    }

    /// Reads a manifest, if the file exists.
    ///
    /// # Errors
    /// [`ConvertError::Manifest`] for one that is damaged or of another version,
    /// [`ConvertError::Io`].
    pub fn read(storage: &dyn Storage, path: &Path) -> Result<Option<Self>, ConvertError> {
        let bytes = match io::read_small(storage, path, LIMIT) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(ConvertError::io(path)(e)),
        };
        Self::parse(&bytes)
            .map(Some)
            .map_err(|reason| ConvertError::Manifest { path: path.to_owned(), reason })
    }

    /// Parses a manifest; the error is the reason.
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        let Value::Object(mut object) = value else {
            return Err("not a JSON object".to_owned());
        };
        let digest = object.shift_remove("digest");
        let value = Value::Object(object);
        let found = io::hex(Sha256::new_with_prefix(value.to_string()));
        match digest.as_ref().and_then(Value::as_str) {
            None => return Err("no `digest`: another version wrote it".to_owned()),
            Some(digest) if digest != found => {
                return Err(format!("its digest is {digest}, its contents give {found}"));
            }
            Some(_) => {}
        }
        if value["version"] != json!(VERSION) {
            return Err(format!("version {}, expected {VERSION}", value["version"]));
        }
        let manifest: Self = serde_json::from_value(value).map_err(|e| e.to_string())?;
        let files = manifest.files.iter().map(|f| &f.name);
        let inputs = manifest.inputs.iter().map(|i| &i.name);
        match manifest.planned.iter().chain(files).chain(inputs).find(|n| !is_plain(n)) {
            Some(name) => Err(format!("names {name:?}, expected names without folders")),
            None => Ok(manifest),
        }
    }
}

fn model(inputs: &[InputRecord]) -> String {
    let mut hash = Sha256::new();
    for input in inputs {
        hash.update(format!("{:?} {} {}\n", input.name, input.bytes, input.sha256));
    }
    io::hex(hash)
}

#[cfg(test)]
mod tests {
    use marlinspike::formats::global_scale::W13Scale;
    use marlinspike::layouts::marlin::InputDtype;
    use marlinspike::num::scalar::ScalarType;
    use marlinspike::select::Capability;

    use super::*;
    use crate::convert::parallel::Ranks;
    use crate::convert::settings::Format;
    use crate::load::preparation::Preparation;

    fn sample() -> Manifest {
        Manifest {
            version: VERSION,
            producer: "p".to_owned(),
            complete: true,
            options: Map::new(),
            model: "m".to_owned(),
            inputs: Vec::new(),
            planned: vec!["model.safetensors".to_owned()],
            files: vec![FileRecord {
                name: "model.safetensors".to_owned(),
                bytes: 3,
                sha256: "ab".to_owned(),
            }],
        }
    }

    /// The text is fixed: a conversion continues only with equal options, in any process and with any
    /// build. The hash is by Python's `json` and `hashlib`.
    #[test]
    fn settings_are_named_options() {
        let format = Format::from_name("marlin").unwrap();
        let settings = Settings { shard_bytes: 5_000_000_000, ..Settings::new(format) };
        let found = options(&settings);
        let expected = json!({
            "to": "marlin", "dtype": "bfloat16", "input_dtype": "model", "device": "CUDA 8.0",
            "tp_size": 1, "tp_rank": 0, "ep_size": 1, "ep_rank": 0, "skip_unsupported": true,
            "max_shard_bytes": 5_000_000_000_u64, "merge_projections": false,
            "preparation": {"requantize": "upstream-cuda", "w13_scale": "first", "padding": true},
            "settings_sha256": "f63bafcd470c94fab613f5f9f65a6074709b45557b106d53e282d8c0f4c30bb4",
        });
        assert_eq!(Value::Object(found.clone()), expected);

        let own = Preparation { requantize: None, ..settings.preparation };
        let raised = Preparation { w13_scale: W13Scale::Own, ..settings.preparation };
        let unpadded = Preparation { padding: false, ..settings.preparation };
        let with = |preparation| Settings { preparation, ..settings.clone() };
        let of_two = Ranks { size: 2, rank: 0 };
        let other = Format::from_name("flashinfer").unwrap();
        let chosen = other.with("nvfp4-backend", "VLLM_CUTLASS").unwrap();
        let changed = [
            with(own),
            with(raised),
            with(unpadded),
            Settings { dtype: ScalarType::FLOAT16, ..settings.clone() },
            Settings { input: InputDtype::Int8, ..settings.clone() },
            Settings { tp: of_two, ..settings.clone() },
            Settings { tp: Ranks { rank: 1, ..of_two }, ..settings.clone() },
            Settings { ep: of_two, ..settings.clone() },
            Settings { ep: Ranks { rank: 1, ..of_two }, ..settings.clone() },
            Settings { device: Capability::cuda(8, 9), ..settings.clone() },
            Settings { skip_unsupported: false, ..settings.clone() },
            Settings { shard_bytes: 1, ..settings.clone() },
            Settings { merge_projections: true, ..settings.clone() },
            Settings { format: other, ..settings.clone() },
            Settings { format: chosen, ..settings.clone() },
        ];
        let hash = |settings: &Settings| options(settings)["settings_sha256"].to_string();
        let mut hashes: Vec<String> = changed.iter().chain([&settings]).map(hash).collect();
        hashes.sort();
        hashes.dedup();
        assert_eq!(hashes.len(), changed.len() + 1);
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let bytes = sample().to_bytes();
        assert_eq!(Manifest::parse(&bytes), Ok(sample()));
        for i in 0..bytes.len() {
            for bit in 0..8 {
                let mut other = bytes.clone();
                other[i] ^= 1 << bit;
                // White space between tokens does not matter.
                assert!(
                    Manifest::parse(&other).is_err_and(|e| !e.is_empty())
                        || bytes[i].is_ascii_whitespace(),
                    "byte {i} bit {bit}"
                );
            }
        }
    }

    #[test]
    fn names_of_other_folders_are_refused() {
        for name in ["../x", "/etc/passwd", "a/b", "..", "", "C:x"] {
            let manifest = Manifest { planned: vec![name.to_owned()], ..sample() };
            assert!(Manifest::parse(&manifest.to_bytes()).is_err(), "{name}");
        }
    }
}
