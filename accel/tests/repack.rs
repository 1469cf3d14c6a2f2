//! The repack kernel against a loop that follows the layout's definition, on a GPU.

mod common;

use marlinspike_accel::ops::{RepackArgs, gptq_marlin_repack};

/// xorshift64*: inputs that differ in every word, the same on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    fn permutation(&mut self, len: usize) -> Vec<u32> {
        let mut perm: Vec<u32> = (0..len as u32).collect();
        for i in (1..len).rev() {
            perm.swap(i, self.next() as usize % (i + 1));
        }
        perm
    }
}

/// Builds the layout value by value in the order of its definition (tile, lane, column block,
/// block, register), which is not the order in which the kernel computes.
fn expected(
    qweight: &[u32],
    perm: Option<&[u32]>,
    size_k: usize,
    size_n: usize,
    bits: usize,
    is_a_8bit: bool,
) -> Vec<u32> {
    let pack = 32 / bits;
    let value = |k: usize, n: usize| {
        let k = perm.map_or(k, |perm| perm[k] as usize);
        qweight[k / pack * size_n + n] >> (k % pack * bits) & ((1 << bits) - 1)
    };
    let (tile_k, tile_n, column_blocks) = if is_a_8bit { (32, 32, 2) } else { (16, 64, 4) };
    let order: &[usize] = match (is_a_8bit, bits) {
        (false, 4) => &[0, 2, 4, 6, 1, 3, 5, 7],
        (false, _) => &[0, 2, 1, 3],
        (true, 4) => &[0, 4, 1, 5, 2, 6, 3, 7],
        (true, _) => &[0, 1, 2, 3],
    };
    let mut values = Vec::with_capacity(size_k * size_n);
    for k0 in (0..size_k).step_by(tile_k) {
        for n0 in (0..size_n).step_by(tile_n) {
            for lane in 0..32 {
                for j in 0..column_blocks {
                    for block in 0..2 {
                        let n = n0 + 16 * j + 8 * block + lane / 4;
                        if is_a_8bit {
                            for r in [0, 1, 2, 3, 16, 17, 18, 19] {
                                values.push(value(k0 + 4 * (lane % 4) + r, n));
                            }
                        } else {
                            for r in [0, 1, 8, 9] {
                                values.push(value(k0 + 2 * (lane % 4) + r, n));
                            }
                        }
                    }
                }
            }
        }
    }
    values
        .chunks_exact(pack)
        .map(|chunk| {
            order.iter().enumerate().fold(0, |word, (p, &v)| word | chunk[v] << (p * bits))
        })
        .collect()
}

#[test]
fn repack_equals_the_layout_bit_for_bit() {
    let Some(device) = common::device_or_skip("repack_equals_the_layout_bit_for_bit") else {
        return;
    };
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    // One tile; N a multiple of 64 but not of 128; more than one grid block; many blocks.
    for (size_k, size_n) in [(32, 64), (128, 192), (256, 320), (1024, 2048)] {
        for bits in [4, 8] {
            for is_a_8bit in [false, true] {
                for act_order in [false, true] {
                    let words = size_k * size_n * bits / 32;
                    let qweight: Vec<u32> = (0..words).map(|_| random.next()).collect();
                    let perm = act_order.then(|| random.permutation(size_k));
                    let perm = perm.as_deref();
                    let args =
                        RepackArgs::new(&qweight, perm, size_k, size_n, bits as u32, is_a_8bit)
                            .unwrap();
                    let found = gptq_marlin_repack(&device, &args).unwrap();
                    let wanted = expected(&qweight, perm, size_k, size_n, bits, is_a_8bit);
                    let first = found.iter().zip(&wanted).position(|(a, b)| a != b);
                    assert!(
                        found.len() == wanted.len() && first.is_none(),
                        "{size_k} x {size_n}, {bits} bits, 8-bit activations {is_a_8bit}, \
                         act-order {act_order}: first difference at word {first:?}"
                    );
                }
            }
        }
    }
}
