//! CUDA sources of marlinspike, embedded as text.
//!
//! ```
//! let repack = marlinspike_kernels::source("gptq_marlin_repack").expect("a source");
//! assert!(repack.text.contains("extern \"C\""));
//! ```
//!
//! The sources depend on no Rust type and include only each other, so NVRTC compiles them on any
//! machine. Their parameters are constants that the caller of the compiler puts before the text
//! ([`prelude`]); the head of each file lists them. Sizes that the host needs, such as those of
//! shared memory, are constants of the sources too: [`constant`] evaluates them, so no formula is
//! written twice.
//!
//! A new kernel is one `.cu` file in `cu/` and its name in the list here. What several kernels share is in `cu/parts/`.

mod constants;
mod includes;

use std::sync::LazyLock;

pub use constants::{ConstantError, constant};

/// A compile-time parameter of a source: name and value.
pub type Parameter = (&'static str, u32);

/// One CUDA source, with the text of the files that it includes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// File name without `.cu`; also the name of the `extern "C"` entry point.
    pub name: &'static str,
    /// Text to compile, after its [`prelude`]. `#line` directives give the compiler the files' own lines.
    pub text: &'static str,
}

macro_rules! files {
    ($folder:literal, $extension:literal: $($name:literal)*) => {
        &[$(($name, include_str!(concat!("../cu/", $folder, $name, $extension)))),*]
    };
}

/// Kernels: name and text, sorted by name.
const KERNELS: &[(&str, &str)] = files!("", ".cu":
    "add_ranks"
    "awq_marlin_repack"
    "fp8_gemm"
    "gptq_marlin_repack"
    "marlin_gemm"
    "marlin_gemm_a8"
    "marlin_gemm_a8_wgmma"
    "marlin_gemm_wgmma"
    "marlin_int4_fp8_preprocess"
    "marlin_permute_scales"
    "moe_activation"
    "moe_align_block_size"
    "moe_gather"
    "moe_permute_cols"
    "moe_sum"
    "moe_sum_ranks"
    "per_token_group_quant_fp8"
    "per_token_quant_fp8"
    "per_token_quant_int8"
    "permute_cols"
    "topk_router"
);

/// Kernels that measure a device's limits.
const LIMITS: &[(&str, &str)] = files!("probes/", ".cu": "matrix_limit" "read_limit");

/// Included files, sorted by name.
const PARTS: &[(&str, &str)] = files!("parts/", ".cuh":
    "a8_wgmma_activate"
    "a8_wgmma_columns"
    "a8_wgmma_few"
    "a8_wgmma_ring"
    "a8_wgmma_shared"
    "a8_wgmma_sizes"
    "a8_wgmma_stages"
    "activate_eight"
    "activation"
    "barrier"
    "block_max"
    "chunk_sums"
    "cluster"
    "cut"
    "depend"
    "dequantize"
    "few_entries"
    "formats/a8"
    "formats/codes"
    "formats/e2m1"
    "formats/e4m3"
    "formats/int4"
    "formats/one_step"
    "formats/scales"
    "formats/types"
    "formats/uint8b128"
    "fp8_gemm_few"
    "fp8_gemm_many"
    "fp8_gemm_ring"
    "fp8_gemm_sizes"
    "fp8_groups"
    "fp8_rows"
    "fragments"
    "gemm_operands"
    "gemm_sizes"
    "gemm_streams"
    "half"
    "marlin_tile"
    "math"
    "mma"
    "place_entries"
    "ranks"
    "resident"
    "routing"
    "run_stages"
    "single_order"
    "tiles"
    "to_e4m3fn"
    "wgmma"
    "wgmma_fp8"
    "wgmma_fp8_registers"
    "wgmma_ring"
    "wgmma_sizes"
    "wgmma_totals"
    "write_columns"
);

/// Every CUDA source, sorted by name.
pub static SOURCES: LazyLock<Vec<Source>> = LazyLock::new(|| sources(KERNELS));

/// Kernels that measure a device's limits, and are no part of a layer. Sorted by name.
pub static PROBES: LazyLock<Vec<Source>> = LazyLock::new(|| sources(LIMITS));

fn sources(files: &[(&'static str, &'static str)]) -> Vec<Source> {
    files
        .iter()
        .map(|&(name, text)| Source { name, text: includes::resolved(name, text) })
        .collect()
}

/// The source of that name, of [`SOURCES`] or [`PROBES`].
pub fn source(name: &str) -> Option<&'static Source> {
    SOURCES.iter().chain(PROBES.iter()).find(|source| source.name == name)
}

