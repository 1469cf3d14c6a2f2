//! ggml's products and layers with 4-bit weights, where this crate was built with `GGML_DIR`.

#[cfg(ggml)]
mod calls;

#[cfg(ggml)]
pub use calls::Ggml;

use std::ffi::CStr;

use half::f16;
use marlinspike_bench::Workload;
use marlinspike_bench::tile::Tile;

/// Rows of a block of Q4_0.
pub const GROUP: usize = 32;
/// Bytes of a block: an f16 scale and 32 codes.
pub const BLOCK_BYTES: usize = 2 + GROUP / 2;

/// A way to run a product or layer in ggml.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Configuration {
    /// Name in reports.
    pub name: &'static str,
    /// The buffer type of the weights.
    pub buffer: &'static CStr,
    /// The weights' type.
    pub weights: Format,
    /// Whether the buffer type has layers, too.
    pub layers: bool,
    /// Whether every build and CPU has it.
    pub required: bool,
}

/// A type of weights, with ggml's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Blocks of 32 with an f16 scale.
    Q4_0 = 2,
    /// Blocks of 256 with scales and minima of 32.
    Q4K = 12,
    /// Blocks of 256 with scales of 32, and a table of values.
    Iq4Xs = 23,
    /// e2m1 in blocks of 32 with a UE8M0 scale.
    Mxfp4 = 39,
}

/// What int4 weights are compared with: from 8 rows on, ggml has its `tiled` products for Q4_K and
/// IQ4_XS in plain buffers.
pub const INT4: [Configuration; 4] = [
    Configuration {
        name: "ggml Q4_0",
        buffer: c"CPU_REPACK",
        weights: Format::Q4_0,
        layers: true,
        required: true,
    },
    Configuration {
        name: "ggml AMX",
        buffer: c"AMX",
        weights: Format::Q4_0,
        layers: false,
        required: false,
    },
    Configuration {
        name: "ggml Q4_K",
        buffer: c"CPU",
        weights: Format::Q4K,
        layers: true,
        required: true,
    },
    Configuration {
        name: "ggml IQ4_XS",
        buffer: c"CPU",
        weights: Format::Iq4Xs,
        layers: true,
        required: true,
    },
];

/// What MXFP4 layers are compared with.
pub const MXFP4: [Configuration; 2] = [
    Configuration {
        name: "ggml MXFP4",
        buffer: c"CPU_REPACK",
        weights: Format::Mxfp4,
        layers: true,
        required: true,
    },
    Configuration {
        name: "ggml MXFP4, plain",
        buffer: c"CPU",
        weights: Format::Mxfp4,
        layers: true,
        required: true,
    },
];

impl Configuration {
    /// Whether the workload's matrices consist of whole blocks, in a buffer type that has it.
    pub fn takes(&self, workload: Workload) -> bool {
        let block = match self.weights {
            Format::Q4_0 | Format::Mxfp4 => GROUP,
            Format::Q4K | Format::Iq4Xs => 256,
        };
        let [a, b] = workload.sizes();
        match workload {
            Workload::Dense { .. } => a.is_multiple_of(block),
            Workload::Moe { .. } => {
                self.layers && a.is_multiple_of(block) && b.is_multiple_of(block)
            }
        }
    }
}

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
