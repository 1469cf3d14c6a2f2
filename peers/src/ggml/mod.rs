//! ggml's Q4_0 product and layer on repacked weights, where this crate was built with `GGML_DIR`.

#[cfg(ggml)]
mod calls;

#[cfg(ggml)]
pub use calls::Ggml;

use half::f16;
use marlinspike_bench::tile::Tile;

/// Rows of a block of Q4_0.
pub const GROUP: usize = 32;
/// Bytes of a block: an f16 scale and 32 codes.
pub const BLOCK_BYTES: usize = 2 + GROUP / 2;

/// The reason why ggml is missing; `None` if it is available.
pub fn missing() -> Option<&'static str> {
    if cfg!(ggml) { None } else { Some("not built: set GGML_DIR to ggml's source") }
}

/// Column `column` of a tile with groups of 32 in blocks of Q4_0: the same weights, since f16 holds
/// the tile's scales. A byte has the code + 8 of row i in its low nibble, of row i + 16 in its high
/// one.
pub fn q4_0(tile: &Tile, column: usize) -> Vec<u8> {
    let groups = tile.codes(column).chunks_exact(GROUP).zip(tile.scales(column));
    groups
        .flat_map(|(codes, &scale)| {
            let nibble = |code: i8| (code + 8) as u8;
            let pairs = codes[..GROUP / 2].iter().zip(&codes[GROUP / 2..]);
            let bytes = pairs.map(move |(&low, &high)| nibble(low) | nibble(high) << 4);
            f16::from_f32(scale).to_le_bytes().into_iter().chain(bytes)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use marlinspike::num::dims::{GroupSize, Shape};

    /// Decoded by the format's description, the weights are the tile's.
    #[test]
    fn blocks_hold_the_tiles_weights() {
        let tile = Tile::new(Shape::new(96, 8), GroupSize::Of(GROUP), 3).unwrap();
        for column in 0..8 {
            let bytes = q4_0(&tile, column);
            assert_eq!(bytes.len(), 3 * BLOCK_BYTES);
            for (k, expected) in tile.floats(column).enumerate() {
                let block = &bytes[k / 32 * BLOCK_BYTES..][..BLOCK_BYTES];
                let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
                let nibble = block[2 + k % 16] >> (k % 32 / 16 * 4) & 15;
                assert_eq!((f32::from(nibble) - 8.0) * scale, expected, "({k}, {column})");
            }
        }
    }
}