/// The text that goes before a source's own: its parameters as constants.
///
/// `CLUSTER` is the attribute of an entry point whose thread blocks form clusters of the parameter `RANKS`. No
/// expression can leave an attribute out, so it is a macro.
pub fn prelude(parameters: &[Parameter]) -> String {
    let ranks = parameters.iter().find(|(name, _)| *name == "RANKS").map_or(1, |&(_, ranks)| ranks);
    let cluster = match ranks {
        1 => String::new(),
        _ => format!(" __cluster_dims__({ranks}, 1, 1)"),
    };
    let constants =
        parameters.iter().map(|(name, value)| format!("constexpr unsigned {name} = {value};\n"));
    std::iter::once(format!("#define CLUSTER{cluster}\n")).chain(constants).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of the files with that extension, sorted, without it.
    fn files(folder: &str, extension: &str) -> Vec<String> {
        let folder = format!("{}/cu/{folder}", env!("CARGO_MANIFEST_DIR"));
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter_map(|name| name.strip_suffix(extension).map(String::from))
            .collect();
        names.sort();
        names
    }

    fn names(files: &[(&'static str, &str)]) -> Vec<&'static str> {
        files.iter().map(|file| file.0).collect()
    }

    #[test]
    fn every_file_is_listed() {
        assert_eq!(files("", ".cu"), names(KERNELS));
        assert_eq!(files("probes", ".cu"), names(LIMITS));
        let mut parts = files("parts", ".cuh");
        parts.extend(files("parts/formats", ".cuh").iter().map(|name| format!("formats/{name}")));
        parts.sort();
        assert_eq!(parts, names(PARTS));
    }

    #[test]
    fn every_part_is_included() {
        for (part, _) in PARTS {
            let line = format!("#line 1 \"{part}.cuh\"\n");
            assert!(SOURCES.iter().any(|source| source.text.contains(&line)), "{part}");
        }
    }

    #[test]
    fn sources_stand_alone_and_export_their_name() {
        for Source { name, text } in SOURCES.iter().chain(PROBES.iter()) {
            assert!(!text.contains("#include"), "{name} includes an unknown file");
            let entries: Vec<&str> = text.split("extern \"C\" __global__ void").skip(1).collect();
            assert_eq!(entries.len(), 1, "{name}");
            let head = entries[0].split_once('{').map_or(entries[0], |(head, _)| head);
            assert!(head.contains(&format!("{name}(")), "{name} lacks its entry point");
        }
    }

    /// Parameters are constants: the preprocessor cannot read them.
    #[test]
    fn only_the_architecture_is_a_condition_of_the_preprocessor() {
        for (name, text) in KERNELS.iter().chain(LIMITS).chain(PARTS) {
            let conditions = text.lines().filter(|line| line.starts_with("#if"));
            for line in conditions {
                assert!(line.starts_with("#if __CUDA_ARCH__"), "{name}: {line}");
            }
        }
    }

    /// The most lines of a function or type of a file, with its first line.
    fn longest(text: &'static str) -> (usize, &'static str) {
        let (mut start, mut is_open, mut longest) = (None, false, (0, ""));
        for (i, line) in text.lines().enumerate() {
            if line.starts_with('}') {
                longest = start.map_or(longest, |(at, first)| longest.max((i + 1 - at, first)));
                start = None;
            } else if start.is_none() && line.starts_with(char::is_alphabetic) {
                (start, is_open) = (Some((i, line)), false);
            }
            is_open |= line.ends_with('{');
            if line.ends_with(';') && !is_open {
                start = None;
            }
        }
        longest
    }

    #[test]
    fn functions_are_shorter_than_150_lines() {
        let text = "constexpr unsigned A =\n    1;\ntemplate <int N>\nvoid f(int a,\n       int b) {\n    \
                    g();\n\n    h();\n}\n";
        assert_eq!(longest(text), (7, "template <int N>"));
        for (name, text) in KERNELS.iter().chain(LIMITS).chain(PARTS) {
            let (lines, first) = longest(text);
            assert!(lines < 150, "{name}: {lines} lines from `{first}` on");
        }
        assert!(KERNELS.iter().any(|(_, text)| longest(text).0 > 100), "nothing was measured");
    }

    #[test]
    fn lookup_is_by_exact_name() {
        assert_eq!(source("gptq_marlin_repack"), SOURCES.iter().find(|s| s.name.starts_with("gp")));
        assert_eq!(source("gptq_marlin_repack.cu"), None);
    }

    #[test]
    fn a_prelude_states_parameters_and_clusters() {
        assert_eq!(
            prelude(&[("RANKS", 8), ("IS_BF16", 1)]),
            "#define CLUSTER __cluster_dims__(8, 1, 1)\nconstexpr unsigned RANKS = 8;\n\
             constexpr unsigned IS_BF16 = 1;\n"
        );
        assert_eq!(prelude(&[("RANKS", 1)]), "#define CLUSTER\nconstexpr unsigned RANKS = 1;\n");
    }
}
