//! The repack kernel against a loop that follows the layout's definition, on a GPU.

use crate::common;

use crate::common::{Law, Random};
use marlinspike_accel::ops::{RepackArgs, gptq_marlin_repack};

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
    let mut law = Law::new("gptq_marlin_repack");
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    // One tile; N a multiple of 64 but not of 128; more than one grid block; many blocks; experts.
    for (experts, size_k, size_n) in
        [(1, 32, 64), (1, 128, 192), (1, 256, 320), (1, 1024, 2048), (5, 128, 192)]
    {
        for variant in 0..8 {
            let bits = if variant & 1 == 0 { 4 } else { 8 };
            let (is_a_8bit, act_order) = (variant & 2 != 0, variant & 4 != 0);
            let words = size_k * size_n * bits / 32;
            let qweight = random.words(experts * words);
            let perms: Vec<Vec<u32>> = (0..experts).map(|_| random.permutation(size_k)).collect();
            let perm = act_order.then(|| perms.concat());
            let (perm, b) = (perm.as_deref(), bits as u32);
            let args =
                RepackArgs::stack(&qweight, perm, experts, size_k, size_n, b, is_a_8bit).unwrap();
            let found = gptq_marlin_repack(&device, &args).unwrap();
            let wanted: Vec<u32> = (0..experts)
                .flat_map(|e| {
                    let perm = act_order.then_some(perms[e].as_slice());
                    expected(&qweight[e * words..][..words], perm, size_k, size_n, bits, is_a_8bit)
                })
                .collect();
            let context = format!(
                "{experts} of {size_k} x {size_n}, {bits} bits, 8-bit activations {is_a_8bit}, \
                 act-order {act_order}"
            );
            law.equal(&context, &found, &wanted);
        }
    }
    law.held();
}
