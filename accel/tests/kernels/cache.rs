//! The cache of compiled modules; needs NVRTC but no GPU.

use crate::common;

use std::{fs, path::PathBuf, time::Duration};

use marlinspike_accel::{
    AccelError,
    cache::{ModuleCache, Origin},
    nvrtc::{Arch, Nvrtc},
};
use marlinspike_kernels::Source;

const ARCH: Arch = Arch { compute_capability: (8, 0), specific: false };
const TINY: Source =
    Source { name: "tiny", text: "extern \"C\" __global__ void tiny(int *x) { *x = VALUE; }" };
const LARGE: u64 = 1 << 30;

fn files(cache: &ModuleCache) -> Vec<PathBuf> {
    let all = fs::read_dir(cache.folder().unwrap()).unwrap();
    let mut all: Vec<_> = all.map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all
}

fn no_nvrtc() -> Result<Nvrtc, AccelError> {
    Err(AccelError::NvrtcMissing { library: "none".into(), reason: "left out".into() })
}

#[test]
fn a_module_is_compiled_once_and_its_address_is_its_content() {
    let test = "a_module_is_compiled_once_and_its_address_is_its_content";
    let Some(nvrtc) = common::nvrtc_or_skip(test) else { return };
    let (nvrtc, folder) = (Ok(nvrtc), tempfile::tempdir().unwrap());
    let cache = ModuleCache::at(folder.path().join("made/when/needed"), LARGE);
    let module =
        |source, arch, value| cache.module(&nvrtc, &source, arch, &[("VALUE", value)]).unwrap();
    let (code, origin) = module(TINY, ARCH, 1);
    assert_eq!(origin, Origin::Compiled);
    assert_eq!(module(TINY, ARCH, 1), (code.clone(), Origin::Cached));
    // Each part of the address: parameters, architecture, text, name.
    let newer = Arch { compute_capability: (9, 0), specific: true };
    let other_text =
        Source { text: "extern \"C\" __global__ void tiny(int *x) { *x = -VALUE; }", ..TINY };
    let other_name = Source { name: "another", ..TINY };
    for (source, arch, value) in
        [(TINY, ARCH, 2), (TINY, newer, 1), (other_text, ARCH, 1), (other_name, ARCH, 1)]
    {
        assert_eq!(module(source, arch, value).1, Origin::Compiled);
    }
    assert_eq!(files(&cache).len(), 5);
    // Without a compiler: the cached entry, or else the reason why the compiler is missing.
    let found = cache.module(&no_nvrtc(), &TINY, ARCH, &[("VALUE", 1)]).unwrap();
    assert_eq!(found, (code, Origin::Cached));
    let error = cache.module(&no_nvrtc(), &TINY, ARCH, &[("VALUE", 3)]).unwrap_err();
    assert!(matches!(error, AccelError::NvrtcMissing { .. }), "{error:?}");
}

#[test]
fn a_damaged_entry_is_compiled_again() {
    let Some(nvrtc) = common::nvrtc_or_skip("a_damaged_entry_is_compiled_again") else { return };
    let (nvrtc, folder) = (Ok(nvrtc), tempfile::tempdir().unwrap());
    let cache = ModuleCache::at(folder.path(), LARGE);
    let module = || cache.module(&nvrtc, &TINY, ARCH, &[("VALUE", 1)]).unwrap();
    let (code, _) = module();
    let entry = files(&cache).remove(0);
    let whole = fs::read(&entry).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let mut other_format = whole.clone();
    other_format[0] ^= 1;
    for damaged in [&flipped, &other_format, &whole[..whole.len() / 2].to_vec(), &Vec::new()] {
        fs::write(&entry, damaged).unwrap();
        assert!(cache.module(&no_nvrtc(), &TINY, ARCH, &[("VALUE", 1)]).is_err());
        assert_eq!(module(), (code.clone(), Origin::Compiled));
        assert_eq!(fs::read(&entry).unwrap(), whole);
    }
    assert_eq!(module().1, Origin::Cached);
}

