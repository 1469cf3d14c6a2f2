//! A sequence's logits have the same bits for any number of threads, any batch and any cut.

use std::path::PathBuf;

use crate::common::*;
use marlinspike_generate::{Cache, Decoder, Input, LogitsOf};

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

/// Every model as it is stored, with float weights, and MXFP4's converted folder.
fn folders() -> Vec<(&'static str, PathBuf)> {
    let stored = NAMES.map(|name| (name, golden(name)));
    let floats = NAMES.map(|name| (name, float_model(name).keep()));
    let packed = converted(CONVERTED_MXFP4).keep().join("packed");
    stored.into_iter().chain(floats).chain([(CONVERTED_MXFP4, packed)]).collect()
}

/// Prompts of different lengths, the golden one first.
fn prompts(name: &str) -> [Vec<u32>; 4] {
    let ids = Expected::read(name).input_ids;
    let vocab = config(&golden(name))["vocab_size"].as_u64().unwrap() as u32;
    let other = |seed: u32, len: u32| (0..len).map(|i| (i * 37 + seed) % vocab).collect();
    [ids, other(5, 1), other(99, 20), other(200, 7)]
}

/// The logits of each prompt's last token and of eight greedy tokens, all prompts in one batch.
fn together(decoder: &Decoder<'_>, prompts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let mut caches: Vec<Cache> = prompts.iter().map(|_| cache(decoder)).collect();
    let mut next: Vec<Vec<u32>> = prompts.to_vec();
    let mut seen = vec![Vec::new(); prompts.len()];
    for _ in 0..8 {
        let pairs = next.iter().zip(&mut caches);
        let mut inputs: Vec<_> = pairs.map(|(tokens, cache)| Input { tokens, cache }).collect();
        let logits = decoder.forward(&mut inputs, LogitsOf::Last).unwrap();
        let rows = logits.chunks(decoder.config().vocab_size);
        for ((next, seen), row) in next.iter_mut().zip(&mut seen).zip(rows) {
            *next = vec![best(row)];
            seen.extend(bits(row));
        }
    }
    seen
}

#[test]
fn threads_and_batches_change_no_bit() {
    for (name, folder) in folders() {
        let prompts = prompts(name);
        with_decoder(&folder, |decoder| {
            let alone: Vec<_> = prompts
                .iter()
                .flat_map(|p| pool(1).install(|| together(decoder, std::slice::from_ref(p))))
                .collect();
            for threads in 1..=3 {
                for batch in 1..=4 {
                    let made = pool(threads).install(|| together(decoder, &prompts[..batch]));
                    assert!(made == alone[..batch], "{name}: {threads} threads, batch {batch}");
                }
            }
        });
    }
}

/// From the cache of any number of tokens, any number of further tokens in one pass gives the logits of the whole
/// prompt and the cache that single tokens give. So every way to cut the prompt gives the same bits, by induction
/// over its cuts.
#[test]
fn every_cut_of_the_prompt_gives_the_same_bits() {
    let packed = converted(CONVERTED_MXFP4).keep().join("packed");
    let all = NAMES.map(|name| (name, golden(name)));
    for (name, folder) in all.into_iter().chain([(CONVERTED_MXFP4, packed)]) {
        let ids = Expected::read(name).input_ids;
        with_decoder(&folder, |decoder| {
            let whole = bits(&logits(decoder, &ids));
            let vocab = decoder.config().vocab_size;
            let forward = |cache: &Cache, tokens: &[u32]| {
                let mut cache = cache.clone();
                let mut inputs = [Input { tokens, cache: &mut cache }];
                let logits = decoder.forward(&mut inputs, LogitsOf::All).unwrap();
                (bits(&logits), cache)
            };
            let mut caches = vec![cache(decoder)];
            for token in &ids {
                let next = forward(caches.last().unwrap(), &[*token]).1;
                caches.push(next);
            }
            // Every number's shortest decimal form, which is another for other bits.
            let held: Vec<String> = caches.iter().map(|cache| format!("{cache:?}")).collect();
            for from in 0..ids.len() {
                for to in from + 1..=ids.len() {
                    let (made, cache) = forward(&caches[from], &ids[from..to]);
                    assert!(made == whole[from * vocab..to * vocab], "{name}: {from} to {to}");
                    assert!(format!("{cache:?}") == held[to], "{name}: cache, {from} to {to}");
                }
            }
        });
    }
}

/// From eight rows on, attention reads packed keys.
#[test]
fn a_long_prompt_has_the_bits_of_single_tokens() {
    for (name, folder) in folders() {
        let vocab = config(&golden(name))["vocab_size"].as_u64().unwrap() as u32;
        let ids: Vec<u32> = (0..50).map(|i| (i * 37 + 11) % vocab).collect();
        with_decoder(&folder, |decoder| {
            let whole = bits(&logits(decoder, &ids));
            for step in [1, 7, 9, 33] {
                let (mut cache, mut made) = (cache(decoder), Vec::new());
                for tokens in ids.chunks(step) {
                    let mut inputs = [Input { tokens, cache: &mut cache }];
                    made.extend(bits(&decoder.forward(&mut inputs, LogitsOf::All).unwrap()));
                }
                assert!(made == whole, "{name}: {step} tokens per call");
            }
        });
    }
}
