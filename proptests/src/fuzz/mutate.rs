//! Deterministic mutations of a corpus's files, for tests on a stable compiler.

use marlinspike::vectors::Rng;

/// Fragments of JSON that are hard on readers.
const TOKENS: [&str; 24] = [
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "-0.0",
    "18446744073709551616",
    "9223372036854775807",
    "[]",
    "{}",
    "\"\"",
    "\"\\u0000\"",
    "\"U8\"",
    "\"F4\"",
    "\"I32\"",
    "[0,0]",
    "[[[[",
    "128",
    "2147483648",
    ",",
    ":",
    "\"in.scales\"",
    "\"../a.safetensors\"",
    "\"/a.safetensors\"",
];

fn splice(data: &mut Vec<u8>, at: usize, remove: usize, insert: &[u8]) {
    let end = (at + remove).min(data.len());
    data.splice(at.min(end)..end, insert.iter().copied());
}

/// A changed copy of `seed`: bits flipped, bytes cut or moved, another file's bytes spliced in, a
/// digit or a JSON value replaced by another. In three of four copies the header's length is
/// corrected, so that mutations reach the data behind it.
pub fn mutate(rng: &mut Rng, seed: &[u8], other: &[u8], binary: bool) -> Vec<u8> {
    let mut data = seed.to_vec();
    for _ in 0..rng.pick(&[1, 1, 1, 2, 4]) {
        let before = data.len();
        let header = match data.first_chunk() {
            Some(&length) if binary => 8usize.saturating_add(u64::from_le_bytes(length) as usize),
            _ => 0,
        };
        // Half of the changes hit the header's text, the rest anything.
        let (from, to) = match rng.chance(1, 2) {
            true => (if binary { 8 } else { 0 }, if binary { header } else { data.len() }),
            false => (0, data.len()),
        };
        let to = to.min(data.len());
        let at = (from + rng.below(to.saturating_sub(from))).min(data.len().saturating_sub(1));
        match rng.below(9) {
            _ if data.is_empty() => data.push(rng.next_u32() as u8),
            0 => data[at] ^= 1 << rng.below(8),
            1 => data[at] = rng.next_u32() as u8,
            2 if rng.chance(1, 3) => data.truncate(at),
            2 => {
                let len = rng.below(16);
                splice(&mut data, at, len, &[]);
            }
            3 => {
                let from = rng.below(other.len());
                let len = rng.below(48).min(other.len() - from);
                let remove = rng.below(48);
                splice(&mut data, at, remove, &other[from..from + len]);
            }
            4 => splice(&mut data, at, 0, b" "),
            5 | 6 => {
                if let Some(p) = data[at..to.max(at)].iter().position(u8::is_ascii_digit) {
                    data[at + p] = b'0' + rng.below(10) as u8;
                }
            }
            // A JSON value: from the next colon, bracket or comma to the one after.
            _ => {
                let stop = |b: &u8| b":,[]{}".contains(b);
                let start = data[at..].iter().position(stop).map_or(at, |p| at + p + 1);
                let len = data[start..].iter().position(stop).unwrap_or(0);
                splice(&mut data, start, len, rng.pick(&TOKENS).as_bytes());
            }
        }
        if binary && data.len() >= 8 && (8..header).contains(&at) && rng.chance(3, 4) {
            let moved = data.len() as i64 - before as i64;
            let length = (header as u64 - 8).wrapping_add_signed(moved);
            data[..8].copy_from_slice(&length.to_le_bytes());
        }
    }
    data
}