#[test]
fn shipped_entries_are_used_without_a_compiler_and_only_for_what_they_were_compiled_from() {
    let test =
        "shipped_entries_are_used_without_a_compiler_and_only_for_what_they_were_compiled_from";
    let Some(nvrtc) = common::nvrtc_or_skip(test) else { return };
    let (nvrtc, folders) =
        (Ok(nvrtc), [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()]);
    let parameters = [("VALUE", 1)];
    let made = ModuleCache::at(folders[0].path(), LARGE);
    let (code, _) = made.module(&nvrtc, &TINY, ARCH, &parameters).unwrap();
    let cache = ModuleCache::at(folders[1].path(), LARGE).with_shipped(folders[0].path());
    let shipped = |source: Source, value| {
        cache.module(&no_nvrtc(), &source, ARCH, &[("VALUE", value)]).ok().map(|found| found.0)
    };
    assert_eq!(shipped(TINY, 1), Some(code.clone()));
    let changed =
        Source { text: "extern \"C\" __global__ void tiny(int *x) { *x = +VALUE; }", ..TINY };
    assert_eq!((shipped(changed, 1), shipped(TINY, 2)), (None, None));
    // Another compiler's entry is as good; nothing is compiled or written.
    let entry = files(&made).remove(0);
    let name = entry.file_name().unwrap().to_str().unwrap();
    let other = format!("{}-1.2.cubin", name.split_once('-').unwrap().0);
    fs::rename(&entry, folders[0].path().join(other)).unwrap();
    let found = cache.module(&nvrtc, &TINY, ARCH, &parameters).unwrap();
    assert_eq!(found, (code.clone(), Origin::Cached));
    assert_eq!(fs::read_dir(folders[1].path()).unwrap().count(), 0);
    // A damaged one is compiled anew, into the cache.
    let entry = files(&made).remove(0);
    fs::write(&entry, &fs::read(&entry).unwrap()[..60]).unwrap();
    assert_eq!(cache.module(&nvrtc, &TINY, ARCH, &parameters).unwrap(), (code, Origin::Compiled));
}

#[test]
fn the_entries_used_longest_ago_go_first() {
    let test = "the_entries_used_longest_ago_go_first";
    let Some(nvrtc) = common::nvrtc_or_skip(test) else { return };
    let (nvrtc, folder) = (Ok(nvrtc), tempfile::tempdir().unwrap());
    let module = |cache: &ModuleCache, value| {
        cache.module(&nvrtc, &TINY, ARCH, &[("VALUE", value)]).unwrap().1
    };
    let unbounded = ModuleCache::at(folder.path(), LARGE);
    for value in 0..4 {
        assert_eq!(module(&unbounded, value), Origin::Compiled);
        // The file system's clock distinguishes uses.
        std::thread::sleep(Duration::from_millis(20));
    }
    let total: u64 = files(&unbounded).iter().map(|file| file.metadata().unwrap().len()).sum();
    assert_eq!(module(&unbounded, 0), Origin::Cached);
    std::thread::sleep(Duration::from_millis(20));
    // Room for four: of 1, 2, 3 and 0 the first goes for the fifth.
    let bounded = ModuleCache::at(folder.path(), total + total / 8);
    assert_eq!(module(&bounded, 4), Origin::Compiled);
    assert_eq!(files(&bounded).len(), 4);
    for value in [0, 2, 3, 4] {
        assert_eq!(module(&bounded, value), Origin::Cached, "{value}");
    }
    // An entry larger than the bound is kept until the next one.
    let tiny = ModuleCache::at(folder.path(), 1);
    assert_eq!(module(&tiny, 1), Origin::Compiled);
    assert_eq!(files(&tiny).len(), 1);
}

#[test]
fn processes_share_a_folder() {
    let Some(nvrtc) = common::nvrtc_or_skip("processes_share_a_folder") else { return };
    let (nvrtc, folder) = (Ok(nvrtc), tempfile::tempdir().unwrap());
    let wanted = ModuleCache::none().module(&nvrtc, &TINY, ARCH, &[("VALUE", 7)]).unwrap();
    assert_eq!(wanted.1, Origin::NotKept);
    // Threads act as processes: they share only the folder. The bound makes each new entry
    // remove the others' while they read.
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let (nvrtc, wanted, folder) = (&nvrtc, &wanted.0, folder.path());
            scope.spawn(move || {
                let cache = ModuleCache::at(folder, wanted.len() as u64);
                for round in 0..6 {
                    let other = [("VALUE", 100 + thread * 10 + round)];
                    cache.module(nvrtc, &TINY, ARCH, &other).unwrap();
                    let found = cache.module(nvrtc, &TINY, ARCH, &[("VALUE", 7)]).unwrap();
                    assert_eq!(&found.0, wanted);
                }
            });
        }
    });
    let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(names.iter().all(|name| name.extension().is_some_and(|e| e == "cubin")), "{names:?}");
}

#[test]
fn a_folder_that_cannot_be_made_is_no_error() {
    let test = "a_folder_that_cannot_be_made_is_no_error";
    let Some(nvrtc) = common::nvrtc_or_skip(test) else { return };
    let file = tempfile::NamedTempFile::new().unwrap();
    let cache = ModuleCache::at(file.path().join("below a file"), LARGE);
    let (code, origin) = cache.module(&Ok(nvrtc), &TINY, ARCH, &[("VALUE", 1)]).unwrap();
    assert_eq!((&code[..4], origin), (&b"\x7fELF"[..], Origin::NotKept));
}
