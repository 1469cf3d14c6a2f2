//! The law of every layout: each element has one place, and each bit one element.

use marlinspike::layouts::Layout;

/// Every element has a slot, which maps back to it; no two slots share a bit, and no bit of the
/// storage is unused.
pub(crate) fn is_a_bijection(
    layout: &impl Layout,
    rows: usize,
    cols: usize,
    storage_bits: u32,
    what: &str,
) {
    let mut taken = vec![0u64; layout.packed_len()];
    for row in 0..rows {
        for col in 0..cols {
            let slot = layout.offset(row, col);
            let mask = ((1u64 << slot.width) - 1) << slot.bit;
            assert_eq!(taken[slot.element] & mask, 0, "{what}: ({row}, {col}) shares {slot:?}");
            taken[slot.element] |= mask;
            for bit in [slot.bit, slot.bit + slot.width - 1] {
                let place = layout.locate(slot.element, bit);
                assert_eq!((place.row, place.col), (row, col), "{what}: {slot:?}");
            }
        }
    }
    let all = (1u64 << storage_bits) - 1;
    let free = taken.iter().position(|&t| t != all);
    assert_eq!(free, None, "{what}: an element with bits of no value");
}
