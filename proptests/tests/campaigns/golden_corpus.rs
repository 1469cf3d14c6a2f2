//! The golden cases as seeds of the fuzzers, on stable Rust: mutations of each operation's
//! smallest files give verdicts and errors, and never a panic.
//!
//! The files are read in golden/; `tools/fuzz/corpus` holds no copies.

use std::collections::BTreeMap;
use std::time::Instant;

use marlinspike::case::Case;
use marlinspike::vectors::Rng;
use marlinspike_golden::{Manifest, Tier};
use marlinspike_proptests::fuzz;

/// Files of each operation.
const FILES: usize = 4;
/// Largest number of files with more bytes than [`LARGE`]: what their mutations reach is the same,
/// and each judged one takes a hundred times as long.
const LARGE_FILES: usize = 2;
const LARGE: usize = 32 << 10;

/// The smallest golden cases of each operation.
fn seeds() -> Vec<(String, Vec<u8>)> {
    let manifest = Manifest::load().unwrap();
    let mut by_op = BTreeMap::<String, Vec<(String, Vec<u8>)>>::new();
    for case in manifest.cases() {
        let entry = case.file();
        let bytes = std::fs::read(manifest.path(&entry.path)).unwrap();
        let op = Case::parse(&bytes).unwrap().op.to_string();
        by_op.entry(op).or_default().push((entry.path, bytes));
    }
    let smallest = |mut files: Vec<(String, Vec<u8>)>| {
        files.sort_by_key(|(_, bytes)| bytes.len());
        let small = files.partition_point(|(_, bytes)| bytes.len() <= LARGE);
        files.truncate(FILES.min(small.max(LARGE_FILES)));
        files
    };
    let seeds: Vec<_> = by_op.into_values().flat_map(smallest).collect();
    assert!(seeds.len() > 5 * FILES, "{} seeds", seeds.len());
    seeds
}

/// The header's text replaced by what `edit` makes of it; its length follows.
fn edit_header(data: &mut Vec<u8>, edit: impl FnOnce(&mut String)) {
    let Some(length) = data.first_chunk::<8>() else { return };
    let end = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX).saturating_add(8);
    let Some(text) = data.get(8..end).and_then(|text| std::str::from_utf8(text).ok()) else {
        return;
    };
    let mut text = text.to_owned();
    edit(&mut text);
    let header = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    data.splice(..end, header);
}

/// Where some characters of `text` are, at random; `None` where there are none.
fn place(rng: &mut Rng, text: &str, wanted: impl Fn(char) -> bool) -> Option<usize> {
    let places: Vec<usize> =
        text.char_indices().filter(|&(_, c)| wanted(c)).map(|(at, _)| at).collect();
    (!places.is_empty()).then(|| rng.pick(&places))
}

const NUMBERS: [&str; 12] = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "16",
    "128",
    "2147483647",
    "2147483648",
    "9223372036854775808",
    "1.5",
    "1e308",
];
const VALUES: [&str; 8] = ["null", "true", "false", "[]", "{}", "[[[[]]]]", "\"\"", "\\\"int8\\\""];
const TYPES: [&str; 8] = ["U8", "I8", "F16", "BF16", "I32", "F32", "F8_E4M3", "I64"];

