//! CUDA sources of marlinspike, embedded as text.
//!
//! The sources include nothing and know no Rust type, so that NVRTC compiles them on any machine
//! and a reader can take one away alone. Their parameters are macros, listed in each file's head.
//! A new kernel is one `.cu` file in `cu/` and one row here.

/// One CUDA source file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// File name without `.cu`; also the name of the `extern "C"` entry point.
    pub name: &'static str,
    /// Text of the file.
    pub text: &'static str,
}

macro_rules! source {
    ($name:literal) => {
        Source { name: $name, text: include_str!(concat!("../cu/", $name, ".cu")) }
    };
}

/// Every CUDA source, sorted by name.
pub static SOURCES: &[Source] = &[source!("gptq_marlin_repack")];

/// The source of that name.
pub fn source(name: &str) -> Option<&'static Source> {
    SOURCES.iter().find(|source| source.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cu_file_has_a_row() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/cu");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        let rows: Vec<String> =
            SOURCES.iter().map(|source| format!("{}.cu", source.name)).collect();
        assert_eq!(files, rows);
    }

    #[test]
    fn sources_stand_alone_and_export_their_name() {
        for Source { name, text } in SOURCES {
            assert!(!text.contains("#include"), "{name} includes a file");
            assert!(
                text.contains(&format!("extern \"C\" __global__ void {name}(")),
                "{name} lacks its entry point"
            );
        }
    }

    #[test]
    fn lookup_is_by_exact_name() {
        assert_eq!(source("gptq_marlin_repack"), Some(&SOURCES[0]));
        assert_eq!(source("gptq_marlin_repack.cu"), None);
    }
}
