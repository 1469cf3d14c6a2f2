//! How one Marlin tile of 1024 values is laid out.
//!
//! A tile is stored lane by lane, so that a warp reads its B fragments with one wide load each.
//! With 16-bit activations a tile is 16 k × 64 n and a (lane, 16 columns) unit owns the B fragments
//! of two m16n8k16 products; with 8-bit activations it is 32 k × 32 n and the products are
//! m16n8k32. Inside a unit, dequantization by bit operations restores the order of the values at no
//! cost.

use super::super::Fragment;

/// Width of the activations that the packed weight is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activations {
    /// f16 or bf16 (upstream `is_a_8bit = false`).
    Bits16,
    /// int8 or e4m3 (upstream `is_a_8bit = true`).
    Bits8,
}

/// Values in a tile of either shape.
pub(super) const TILE_LEN: usize = 1024;

/// The order of the 1024 values of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileMap {
    activations: Activations,
    bits: u32,
}

/// The value at each position of a word of 4-bit or 8-bit codes that are dequantized to 16 bits:
/// even values first, since dequantization extracts every second code at once.
pub(crate) const fn evens_first(bits: u32) -> &'static [usize] {
    if bits == 4 { &[0, 2, 4, 6, 1, 3, 5, 7] } else { &[0, 2, 1, 3] }
}

/// The value of a lane's run at each position of a packed word.
const fn interleave(activations: Activations, bits: u32) -> &'static [usize] {
    match (activations, bits) {
        (Activations::Bits16, _) => evens_first(bits),
        (Activations::Bits8, 4) => &[0, 4, 1, 5, 2, 6, 3, 7],
        (Activations::Bits8, _) => &[0, 1, 2, 3],
    }
}

/// Position of a value inside its tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct InTile {
    /// Row inside the tile.
    pub k: usize,
    /// Column inside the tile.
    pub n: usize,
    /// The lane, product and register that own it.
    pub lane: u32,
    /// Product of 8 columns.
    pub mma_n: u32,
    /// B register, 0 or 1.
    pub register: u32,
    /// Position inside the dequantized register.
    pub part: u32,
}

impl TileMap {
    /// The order for `bits` 4 or 8. Panics on another width.
    pub fn new(activations: Activations, bits: u32) -> Self {
        assert!(matches!(bits, 4 | 8), "Marlin packs 4 or 8 bits, not {bits}");
        Self { activations, bits }
    }

    /// Rows of a tile: 16, or 32 with 8-bit activations.
    pub const fn tile_k(self) -> usize {
        match self.activations {
            Activations::Bits16 => 16,
            Activations::Bits8 => 32,
        }
    }

    /// Columns of a tile: 64, or 32 with 8-bit activations.
    pub const fn tile_n(self) -> usize {
        TILE_LEN / self.tile_k()
    }

    /// 32-bit words of a tile.
    pub const fn words(self) -> usize {
        TILE_LEN * self.bits as usize / 32
    }

    /// Bits per value.
    pub const fn bits(self) -> u32 {
        self.bits
    }

    /// Width of the activations.
    pub const fn activations(self) -> Activations {
        self.activations
    }

    /// Values of one B fragment (two registers): 4, or 8 with 8-bit activations.
    const fn fragment_len(self) -> usize {
        self.tile_k() / 4
    }

    /// The value at `position` (0..1024, in storage order) of a tile.
    pub fn value_at(self, position: usize) -> InTile {
        assert!(position < TILE_LEN);
        let order = interleave(self.activations, self.bits);
        let pack = order.len();
        let value = position / pack * pack + order[position % pack];

        let run = self.fragment_len();
        let per_lane = TILE_LEN / 32;
        let (lane, rest) = (value / per_lane, value % per_lane);
        let (mma_n, r) = (rest / run, rest % run);
        // mma.sync B fragment: register r holds consecutive k from its own half of the rows.
        let part_len = run / 2;
        let (register, part) = (r / part_len, r % part_len);
        InTile {
            k: register * (self.tile_k() / 2) + lane % 4 * part_len + part,
            n: mma_n * 8 + lane / 4,
            lane: lane as u32,
            mma_n: mma_n as u32,
            register: register as u32,
            part: part as u32,
        }
    }

    /// The storage position (0..1024) of row `k`, column `n` of a tile: the inverse of
    /// [`Self::value_at`], derived independently from the fragment's definition.
    pub fn position_of(self, k: usize, n: usize) -> usize {
        assert!(k < self.tile_k() && n < self.tile_n());
        let run = self.fragment_len();
        let part_len = run / 2;
        let half = self.tile_k() / 2;
        let (register, in_half) = (k / half, k % half);
        let lane = n % 8 * 4 + in_half / part_len;
        let value = lane * (TILE_LEN / 32) + n / 8 * run + register * part_len + in_half % part_len;

        let order = interleave(self.activations, self.bits);
        let pack = order.len();
        let place = order.iter().position(|&v| v == value % pack).unwrap_or_default();
        value / pack * pack + place
    }

    /// [`InTile`] as the [`Fragment`] of tile (`tile_k`, `tile_n`).
    pub(super) fn fragment(self, tile_k: usize, tile_n: usize, at: InTile) -> Fragment {
        Fragment {
            tile_k,
            tile_n,
            lane: at.lane,
            mma_n: at.mma_n,
            register: at.register,
            part: at.part,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [(Activations, u32); 4] = [
        (Activations::Bits16, 4),
        (Activations::Bits16, 8),
        (Activations::Bits8, 4),
        (Activations::Bits8, 8),
    ];

    #[test]
    fn position_and_value_are_inverse() {
        for (activations, bits) in ALL {
            let map = TileMap::new(activations, bits);
            let mut seen = vec![false; TILE_LEN];
            for p in 0..TILE_LEN {
                let v = map.value_at(p);
                assert_eq!(map.position_of(v.k, v.n), p, "{map:?} position {p}");
                assert!(!std::mem::replace(&mut seen[v.k * map.tile_n() + v.n], true));
            }
        }
    }

    /// vLLM's own wording of the format, `marlin_utils_test.get_weight_perm`, restated: lane i,
    /// then 16-column step j, then column block, then the listed rows.
    #[test]
    fn order_follows_the_published_lists() {
        for (activations, bits) in ALL {
            let map = TileMap::new(activations, bits);
            let (rows, steps): (&[usize], usize) = match activations {
                Activations::Bits16 => (&[0, 1, 8, 9], 4),
                Activations::Bits8 => (&[0, 1, 2, 3, 16, 17, 18, 19], 2),
            };
            let per_quad = rows.len() / 2;
            let mut listed = Vec::new();
            for i in 0..32 {
                for j in 0..steps {
                    for block in 0..2 {
                        for r in rows {
                            listed.push((per_quad * (i % 4) + r, 16 * j + 8 * block + i / 4));
                        }
                    }
                }
            }
            let order = interleave(activations, bits);
            for (chunk, run) in listed.chunks(order.len()).enumerate() {
                for (slot, &v) in order.iter().enumerate() {
                    let at = map.value_at(chunk * order.len() + slot);
                    assert_eq!((at.k, at.n), run[v], "{map:?} chunk {chunk} slot {slot}");
                }
            }
        }
    }
}
