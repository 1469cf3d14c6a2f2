//! The folders of a conversion on a real file system: one writer, killed writers, other ranks' and other
//! models' files, links, FIFOs, side files, few descriptors, and `--verify`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Barrier;
use std::time::Duration;

use crate::common::runs::{EXECUTION, folder, run, settings};
use crate::common::{Format, Noise, files, write_model, write_tiny};
use marlinspike_model::convert::error::ConvertError;
use marlinspike_model::convert::io::Disk;
use marlinspike_model::convert::lock::{FolderLock, LOCK};
use marlinspike_model::convert::manifest::MANIFEST;
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::plan::Settings;
use marlinspike_model::convert::{Summary, convert_model};
use marlinspike_model::map::MapError;
use marlinspike_model::model::{Model, ModelError, ModelFiles};
use serde_json::Value;

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_marlinspike"))
}

fn convert_command(model: &Path, out: &Path) -> Command {
    let mut command = program();
    command.arg("convert").arg(model).arg(out).args(["--to", "marlin"]);
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn force(model: &Path, out: &Path, settings: &Settings) -> Result<Summary, ConvertError> {
    let files = ModelFiles::open(model)?;
    let model = Model::new(&files)?;
    convert_model(&model, folder(out, true), settings, EXECUTION, &())
}

/// Bytes of every file except the manifest, which holds the inputs' times.
fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let name = |p: &Path| p.file_name().unwrap().to_str().unwrap().to_owned();
    let list = files(dir).into_iter().map(|p| (name(&p), fs::read(&p).unwrap()));
    list.filter(|(name, _)| name != MANIFEST).collect()
}

struct World {
    temp: tempfile::TempDir,
    model: PathBuf,
    out: PathBuf,
}

impl World {
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let (model, out) = (temp.path().join("model"), temp.path().join("out"));
        write_tiny(Format::Gptq4, &model, 2);
        Self { temp, model, out }
    }

    /// A model that two tensor-parallel ranks can share.
    fn with_ranks() -> Self {
        let world = Self::new();
        fs::remove_dir_all(&world.model).unwrap();
        write_model(Format::Gptq4, &world.model);
        world
    }

    fn occupied(&self, settings: &Settings) -> String {
        match run(&self.model, &self.out, settings).unwrap_err() {
            ConvertError::Occupied { reason, .. } => reason,
            other => panic!("expected Occupied, found {other}"),
        }
    }
}

#[test]
fn a_second_writer_fails_at_once_and_names_the_first() {
    let world = World::new();
    fs::create_dir(&world.out).unwrap();
    let lock = FolderLock::take(&Disk, &world.out).unwrap();
    let output = convert_command(&world.model, &world.out).output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains(&format!("process {} on ", std::process::id())), "{text}");
    let second = run(&world.model, &world.out, &settings()).unwrap_err();
    assert!(matches!(second, ConvertError::Locked { .. }), "{second}");
    assert_eq!(files(&world.out), [world.out.join(LOCK)]);
    drop(lock);
    run(&world.model, &world.out, &settings()).unwrap();
    assert!(!world.out.join(LOCK).exists());
}

/// A lock file that a killed process left holds no lock.
#[test]
fn a_left_lock_file_locks_nothing() {
    let world = World::new();
    fs::create_dir(&world.out).unwrap();
    fs::write(world.out.join(LOCK), b"{\"pid\": 1}").unwrap();
    run(&world.model, &world.out, &settings()).unwrap();
    assert!(!world.out.join(LOCK).exists());
}

