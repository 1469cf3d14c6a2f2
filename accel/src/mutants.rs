//! Kernels with one mistake each. A law is tested by its rejection of each of them.
//!
//! A mutant is one change to a source's text, made before it is compiled. Each change leaves every
//! index inside the buffers that the right kernel stays in, so that a launch is as safe as before.

use std::sync::OnceLock;

use marlinspike_kernels::{Source, source};

/// A source with one mistake.
#[derive(Debug)]
pub struct Mutant {
    /// What is wrong.
    pub name: &'static str,
    /// The source in [`marlinspike_kernels::SOURCES`] that it is in.
    pub source: &'static str,
    /// The correct text, which occurs once.
    from: &'static str,
    /// Its wrong replacement.
    to: &'static str,
    wrong: OnceLock<Option<&'static Source>>,
}

impl Mutant {
    const fn new(
        name: &'static str,
        source: &'static str,
        from: &'static str,
        to: &'static str,
    ) -> Self {
        Self { name, source, from, to, wrong: OnceLock::new() }
    }

    /// The wrong source; `None` where the right one does not hold the text to change exactly once.
    pub fn text(&self) -> Option<&'static Source> {
        *self.wrong.get_or_init(|| {
            let right = source(self.source)?;
            if right.text.matches(self.from).count() != 1 {
                return None;
            }
            // A source lives as long as the program, as the embedded ones do.
            let text = Box::leak(right.text.replacen(self.from, self.to, 1).into_boxed_str());
            Some(Box::leak(Box::new(Source { name: right.name, text })))
        })
    }
}

/// Every mutant, in the order of the sources.
pub static MUTANTS: [Mutant; 23] = [
    Mutant::new(
        "positions of a word not interleaved",
        "awq_marlin_repack",
        "c % 2 * (PACK / 2) + c / 2",
        "c",
    ),
    Mutant::new(
        "the tile's two blocks of columns exchanged",
        "gptq_marlin_repack",
        "block * 8 + lane / 4",
        "(1 - block) * 8 + lane / 4",
    ),
    Mutant::new(
        "act-order: the neighbouring row",
        "gptq_marlin_repack",
        "k = rows[k];",
        "k = rows[k ^ 1u];",
    ),
    Mutant::new(
        "a column's scale is its neighbour's",
        "marlin_gemm",
        "scale[2 * j + 1] = twice<1>(scales);",
        "scale[2 * j + 1] = twice<0>(scales);",
    ),
    Mutant::new(
        "a column's scale is its neighbour's, in one step with the codes",
        "marlin_gemm",
        "fma2(codes, half_of<HIGH>(times), half_of<HIGH>(minus))",
        "fma2(codes, half_of<0>(times), half_of<HIGH>(minus))",
    ),
    Mutant::new(
        "chunks added from the last to the second",
        "marlin_gemm",
        "sum.x = c < chunks ? __fadd_rn(sum.x, of_chunk[c].x) : sum.x;",
        "sum.x = __fadd_rn(sum.x, of_chunk[CHUNKS - c].x);",
    ),
    Mutant::new(
        "bias of the next column",
        "marlin_gemm",
        "sum.x = __fadd_rn(sum.x, widen(bias[0]));",
        "sum.x = __fadd_rn(sum.x, widen(bias[1]));",
    ),
    Mutant::new(
        "router weight of the first row for all",
        "marlin_gemm",
        "const float weight = topk_weights[entry];",
        "const float weight = topk_weights[0];",
    ),
    Mutant::new(
        "the scale of the first row for all",
        "marlin_gemm_a8",
        "__fmul_rn(p.x_scales[p.x_row(entry)], p.x_factor)",
        "__fmul_rn(p.x_scales[0], p.x_factor)",
    ),
    Mutant::new(
        "a column's scale is its neighbour's, 8-bit activations",
        "marlin_gemm_a8",
        "scale[2 * j + i / 2], chunk[j][m][i]",
        "scale[2 * j], chunk[j][m][i]",
    ),
    Mutant::new(
        "bias of the neighbouring eight columns",
        "marlin_gemm_wgmma",
        "of[single_position(n0 % 64 + c * 8 + lane / 4)]",
        "of[single_position(n0 % 64 + (c ^ 1) * 8 + lane / 4)]",
    ),
    Mutant::new(
        "router weight of the neighbouring row",
        "marlin_gemm_wgmma",
        "__shfl_sync(~0u, row_weights.weight[first / 32], row)",
        "__shfl_sync(~0u, row_weights.weight[first / 32], row ^ 1u)",
    ),
    Mutant::new(
        "a code that equals its zero point",
        "marlin_int4_fp8_preprocess",
        "v >= z ?",
        "v > z ?",
    ),
    Mutant::new(
        "two columns of a run exchanged",
        "marlin_permute_scales",
        "p % 8 * 8 + p / 8",
        "p % 8 * 8 + (p / 8 ^ 1u)",
    ),
    Mutant::new(
        "a limit that swallows a NaN",
        "moe_activation",
        "return x > limit ? limit : x;",
        "return fminf(x, limit);",
    ),
    Mutant::new(
        "padding that names a token",
        "moe_align_block_size",
        "sorted_token_ids[i] = static_cast<int>(numel);",
        "sorted_token_ids[i] = 0;",
    ),
    Mutant::new(
        "the row of another token",
        "moe_gather",
        "__ldcg(x + row * pieces + at)",
        "__ldcg(x + (row ^ row % 2) * pieces + at)",
    ),
    Mutant::new(
        "neighbouring columns exchanged",
        "moe_permute_cols",
        "<< 16 | row[from.x]",
        "<< 16 | row[from.y]",
    ),
    Mutant::new(
        "slots added from the last",
        "moe_sum",
        "size_t of = first + j;",
        "size_t of = first + top_k - 1 - j;",
    ),
    Mutant::new("saturation to NaN", "per_token_quant_fp8", ", 0x7eu);", ", 0x7fu);"),
    Mutant::new(
        "a scale by division",
        "per_token_quant_int8",
        "__fmul_rn(max, 1.0f / 127.0f)",
        "__fdiv_rn(max, 127.0f)",
    ),
    Mutant::new(
        "columns in reverse",
        "permute_cols",
        "at - k + perm[k]",
        "at - k + perm[size_k - 1 - k]",
    ),
    Mutant::new("of equal experts the higher id", "topk_router", "other_id < id", "other_id > id"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use marlinspike_kernels::SOURCES;

    use super::*;

    #[test]
    fn every_mutant_differs_from_its_source() {
        for mutant in &MUTANTS {
            let made = mutant.text().unwrap_or_else(|| {
                panic!("{}: {:?} does not stand in it once", mutant.source, mutant.from)
            });
            let right = source(mutant.source).unwrap();
            assert_eq!(made.name, right.name);
            assert_ne!(made.text, right.text, "{}", mutant.name);
        }
    }

    #[test]
    fn every_source_has_a_mutant() {
        let mutated: BTreeSet<_> = MUTANTS.iter().map(|mutant| mutant.source).collect();
        assert_eq!(mutated, SOURCES.iter().map(|source| source.name).collect());
    }
}