/// One change of the header's text.
fn change_text(rng: &mut Rng, text: &mut String) {
    match rng.below(5) {
        // A number of a config or shape.
        0 | 1 => {
            let Some(at) = place(rng, text, |c| c.is_ascii_digit()) else { return };
            let digit = |c: char| c.is_ascii_digit();
            let start = text[..at].rfind(|c| !digit(c)).map_or(0, |i| i + 1);
            let end = text[at..].find(|c| !digit(c)).map_or(text.len(), |i| at + i);
            text.replace_range(start..end, rng.pick(&NUMBERS));
        }
        // A value: from a colon to the next comma or brace.
        2 => {
            let Some(at) = place(rng, text, |c| c == ':') else { return };
            let end = text[at..].find([',', '}']).map_or(text.len(), |i| at + i);
            text.replace_range(at + 1..end, rng.pick(&VALUES));
        }
        // An element type by another, of the same width or not.
        3 => {
            let all: Vec<usize> =
                text.match_indices("\"dtype\":\"").map(|(at, _)| at + 9).collect();
            if all.is_empty() {
                return;
            }
            let at = rng.pick(&all);
            let end = text[at..].find('"').map_or(text.len(), |i| at + i);
            text.replace_range(at..end, rng.pick(&TYPES));
        }
        // A shape reversed or flattened: the bytes still fill it.
        _ => {
            let all: Vec<usize> = text.match_indices("\"shape\":[").map(|(at, _)| at + 9).collect();
            if all.is_empty() {
                return;
            }
            let at = rng.pick(&all);
            let end = text[at..].find(']').map_or(text.len(), |i| at + i);
            let sizes: Vec<u64> = text[at..end].split(',').filter_map(|s| s.parse().ok()).collect();
            let sizes: Vec<u64> = match rng.chance(1, 2) {
                true => sizes.into_iter().rev().collect(),
                false => vec![sizes.iter().fold(1, |product, size| product.wrapping_mul(*size))],
            };
            let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
            text.replace_range(at..end, &sizes.join(","));
        }
    }
}

/// A changed copy of a case's file.
fn mutate(rng: &mut Rng, seed: &[u8]) -> Vec<u8> {
    let mut data = seed.to_vec();
    for _ in 0..rng.pick(&[1, 1, 2, 3]) {
        match rng.below(8) {
            _ if data.is_empty() => return data,
            0 => data.truncate(rng.below(seed.len())),
            1 => {
                let at = rng.below(data.len());
                data[at] ^= 1 << rng.below(8);
            }
            // Bits of the data, which verdicts are about.
            2 | 3 => {
                for _ in 0..rng.pick(&[1, 4, 64]) {
                    let at = data.len() / 4 + rng.below(data.len() - data.len() / 4);
                    data[at] ^= 1 << rng.below(8);
                }
            }
            _ => edit_header(&mut data, |text| change_text(rng, text)),
        }
    }
    data
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn golden_cases_are_accepted_by_the_door() {
    for (name, bytes) in seeds() {
        fuzz::case(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

/// Their reports judge inputs, too.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn cases_of_quantized_activations_are_accepted_by_the_door() {
    let manifest = Manifest::load().unwrap();
    let files = manifest.cases().iter().map(|case| case.file().path);
    let files: Vec<_> = files.filter(|path| path.contains("u4_int8act_g")).collect();
    assert!(files.len() >= 2, "{files:?}");
    for path in files {
        let bytes = std::fs::read(manifest.path(&path)).unwrap();
        fuzz::case(&bytes).unwrap_or_else(|e| panic!("{path}: {e}"));
    }
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn mutations_of_golden_cases() {
    let (seeds, count) = (seeds(), Tier::current().pick(250, 1500, 4000));
    let start = Instant::now();
    let is_accepted = |i: usize| {
        let mut rng = Rng::for_case(0x901d, i as u64);
        let (name, seed) = rng.pick(&seeds.iter().collect::<Vec<_>>());
        let data = mutate(&mut rng, seed);
        std::panic::catch_unwind(|| fuzz::case(&data).is_ok())
            .unwrap_or_else(|_| panic!("mutation {i}, of {name}, panics"))
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let accepted: usize = std::thread::scope(|scope| {
        let part = |t: usize| (t..count).step_by(threads).filter(|&i| is_accepted(i)).count();
        let workers: Vec<_> = (0..threads).map(|t| scope.spawn(move || part(t))).collect();
        workers.into_iter().map(|w| w.join().expect("no mutation panics")).sum()
    });
    println!("{count} mutations, {accepted} accepted, in {:.1?}", start.elapsed());
    assert!(accepted > count / 10, "only {accepted} accepted");
}