/// Runs that start together: each ends with the whole model or the lock's error, and the resulting
/// files are correct.
#[test]
fn writers_that_begin_together_never_mix() {
    let world = World::with_ranks();
    let right = world.temp.path().join("right");
    run(&world.model, &right, &settings()).unwrap();
    let other = Settings { tp: Ranks { size: 2, rank: 0 }, ..settings() };
    for round in 0..10 {
        let out = world.temp.path().join(format!("out{round}"));
        let barrier = Barrier::new(4);
        let done: Vec<_> = std::thread::scope(|scope| {
            let begin = |settings: Settings| {
                let (barrier, out, model) = (&barrier, &out, &world.model);
                scope.spawn(move || {
                    barrier.wait();
                    run(model, out, &settings)
                })
            };
            let threads = [settings(), settings(), settings(), other.clone()].map(begin);
            threads.map(|t| t.join().unwrap()).into()
        });
        let won = done.iter().filter(|d| d.is_ok()).count();
        assert!(won >= 1, "{done:?}");
        for result in &done {
            if let Err(e) = result {
                let fair = matches!(e, ConvertError::Locked { .. } | ConvertError::Occupied { .. });
                assert!(fair, "{e}");
            }
        }
        // The rank may have won.
        if done[3].is_err() {
            assert!(contents(&out) == contents(&right), "round {round}");
        }
    }
}

