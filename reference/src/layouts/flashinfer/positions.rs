//! The rows of FlashInfer's weights in the list of layouts.

use super::projection::{EPILOGUE_TILE_M, Projection};
use super::{BLOCK_K_BYTES, Fp8BlockBackend, Fp8BlockExpert, PackedRows, RowOrder, RowStep};
use crate::Result;
use crate::layouts::positions::{Named, Part, Positions, Request, values};
use crate::num::dims::Shape;

pub(in crate::layouts) const ALL: &[Named] = &[
    Named {
        name: "flashinfer_shuffled",
        title: "FlashInfer (TensorRT-LLM): weight with shuffled rows",
        options: &["bits"],
        one: |r| flashinfer(r, None),
    },
    Named {
        name: "flashinfer_block_major_k",
        title: "FlashInfer (TensorRT-LLM): weight with shuffled rows in blocks of 128 bytes of k",
        options: &["bits"],
        one: |r| flashinfer(r, Some(BLOCK_K_BYTES)),
    },
    Named {
        name: "flashinfer_fp8_blocks",
        title: "FlashInfer (TensorRT-LLM): w2 of FP8 blocks, shuffled rows in blocks of 128 k",
        options: &[],
        one: fp8_blocks,
    },
];

fn fp8_blocks(r: &Request) -> Result<Positions> {
    let shape = Shape { size_k: r.size_k, size_n: r.size_n };
    let layout = Fp8BlockExpert::new(Fp8BlockBackend::TrtLlm, Projection::W2, shape, false)?;
    values(layout.weight(), 8, [r.size_k, r.size_n], Part::Code)
}

fn flashinfer(r: &Request, block: Option<usize>) -> Result<Positions> {
    let shape = Shape { size_k: r.size_k, size_n: r.size_n };
    let rows = RowOrder::new(r.size_n, &[RowStep::shuffle(EPILOGUE_TILE_M)])?;
    let layout = PackedRows::new(shape, r.bits, rows, block)?;
    values(&layout, 8, [r.size_k, r.size_n], Part::Code)
}
