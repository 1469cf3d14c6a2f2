//! `convert` on a file system that fails, at every call and in every way. Repeating the command
//! then gives the right bytes, and a folder marked complete always has them.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::num::NonZero;
use std::path::{Path, PathBuf};

use crate::common::memory::{Fault, MemoryDisk, Power};
use crate::common::runs::settings;
use crate::common::{Format, write_tiny};
use marlinspike_golden::Tier;
use marlinspike_model::convert::error::ConvertError;
use marlinspike_model::convert::execute::{Execution, MEMORY};
use marlinspike_model::convert::manifest::{MANIFEST, PROGRESS};
use marlinspike_model::convert::plan::Settings;
use marlinspike_model::convert::{Output, Summary, convert_model, verify};
use marlinspike_model::model::{Model, ModelFiles};

const OUT: &str = "/out";
fn output(disk: &MemoryDisk, force: bool) -> Output<'_> {
    Output { storage: disk, dir: Path::new(OUT), force }
}

const EXECUTION: Execution =
    Execution { threads: NonZero::<usize>::MIN, memory: MEMORY, stop_after: None };

type Contents = BTreeMap<String, Vec<u8>>;

struct World {
    _temp: tempfile::TempDir,
    model: PathBuf,
    settings: Settings,
    /// The result of a run without faults.
    right: Contents,
}

impl World {
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let model = temp.path().join("model");
        write_tiny(Format::Gptq4, &model, 3);
        let settings = Settings { shard_bytes: 9000, ..settings() };
        let mut world = Self { _temp: temp, model, settings, right: Contents::new() };
        let disk = MemoryDisk::default();
        let summary = world.run(&disk, false).unwrap();
        assert!(summary.files >= 2 && !summary.already_complete, "{summary:?}");
        world.right = disk.contents();
        for name in ["config.json", "model.safetensors.index.json", "tokenizer.json", MANIFEST] {
            assert!(world.right.contains_key(name), "{name}");
        }
        assert!(world.right.keys().all(|n| !n.starts_with('.')), "{:?}", world.right.keys());
        world
    }

    fn run(&self, disk: &MemoryDisk, force: bool) -> Result<Summary, ConvertError> {
        self.run_as(disk, &self.settings, force)
    }

    fn run_as(
        &self,
        disk: &MemoryDisk,
        settings: &Settings,
        force: bool,
    ) -> Result<Summary, ConvertError> {
        let files = ModelFiles::open(&self.model)?;
        let model = Model::new(&files)?;
        convert_model(&model, output(disk, force), settings, EXECUTION, &())
    }

    /// Number of calls of a run from this disk.
    fn calls(&self, start: &MemoryDisk, force: bool) -> u64 {
        let disk = start.copy();
        disk.fail(u64::MAX, Fault::Kill);
        self.run(&disk, force).unwrap();
        assert!(disk.contents() == self.right);
        disk.calls()
    }

    /// Asserts that the folder is marked "complete" only if every byte is right.
    fn expect_honest(&self, disk: &MemoryDisk, others: &[&Contents], context: &str) {
        let contents = disk.contents();
        if !contents.contains_key(MANIFEST) {
            return;
        }
        let found = verify::verify_in(disk, Path::new(OUT), None).unwrap();
        assert_eq!(found.damaged, [], "{context}");
        let has = |right: &Contents| right.iter().all(|(name, bytes)| contents[name] == *bytes);
        let manifest = &contents[MANIFEST];
        let of = std::iter::once(&self.right).chain(others.iter().copied());
        let of = of.into_iter().find(|right| right[MANIFEST] == *manifest);
        assert!(has(of.unwrap_or_else(|| panic!("{context}: an unknown manifest"))), "{context}");
    }

    /// Asserts that the same command now gives the right bytes, durably.
    fn expect_recovery(&self, disk: &MemoryDisk, force: bool, context: &str) {
        let done = self.run(disk, force);
        let summary = done.unwrap_or_else(|e| panic!("{context}: {e}"));
        assert!(disk.contents() == self.right, "{context}: {summary:?}");
        disk.lose_power(Power::Durable);
        let mut durable = disk.contents();
        // The lock file's name may be in its previous durable state.
        durable.retain(|name, _| !name.ends_with(".lock"));
        assert!(durable == self.right, "{context}: not durable");
    }
}

const FAULTS: [Fault; 9] = [
    Fault::Kill,
    Fault::Error(ErrorKind::Other),
    Fault::Error(ErrorKind::StorageFull),
    Fault::Full,
    Fault::Short,
    Fault::Interrupted,
    Fault::FailedSync,
    Fault::Flip,
    Fault::Lost,
];

