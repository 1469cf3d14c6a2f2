//! A fuzz target's corpus, replayed and mutated on stable Rust.
//!
//! A corpus is a folder of small files. An entry point accepts `valid_*` and refuses `hostile_*`
//! with the error that a table of the test names.

use std::collections::BTreeMap;
use std::fmt::{Debug, Display};
use std::path::Path;
use std::time::Instant;

use marlinspike::vectors::Rng;

use super::mutate::mutate;

/// A hostile file, without `hostile_`, and whether an error is the one that it must give.
pub type Expected<E> = (&'static str, fn(&E) -> bool);

/// The files of one target, and the entry point that reads them.
pub struct Corpus<E> {
    target: String,
    files: BTreeMap<String, Vec<u8>>,
    entry: fn(&[u8]) -> Result<(), E>,
}

impl<E> Corpus<E> {
    /// Reads the folder `target` of `corpora`.
    ///
    /// # Panics
    /// If the folder cannot be read, or holds fewer than 16 files.
    pub fn read(corpora: &Path, target: &str, entry: fn(&[u8]) -> Result<(), E>) -> Self {
        let folder = corpora.join(target);
        let listed =
            std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let read =
            |path: &Path| std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let files: BTreeMap<_, _> = listed
            .map(|file| file.unwrap_or_else(|e| panic!("{}: {e}", folder.display())))
            .map(|file| (file.file_name().to_string_lossy().into_owned(), read(&file.path())))
            .collect();
        assert!(files.len() > 15, "{target}: {} files", files.len());
        Self { target: target.to_owned(), files, entry }
    }

    /// Every `valid_*` file is accepted, every `hostile_*` file gives its error, and `expected` and
    /// the folder hold the same files.
    ///
    /// # Panics
    /// If not.
    pub fn replay(&self, expected: &[Expected<E>])
    where
        E: Debug,
    {
        self.replay_each(expected, |is_expected, e| is_expected(e));
    }

    /// As [`replay`](Self::replay), with the words that each error's message must contain.
    ///
    /// # Panics
    /// If one is missing, or as `replay`.
    pub fn replay_messages(&self, expected: &[(&str, &[&str])])
    where
        E: Debug + Display,
    {
        self.replay_each(expected, |words, e| {
            let message = e.to_string();
            words.iter().all(|word| message.contains(word))
        });
    }

    fn replay_each<T>(&self, expected: &[(&str, T)], is_expected: impl Fn(&T, &E) -> bool)
    where
        E: Debug,
    {
        let target = &self.target;
        let listed: BTreeMap<String, &T> =
            expected.iter().map(|(name, error)| (format!("hostile_{name}"), error)).collect();
        for name in listed.keys() {
            assert!(self.files.contains_key(name), "{target}: no file {name}");
        }
        for (name, data) in &self.files {
            let result = (self.entry)(data);
            if name.starts_with("valid_") {
                result.unwrap_or_else(|e| panic!("{target}/{name}: {e:?}"));
                continue;
            }
            let expected = listed.get(name);
            let expected = expected.unwrap_or_else(|| panic!("{target}/{name}: in no table"));
            let error = result.expect_err(name);
            assert!(is_expected(expected, &error), "{target}/{name}: {error:?}");
        }
    }

    /// Feeds `count` mutations of the files to the entry point. Two in three start from a valid file.
    ///
    /// # Panics
    /// If the entry point panics on one, which the message names; if it accepts no more than 1 %,
    /// since mutations that are all refused at the first byte test little; or if up to 25,000 take
    /// two minutes.
    pub fn hammer(&self, seed: u64, format: MutatedFormat, count: usize) {
        let target = &self.target;
        let all: Vec<_> = self.files.iter().collect();
        let valid: Vec<_> = all.iter().copied().filter(|(n, _)| n.starts_with("valid_")).collect();
        let (start, mut accepted) = (Instant::now(), 0);
        for i in 0..count {
            let mut rng = Rng::for_case(seed, i as u64);
            let (name, data) = if rng.chance(2, 3) { rng.pick(&valid) } else { rng.pick(&all) };
            let (_, other) = rng.pick(&all);
            let mutated = mutate(&mut rng, data, other, format == MutatedFormat::Safetensors);
            match std::panic::catch_unwind(|| (self.entry)(&mutated).is_ok()) {
                Ok(ok) => accepted += usize::from(ok),
                Err(_) => panic!("{target}: mutation {i} of {name} (seed {seed:#x}) panics"),
            }
        }
        println!("{target}: {count} mutations, {accepted} accepted, in {:.1?}", start.elapsed());
        assert!(accepted > count / 100, "{target}: only {accepted} of {count} accepted");
    }
}

/// What the mutations of a corpus keep in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MutatedFormat {
    /// The length before a JSON header follows its text.
    Safetensors,
    /// Nothing: JSON or other text.
    Text,
}

/// Mutations of a target: `usual`, unless `MARLINSPIKE_MUTATIONS` sets another number, for a longer run
/// by hand.
///
/// # Panics
/// If that variable is not a number.
pub fn mutations(usual: usize) -> usize {
    if let Ok(text) = std::env::var("MARLINSPIKE_MUTATIONS") {
        return text.parse().unwrap_or_else(|_| {
            panic!("MARLINSPIKE_MUTATIONS: found `{text}`, expected a number of mutations")
        });
    }
    usual
}
