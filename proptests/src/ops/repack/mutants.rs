//! Wrong variants of repacking.

use marlinspike::act_order;

use super::{Fp4Repack, MergeW13, Repack, RepackInput};
use crate::Operation as _;
use crate::mutant::{Mutant, common, mutant, with};

fn map_perms(input: &mut RepackInput, f: impl Fn(&[u32]) -> Vec<u32>) {
    if let Some(perm) = &input.perm {
        input.perm = Some(perm.chunks_exact(input.size_k).flat_map(f).collect());
    }
}

fn swap_nibbles(word: u32) -> u32 {
    (word & 0x0f0f_0f0f) << 4 | word >> 4 & 0x0f0f_0f0f
}

/// Wrong variants of the operations.
pub(in crate::ops) fn mutants() -> Vec<Mutant> {
    let mut all = vec![
        with::<Repack>("act-order: inverse permutation", |i| {
            map_perms(i, |p| act_order::inverse(p).unwrap_or_default());
        }),
        with::<Repack>("act-order: weights not permuted", |i| i.perm = None),
        with::<Repack>("act-order: permuted twice", |i| {
            map_perms(i, |p| act_order::gather(p, p));
        }),
        with::<Repack>("act-order: the first expert's permutation for all", |i| {
            let size_k = i.size_k;
            if let Some(perm) = &mut i.perm {
                let first = perm[..size_k].to_vec();
                perm.chunks_exact_mut(size_k).for_each(|p| p.copy_from_slice(&first));
            }
        }),
        with::<Repack>("nibble order: pairs swapped", |i| {
            i.qweight.iter_mut().for_each(|w| *w = swap_nibbles(*w));
        }),
        with::<Repack>("8-bit activations' tiles for 16-bit ones and the reverse", |i| {
            i.is_a_8bit ^= true;
        }),
        mutant::<Repack>("packed without the interleave", |i| {
            let order: [u32; 8] =
                if i.is_a_8bit { [0, 4, 1, 5, 2, 6, 3, 7] } else { [0, 2, 4, 6, 1, 3, 5, 7] };
            let fields = 32 / i.num_bits;
            let order = if fields == 8 { order } else { [0, 2, 1, 3, 0, 0, 0, 0] };
            let unweave = |w: u32| {
                let mask = u32::MAX >> (32 - i.num_bits);
                (0..fields).fold(0, |word, p| {
                    word | (w >> (p * i.num_bits) & mask) << (order[p as usize] * i.num_bits)
                })
            };
            Ok(Repack::expected(i)?.into_iter().map(unweave).collect())
        }),
        mutant::<Repack>("experts in reverse order", |i| {
            let out = Repack::expected(i)?;
            Ok(out.rchunks_exact(i.words()).flatten().copied().collect())
        }),
        mutant::<Repack>("one nibble of the last word flipped", |i| {
            let mut out = Repack::expected(i)?;
            if let Some(last) = out.last_mut() {
                *last ^= 1 << 28;
            }
            Ok(out)
        }),
        with::<Fp4Repack>("even k in the high nibble", |i| {
            i.weight.iter_mut().for_each(|b| *b = b.rotate_left(4));
        }),
        mutant::<MergeW13>("gate and up swapped", |i| i.merged(&i.up, &i.gate)),
        mutant::<MergeW13>("gate taken for both halves", |i| i.merged(&i.gate, &i.gate)),
    ];
    all.extend(common::<Repack>());
    all.extend(common::<Fp4Repack>());
    all.extend(common::<MergeW13>());
    all
}