const POWER: [Power; 5] =
    [Power::Durable, Power::NamesOnly, Power::Some(1), Power::Some(2), Power::Some(3)];

/// One fault in this many at each call, in turn.
fn step() -> usize {
    Tier::current().pick(4, 2, 1)
}

/// Every fault at every call of a run from `start`, or some of the faults ([`step`]).
fn sweep(world: &World, start: &MemoryDisk, force: bool, others: &[&Contents], honest: bool) {
    let calls = world.calls(start, force);
    assert!(calls > 100, "{calls}");
    for at in 0..calls {
        // Calls recur in pairs (write, flush): `at / 4` brings each fault to each kind of call.
        let turn = |i: usize| (at as usize + at as usize / 4 + i).is_multiple_of(step());
        for (_, fault) in FAULTS.into_iter().enumerate().filter(|(i, _)| turn(*i)) {
            let context = format!("{fault:?} at call {at}");
            let disk = start.copy();
            disk.fail(at, fault);
            let done = world.run(&disk, force);
            match (&done, fault) {
                // Silent faults of the disk are detected when the file is read back.
                (Ok(_), Fault::Flip | Fault::Lost | Fault::FailedSync | Fault::Full) => {
                    assert!(!disk.hit(), "{context}");
                }
                (Err(e), Fault::Flip | Fault::Lost) => {
                    assert!(matches!(e, ConvertError::ReadBack { .. }), "{context}: {e}");
                }
                (Err(e), Fault::Short | Fault::Interrupted) => panic!("{context}: {e}"),
                _ => {}
            }
            disk.revive();
            if done.is_ok() {
                let mut contents = disk.contents();
                // A remaining lock file holds no lock.
                contents.retain(|name, _| !name.ends_with(".lock"));
                assert!(contents == world.right, "{context}");
            }
            if honest {
                world.expect_honest(&disk, others, &context);
            }
            world.expect_recovery(&disk, force, &context);
        }
        for (_, power) in POWER.into_iter().enumerate().filter(|(i, _)| turn(*i)) {
            let context = format!("{power:?} at call {at}");
            let disk = start.copy();
            disk.fail(at, Fault::Kill);
            let _ = world.run(&disk, force);
            disk.lose_power(power);
            if honest {
                world.expect_honest(&disk, others, &context);
            }
            world.expect_recovery(&disk, force, &context);
        }
    }
}

#[test]
fn every_fault_at_every_call_of_a_new_conversion() {
    let world = World::new();
    sweep(&world, &MemoryDisk::default(), false, &[], true);
}

#[test]
fn every_fault_at_every_call_of_a_repair() {
    let world = World::new();
    let disk = MemoryDisk::default();
    world.run(&disk, false).unwrap();
    let shard = world.right.keys().find(|n| n.ends_with(".safetensors")).unwrap();
    disk.edit(&Path::new(OUT).join(shard), |bytes| *bytes.last_mut().unwrap() ^= 1);
    // A repair removes "complete" before it writes.
    let killed = disk.copy();
    killed.fail(world.calls(&disk, false) / 2, Fault::Kill);
    world.run(&killed, false).unwrap_err();
    let names = killed.contents();
    assert!(names.contains_key(PROGRESS) && !names.contains_key(MANIFEST), "{:?}", names.keys());
    // Until then the folder is marked complete, although it was damaged from outside.
    sweep(&world, &disk, false, &[], false);
}

#[test]
fn every_fault_at_every_call_of_a_replacement() {
    let world = World::new();
    let disk = MemoryDisk::default();
    let other = Settings { shard_bytes: 1 << 30, ..world.settings.clone() };
    world.run_as(&disk, &other, false).unwrap();
    let others = disk.contents();
    assert!(
        others.contains_key("model.safetensors") && !world.right.contains_key("model.safetensors")
    );
    sweep(&world, &disk, true, &[&others], true);
}

