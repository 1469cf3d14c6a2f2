//! A checksum of bytes and their places, independent of the order of the writes.

use std::ops::AddAssign;

/// Σ key(i) · word(i) over the file's 64-bit words, and the number of bytes.
///
/// Threads write a file's pieces in any order; the sum of what they wrote equals the sum of what is
/// read back exactly when each byte was written once and lies at its place (but for a chance of about
/// 2⁻⁶⁴). A SHA-256 would need the file's order. Products are kept whole, in 128 bits: modulo 2⁶⁴ two
/// flipped top bits would cancel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlacedSum {
    sum: u128,
    bytes: u64,
}

/// The odd 64-bit key of word `i` (SplitMix64's output function).
fn key(i: u64) -> u64 {
    let z = i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) | 1
}

impl PlacedSum {
    /// The sum of `bytes` at offset `at` of the file.
    pub fn of(at: u64, bytes: &[u8]) -> Self {
        let head = (at.wrapping_neg() % 8) as usize;
        let (head, rest) = bytes.split_at(head.min(bytes.len()));
        let mut sum = Self { sum: 0, bytes: bytes.len() as u64 };
        // A part of a word has zeros for the other bytes, so that the parts add up to the word.
        let mut part = |index: u64, skip: usize, bytes: &[u8]| {
            let mut word = [0; 8];
            word[skip..skip + bytes.len()].copy_from_slice(bytes);
            sum.add_word(index, u64::from_le_bytes(word));
        };
        part(at / 8, (at % 8) as usize, head);
        let first = at.div_ceil(8);
        let (words, tail) = rest.as_chunks::<8>();
        part(first + words.len() as u64, 0, tail);
        for (i, word) in words.iter().enumerate() {
            sum.add_word(first + i as u64, u64::from_le_bytes(*word));
        }
        sum
    }

    fn add_word(&mut self, index: u64, word: u64) {
        self.sum = self.sum.wrapping_add(u128::from(key(index)) * u128::from(word));
    }
}

impl AddAssign for PlacedSum {
    fn add_assign(&mut self, other: Self) {
        self.sum = self.sum.wrapping_add(other.sum);
        self.bytes = self.bytes.wrapping_add(other.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_in_any_order_add_up_and_every_change_shows() {
        let bytes: Vec<u8> = (0..203u32).map(|i| (i * 37 + i / 7) as u8).collect();
        let whole = PlacedSum::of(0, &bytes);
        for cuts in [[1, 9, 100], [8, 16, 24], [3, 5, 6], [64, 65, 202]] {
            let mut at = vec![0];
            at.extend(cuts);
            at.push(bytes.len());
            let mut sum = PlacedSum::default();
            for run in at.windows(2).rev() {
                sum += PlacedSum::of(run[0] as u64, &bytes[run[0]..run[1]]);
            }
            assert_eq!(sum, whole, "{cuts:?}");
        }
        for i in 0..bytes.len() {
            for bit in 0..8 {
                let mut other = bytes.clone();
                other[i] ^= 1 << bit;
                assert_ne!(PlacedSum::of(0, &other), whole);
            }
        }
        // Two flipped top bits, two swapped words, a move by a word: no change cancels another.
        let mut other = bytes.clone();
        (other[7], other[15]) = (other[7] ^ 0x80, other[15] ^ 0x80);
        assert_ne!(PlacedSum::of(0, &other), whole);
        let mut other = bytes.clone();
        (0..8).for_each(|i| other.swap(i, 8 + i));
        assert_ne!(PlacedSum::of(0, &other), whole);
        assert_ne!(PlacedSum::of(8, &bytes), whole);
        // A byte that is written twice while another is never written: zeros, but the wrong count.
        let mut twice = PlacedSum::of(0, &[0; 8]);
        twice += PlacedSum::of(0, &[0; 4]);
        assert_ne!(twice, PlacedSum::of(0, &[0; 8]));
    }
}