/// `kill -9` at many moments, until a run completes.
#[test]
fn killed_processes_leave_nothing_behind() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("model");
    write_model(Format::Gptq4, &model);
    let (right, out) = (temp.path().join("right"), temp.path().join("out"));
    let command = |out: &Path| {
        let mut command = convert_command(&model, out);
        command.args(["--max-shard-size", "0.0002"]).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    assert!(command(&right).status().unwrap().success());
    let mut noise = Noise::new("moments");
    for round in 0..12 {
        let mut child = command(&out).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(u64::from(noise.next() % 60_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        if round % 4 == 3 {
            assert!(command(&out).status().unwrap().success());
            assert!(contents(&out) == contents(&right), "round {round}");
            let verified = program().arg("convert").arg("--verify").arg(&out).output().unwrap();
            assert_eq!(verified.status.code(), Some(0), "{}", stderr(&verified));
            fs::remove_dir_all(&out).unwrap();
        }
    }
}

#[test]
fn other_ranks_models_and_files_are_refused_by_name() {
    let world = World::with_ranks();
    let rank = |rank| Settings { tp: Ranks { size: 2, rank }, ..settings() };
    run(&world.model, &world.out, &rank(0)).unwrap();
    let reason = world.occupied(&rank(1));
    assert!(reason.contains("tp_rank is 0, asked for is 1"), "{reason}");
    let reason = world.occupied(&settings());
    assert!(reason.contains("tp_size is 2, asked for is 1"), "{reason}");
    let before = contents(&world.out);

    // A file that is named like a shard but not listed; `--force` does not remove it.
    fs::write(world.out.join("model-00001-of-00009.safetensors"), b"another model's").unwrap();
    for result in
        [run(&world.model, &world.out, &rank(0)), force(&world.model, &world.out, &rank(1))]
    {
        match result.unwrap_err() {
            ConvertError::Occupied { reason, .. } => {
                assert!(reason.contains("`model-00001-of-00009.safetensors`"), "{reason}");
            }
            other => panic!("expected Occupied, found {other}"),
        }
    }
    let verified = program().arg("convert").arg("--verify").arg(&world.out).output().unwrap();
    assert_eq!(verified.status.code(), Some(1));
    let text = String::from_utf8(verified.stdout).unwrap();
    assert!(text.contains("model-00001-of-00009.safetensors"), "{text}");
    fs::remove_file(world.out.join("model-00001-of-00009.safetensors")).unwrap();
    assert!(contents(&world.out) == before);

    // With --force the other rank replaces it, and a user's file is kept.
    fs::write(world.out.join("notes.txt"), b"mine").unwrap();
    force(&world.model, &world.out, &rank(1)).unwrap();
    let right = world.temp.path().join("right");
    run(&world.model, &right, &rank(1)).unwrap();
    let mut found = contents(&world.out);
    found.retain(|(name, _)| name != "notes.txt");
    assert!(found == contents(&right));
    assert_eq!(fs::read(world.out.join("notes.txt")).unwrap(), b"mine");

    // A side file that existed before the conversion is not replaced.
    let fresh = World { out: world.temp.path().join("fresh"), ..world };
    fs::create_dir(&fresh.out).unwrap();
    fs::write(fresh.out.join("tokenizer.json"), b"mine").unwrap();
    assert!(fresh.occupied(&settings()).contains("`tokenizer.json`"));
    assert_eq!(fs::read(fresh.out.join("tokenizer.json")).unwrap(), b"mine");
}

/// The manifest of an untrusted folder cannot make `--force` remove files elsewhere.
#[test]
fn a_manifest_names_no_file_of_another_folder() {
    let world = World::new();
    run(&world.model, &world.out, &settings()).unwrap();
    let victim = world.temp.path().join("victim");
    fs::write(&victim, b"stays").unwrap();
    let path = world.out.join(MANIFEST);
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["planned"][0] = "../victim".into();
    manifest.as_object_mut().unwrap().shift_remove("digest");
    use sha2::Digest as _;
    let digest = sha2::Sha256::digest(manifest.to_string());
    let digest: String = digest.iter().map(|b| format!("{b:02x}")).collect();
    manifest["digest"] = digest.into();
    fs::write(&path, manifest.to_string()).unwrap();
    match force(&world.model, &world.out, &settings()).unwrap_err() {
        ConvertError::Manifest { reason, .. } => assert!(reason.contains("victim"), "{reason}"),
        other => panic!("expected Manifest, found {other}"),
    }
    assert_eq!(fs::read(&victim).unwrap(), b"stays");
}

#[test]
fn the_models_own_files_are_never_an_output() {
    let world = World::new();
    let before = contents(&world.model);
    // Another name for the folder itself, and an output folder with hard links to the inputs.
    symlink(&world.model, &world.out).unwrap();
    for result in
        [run(&world.model, &world.out, &settings()), force(&world.model, &world.out, &settings())]
    {
        assert!(matches!(result, Err(ConvertError::Occupied { .. })), "{result:?}");
    }
    let linked = world.temp.path().join("linked");
    fs::create_dir(&linked).unwrap();
    let shard = "model-00001-of-00002.safetensors";
    fs::hard_link(world.model.join(shard), linked.join("model.safetensors")).unwrap();
    match force(&world.model, &linked, &settings()).unwrap_err() {
        ConvertError::Occupied { reason, .. } => assert!(reason.contains(shard), "{reason}"),
        other => panic!("expected Occupied, found {other}"),
    }
    assert!(contents(&world.model) == before);
    assert!(linked.join("model.safetensors").exists());
}

#[test]
fn links_that_leave_the_model_folder_are_refused() {
    let world = World::new();
    let secret = world.temp.path().join("secret");
    fs::write(&secret, b"secret").unwrap();
    for name in ["tokenizer.txt", "config.json", "model-00002-of-00002.safetensors"] {
        let path = world.model.join(name);
        let aside = world.temp.path().join("aside");
        let existed = path.exists();
        if existed {
            fs::rename(&path, &aside).unwrap();
        }
        symlink(if existed { &aside } else { &secret }, &path).unwrap();
        match run(&world.model, &world.out, &settings()).unwrap_err() {
            ConvertError::Model(ModelError::Link { path: found, .. }) => assert_eq!(found, path),
            other => panic!("{name}: expected Link, found {other}"),
        }
        fs::remove_file(&path).unwrap();
        if existed {
            fs::rename(&aside, &path).unwrap();
        }
        assert!(!world.out.join(name).exists());
    }
    // A link inside the folder is allowed.
    symlink("tokenizer.json", world.model.join("vocabulary.json")).unwrap();
    run(&world.model, &world.out, &settings()).unwrap();
    assert!(fs::symlink_metadata(world.out.join("vocabulary.json")).unwrap().is_file());
}

/// `models--x/snapshots/revision/file -> ../../blobs/hash`, and nothing else of that folder.
#[test]
fn a_snapshot_of_the_hugging_face_cache_is_read() {
    let world = World::new();
    let cache = world.temp.path().join("models--x--y");
    let (blobs, snapshot) = (cache.join("blobs"), cache.join("snapshots/0123abcd"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    for (i, path) in files(&world.model).into_iter().enumerate() {
        let blob = format!("b{i:063}");
        fs::copy(&path, blobs.join(&blob)).unwrap();
        symlink(format!("../../blobs/{blob}"), snapshot.join(path.file_name().unwrap())).unwrap();
    }
    let right = world.temp.path().join("right");
    run(&world.model, &right, &settings()).unwrap();
    run(&snapshot, &world.out, &settings()).unwrap();
    assert!(contents(&world.out) == contents(&right));
    // By another name of the folder, too.
    let alias = world.temp.path().join("alias");
    symlink(&snapshot, &alias).unwrap();
    assert!(run(&alias, &world.out, &settings()).unwrap().already_complete);
    // Next to the blobs, or through a blob to another place.
    fs::write(cache.join("secret"), b"secret").unwrap();
    symlink("../secret", blobs.join("b")).unwrap();
    for target in ["../../secret", "../../blobs/b"] {
        let link = snapshot.join("notes.txt");
        symlink(target, &link).unwrap();
        let refused = run(&snapshot, &world.out, &settings()).unwrap_err();
        assert!(matches!(refused, ConvertError::Model(ModelError::Link { .. })), "{refused}");
        fs::remove_file(link).unwrap();
    }
}

/// The program never waits for the writer of a FIFO.
#[test]
fn special_files_are_refused() {
    let fifo = |path: &Path| {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let refused = |world: &World, name: &str| {
        let path = world.model.join(name);
        match run(&world.model, &world.out, &settings()).unwrap_err() {
            ConvertError::Model(ModelError::Map(MapError::NotAFile { path: found })) => {
                assert_eq!(found, path);
            }
            other => panic!("{name}: expected NotAFile, found {other}"),
        }
        let inspected = program().arg("inspect").arg(&world.model).output().unwrap();
        (inspected.status.code(), stderr(&inspected))
    };
    for name in ["config.json", "model.safetensors.index.json"] {
        let world = World::new();
        fs::remove_file(world.model.join(name)).unwrap();
        fifo(&world.model.join(name));
        let (code, text) = refused(&world, name);
        assert!(code == Some(2) && text.contains("not a regular file"), "{text}");
    }
    let world = World::new();
    fifo(&world.model.join("tokenizer.model"));
    refused(&world, "tokenizer.model");
    fs::remove_file(world.model.join("tokenizer.model")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(world.model.join("socket")).unwrap();
    refused(&world, "socket");
    // In the output folder: a FIFO instead of a shard counts as damaged.
    let world = World::new();
    run(&world.model, &world.out, &settings()).unwrap();
    let shard = world.out.join("model.safetensors");
    fs::remove_file(&shard).unwrap();
    fifo(&shard);
    let verified = program().arg("convert").arg("--verify").arg(&world.out).output().unwrap();
    assert_eq!(verified.status.code(), Some(1));
    let summary = run(&world.model, &world.out, &settings()).unwrap();
    assert_eq!(summary.rewritten, ["model.safetensors"]);
}

/// Every file of the model folder is in the output, or listed with the reason.
#[test]
fn side_files_are_copied_or_named() {
    let world = World::new();
    // Larger than any buffer; sparse, so that it uses no disk space.
    let large = fs::File::create(world.model.join("large.txt")).unwrap();
    large.set_len(257 << 20).unwrap();
    for name in ["README.md", "pytorch_model.bin", "pytorch_model.bin.index.json", ".gitattributes"]
    {
        fs::write(world.model.join(name), name).unwrap();
    }
    fs::write(world.model.join("consolidated.safetensors"), b"other weights").unwrap();
    fs::create_dir(world.model.join("original")).unwrap();
    let output = convert_command(&world.model, &world.out).arg("--json").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        value["side_files"],
        serde_json::json!(["README.md", "large.txt", "tokenizer.json"])
    );
    let left_out: Vec<_> =
        value["left_out"].as_array().unwrap().iter().map(|l| &l["name"]).collect();
    assert_eq!(
        left_out,
        [
            ".gitattributes",
            "consolidated.safetensors",
            "original",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json"
        ]
    );
    assert_eq!(fs::metadata(world.out.join("large.txt")).unwrap().len(), 257 << 20);
    assert_eq!(fs::read(world.out.join("README.md")).unwrap(), b"README.md");
}

/// 64 descriptors are enough for any number of files and threads.
#[test]
fn few_descriptors_are_enough() {
    let world = World::new();
    fs::remove_dir_all(&world.model).unwrap();
    write_tiny(Format::Gptq4, &world.model, 150);
    let line = "ulimit -n 64 && exec \"$0\" convert \"$1\" \"$2\" --to marlin --max-shard-size 0.000001 \
                --threads 16";
    let output = Command::new("sh")
        .args(["-c", line, env!("CARGO_BIN_EXE_marlinspike")])
        .args([&world.model, &world.out])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(files(&world.out).len() > 150);
}

#[test]
fn verify_names_every_damaged_file() {
    let world = World::new();
    let small = Settings { shard_bytes: 9000, ..settings() };
    run(&world.model, &world.out, &small).unwrap();
    let verify = |against: bool| {
        let mut command = program();
        command.arg("convert").arg("--verify").arg(&world.out).arg("--json");
        if against {
            command.arg("--against").arg(&world.model);
        }
        let output = command.output().unwrap();
        let value: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|e| panic!("{e}: {}", stderr(&output)));
        let name = |d: &Value| d["name"].as_str().unwrap().to_owned();
        let damaged: Vec<_> = value["damaged"].as_array().unwrap().iter().map(name).collect();
        assert_eq!(output.status.code(), Some(i32::from(!damaged.is_empty())));
        assert_eq!(value["verified"], damaged.is_empty());
        (damaged, value["files"].as_u64().unwrap())
    };
    let outputs = contents(&world.out);
    assert_eq!(verify(false), (Vec::new(), outputs.len() as u64));
    assert_eq!(verify(true), (Vec::new(), (outputs.len() + files(&world.model).len()) as u64));
    // Each file by each kind of damage; the manifest too.
    for (name, bytes) in &outputs {
        let path = world.out.join(name);
        let mut flipped = bytes.clone();
        flipped[bytes.len() / 2] ^= 1;
        for other in [flipped, bytes[..bytes.len() - 1].to_vec(), Vec::new()] {
            fs::write(&path, other).unwrap();
            assert_eq!(verify(false).0, [name.as_str()]);
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(verify(false).0, [name.as_str()]);
        fs::write(&path, bytes).unwrap();
    }
    let (first, last) = (world.out.join(&outputs[1].0), world.out.join(&outputs[2].0));
    let kept = [fs::read(&first).unwrap(), fs::read(&last).unwrap()];
    fs::write(&first, b"x").unwrap();
    fs::write(&last, b"x").unwrap();
    assert_eq!(verify(false).0, [outputs[1].0.as_str(), outputs[2].0.as_str()]);
    fs::write(&first, &kept[0]).unwrap();
    fs::write(&last, &kept[1]).unwrap();
    // An input, only on request.
    let input = world.model.join("tokenizer.json");
    let original = fs::read(&input).unwrap();
    fs::write(&input, b"{\"tokens\": [1]}").unwrap();
    assert_eq!(verify(false).0, [""; 0]);
    assert_eq!(verify(true).0, [input.display().to_string()]);
    fs::write(&input, original).unwrap();
    let manifest = world.out.join(MANIFEST);
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replacen("\"tp_size\": 1", "\"tp_size\": 2", 1)).unwrap();
    assert_eq!(verify(false).0, [MANIFEST]);
    fs::remove_file(&manifest).unwrap();
    let output = program().arg("convert").arg("--verify").arg(&world.out).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