/// A finished shard that was deleted, truncated or changed is written again; the other one is kept.
#[test]
fn damaged_files_are_written_again_whether_the_conversion_was_finished_or_not() {
    let world = World::new();
    let finished = MemoryDisk::default();
    world.run(&finished, false).unwrap();
    let stopped = MemoryDisk::default();
    {
        let files = ModelFiles::open(&world.model).unwrap();
        let model = Model::new(&files).unwrap();
        let stop = Execution { stop_after: Some(2), ..EXECUTION };
        convert_model(&model, output(&stopped, false), &world.settings, stop, &()).unwrap_err();
        assert!(stopped.contents().contains_key(PROGRESS));
    }
    for start in [finished, stopped] {
        let shards: Vec<_> =
            start.contents().into_keys().filter(|n| n.ends_with(".safetensors")).collect();
        assert!(shards.len() >= 2);
        let kept = shards.len() - 1;
        let path = Path::new(OUT).join(&shards[1]);
        let middle = world.right[&shards[1]].len() / 2;
        let damages: [&dyn Fn(&MemoryDisk); 4] = [
            &|d| d.delete(&path),
            &|d| d.edit(&path, |b| b.truncate(middle)),
            &|d| d.edit(&path, |b| b[middle] ^= 4),
            &|d| d.edit(&path, |b| b.push(0)),
        ];
        for (i, damage) in damages.iter().enumerate() {
            let disk = start.copy();
            damage(&disk);
            if disk.contents().contains_key(MANIFEST) {
                let found = verify::verify_in(&disk, Path::new(OUT), None).unwrap();
                let names: Vec<_> = found.damaged.iter().map(|d| d.name.as_str()).collect();
                assert_eq!(names, [shards[1].as_str()], "damage {i}");
            }
            let summary = world.run(&disk, false).unwrap();
            assert_eq!((summary.rewritten, summary.kept), (vec![shards[1].clone()], kept), "{i}");
            assert!(disk.contents() == world.right, "damage {i}");
        }
    }
}

/// An input changes at any moment of the run, with equal size and modification time: the run fails,
/// or the input had already been converted.
#[test]
fn an_input_that_changes_during_the_run_is_found() {
    let world = World::new();
    let shard = world.model.join("model-00001-of-00002.safetensors");
    let tokenizer = world.model.join("tokenizer.json");
    let calls = world.calls(&MemoryDisk::default(), false);
    let (mut found, mut late) = (0, 0);
    for path in [shard, tokenizer] {
        let original = fs::read(&path).unwrap();
        for at in (0..calls).step_by(step()) {
            let time = fs::metadata(&path).unwrap().modified().unwrap();
            let disk = MemoryDisk::default();
            let (target, mut changed) = (path.clone(), original.clone());
            *changed.last_mut().unwrap() ^= 1;
            disk.hook(at, move || {
                fs::write(&target, changed).unwrap();
                fs::File::options().write(true).open(&target).unwrap().set_modified(time).unwrap();
            });
            match world.run(&disk, false) {
                Ok(_) => {
                    late += 1;
                    let mut contents = disk.contents();
                    contents.retain(|name, _| name != MANIFEST);
                    let mut right = world.right.clone();
                    right.retain(|name, _| name != MANIFEST);
                    assert!(contents == right, "call {at}");
                }
                Err(ConvertError::InputChanged { path: named, .. }) => {
                    found += 1;
                    assert_eq!(named, path, "call {at}");
                    assert!(!disk.contents().contains_key(MANIFEST));
                }
                Err(other) => panic!("call {at}: {other}"),
            }
            fs::write(&path, &original).unwrap();
            disk.revive();
            // The original is restored: shards made from it are right, shards made from the other
            // input are not.
            world.run(&disk, false).unwrap();
            for (name, bytes) in world.right.iter().filter(|(n, _)| *n != MANIFEST) {
                assert!(disk.contents()[name] == *bytes, "call {at}: {name}");
            }
        }
    }
    // After the last check of the inputs, only the manifest is written.
    assert!(found > 2 * late, "{found} {late}");
}

/// An input that changed between two runs, even with equal size and time, is not mixed with shards
/// made from the old one.
#[test]
fn an_input_that_changed_between_runs_is_named() {
    let world = World::new();
    let complete = MemoryDisk::default();
    world.run(&complete, false).unwrap();
    let begun = MemoryDisk::default();
    begun.fail(world.calls(&begun, false) / 2, Fault::Kill);
    world.run(&begun, false).unwrap_err();
    begun.revive();
    assert!(begun.contents().contains_key(PROGRESS));
    let path = world.model.join("model-00002-of-00002.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    for disk in [complete, begun] {
        match world.run(&disk, false).unwrap_err() {
            ConvertError::Occupied { reason, .. } => {
                assert!(reason.contains("model-00002-of-00002.safetensors"), "{reason}");
            }
            other => panic!("expected Occupied, found {other}"),
        }
        let anew = world.run(&disk, true).unwrap();
        assert_eq!((anew.kept, anew.already_complete), (0, false));
        let fresh = MemoryDisk::default();
        world.run(&fresh, false).unwrap();
        assert!(disk.contents() == fresh.contents());
    }
}
