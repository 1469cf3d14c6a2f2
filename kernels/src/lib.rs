//! CUDA sources of marlinspike, embedded as text.
//!
//! ```
//! let find = |name: &str| marlinspike_kernels::SOURCES.iter().find(|source| source.name == name);
//! let repack = find("gptq_marlin_repack").expect("a source");
//! assert!(repack.text.contains("extern \"C\""));
//! ```
//!
//! The sources include nothing and know no Rust type, so that NVRTC compiles them on any machine.
//! Their parameters are macros, listed in each file's head. What several share (16-bit floats,
//! exponentials) stands in `cu/parts/`, and the text embedded here is a kernel behind its parts.
//! A new kernel is one `.cu` file in `cu/` and one row here.

/// One CUDA source file, with the parts that it needs before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// File name without `.cu`; also the name of the `extern "C"` entry point.
    pub name: &'static str,
    /// Text to compile. `#line` directives give the compiler the files' own lines.
    pub text: &'static str,
}

macro_rules! source {
    ($name:literal $(, $part:literal)*) => {
        source!("" $name $(, $part)*)
    };
    ($folder:literal $name:literal $(, $part:literal)*) => {
        Source {
            name: $name,
            text: concat!(
                $("#line 1 \"", $part, ".cuh\"\n", include_str!(concat!("../cu/parts/", $part, ".cuh")),)*
                "#line 1 \"", $name, ".cu\"\n",
                include_str!(concat!("../cu/", $folder, $name, ".cu"))
            ),
        }
    };
}

/// Every CUDA source, sorted by name.
pub static SOURCES: &[Source] = &[
    source!("awq_marlin_repack", "marlin_tile"),
    source!("gptq_marlin_repack", "marlin_tile"),
    source!(
        "marlin_gemm",
        "half",
        "math",
        "mma",
        "dequantize",
        "depend",
        "barrier",
        "cluster",
        "activation",
        "routing",
        "chunk_sums"
    ),
    source!("marlin_gemm_a8", "half", "mma"),
    source!(
        "marlin_gemm_wgmma",
        "half",
        "mma",
        "dequantize",
        "depend",
        "barrier",
        "wgmma",
        "wgmma_ring"
    ),
    source!("marlin_int4_fp8_preprocess"),
    source!("marlin_permute_scales"),
    source!("moe_activation", "half", "math", "depend", "activation", "activate_eight"),
    source!("moe_align_block_size", "depend", "cluster"),
    source!("moe_gather", "half", "math", "depend", "activation", "activate_eight"),
    source!("moe_permute_cols"),
    source!("moe_sum", "half", "depend"),
    source!("per_token_quant_fp8", "half", "block_max"),
    source!("per_token_quant_int8", "half", "block_max"),
    source!("permute_cols"),
    source!("topk_router", "math", "block_max"),
];

/// Sources that compute nothing of a layer: they measure what a device can do at most. Sorted by name.
pub static PROBES: &[Source] =
    &[source!("probes/" "matrix_limit"), source!("probes/" "read_limit")];

/// The source of that name.
pub fn source(name: &str) -> Option<&'static Source> {
    SOURCES.iter().find(|source| source.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of the files with that extension, sorted, without it.
    fn files(folder: &str, extension: &str) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter_map(|name| name.strip_suffix(extension).map(String::from))
            .collect();
        names.sort();
        names
    }

    #[test]
    fn every_cu_file_has_a_row() {
        let rows: Vec<&str> = SOURCES.iter().map(|source| source.name).collect();
        assert_eq!(files(concat!(env!("CARGO_MANIFEST_DIR"), "/cu"), ".cu"), rows);
        let probes: Vec<&str> = PROBES.iter().map(|source| source.name).collect();
        assert_eq!(files(concat!(env!("CARGO_MANIFEST_DIR"), "/cu/probes"), ".cu"), probes);
    }

    #[test]
    fn every_part_is_used() {
        for part in files(concat!(env!("CARGO_MANIFEST_DIR"), "/cu/parts"), ".cuh") {
            let line = format!("#line 1 \"{part}.cuh\"\n");
            assert!(SOURCES.iter().any(|source| source.text.contains(&line)), "{part}");
        }
    }

    #[test]
    fn sources_stand_alone_and_export_their_name() {
        for Source { name, text } in SOURCES.iter().chain(PROBES) {
            assert!(!text.contains("#include"), "{name} includes a file");
            // Between the two words stand attributes at most.
            let entries: Vec<&str> = text.split("extern \"C\" __global__ void").skip(1).collect();
            assert!(!entries.is_empty(), "{name} has no entry point");
            // Several only where the preprocessor leaves one of them.
            assert!(entries.len() == 1 || text.contains("#else"), "{name}: {}", entries.len());
            for entry in entries {
                let head = entry.split_once('{').map_or(entry, |(head, _)| head);
                assert!(head.contains(&format!("{name}(")), "{name} lacks its entry point");
            }
        }
    }

    #[test]
    fn lookup_is_by_exact_name() {
        assert_eq!(source("gptq_marlin_repack"), SOURCES.iter().find(|s| s.name.starts_with("gp")));
        assert_eq!(source("gptq_marlin_repack.cu"), None);
    }
}
