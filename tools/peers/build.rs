//! Builds ggml from the source in `GGML_DIR`, and the C wrapper that this crate calls; without
//! `GGML_DIR` it builds nothing.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-env-changed=GGML_DIR");
    println!("cargo::rerun-if-env-changed=GGML_OPTIONS");
    println!("cargo::rerun-if-changed=src/ggml/calls.c");
    let Some(dir) = env::var_os("GGML_DIR").filter(|dir| !dir.is_empty()) else { return };
    let dir = Path::new(&dir);
    let header = dir.join("include/ggml.h");
    if !header.is_file() {
        println!("cargo::error=GGML_DIR: {} is missing: not ggml's source", header.display());
        return;
    }
    // Uses the default options except for OpenMP, since only ggml's own threads can be pinned.
    let mut config = cmake::Config::new(dir);
    let options = env::var("GGML_OPTIONS").unwrap_or_else(|_| "GGML_NATIVE=ON".to_owned());
    for (key, value) in options.split_whitespace().filter_map(|option| option.split_once('=')) {
        config.define(key, value);
    }
    let built = config
        .profile("Release")
        .define("GGML_OPENMP", "OFF")
        .define("GGML_BUILD_TESTS", "OFF")
        .define("GGML_BUILD_EXAMPLES", "OFF")
        .define("BUILD_SHARED_LIBS", "OFF")
        .build();
    cc::Build::new()
        .file("src/ggml/calls.c")
        .include(dir.join("include"))
        .opt_level(2)
        .warnings(true)
        .compile("marlinspike_ggml_calls");
    for folder in ["lib", "lib64"] {
        println!("cargo::rustc-link-search=native={}", built.join(folder).display());
    }
    for library in ["ggml", "ggml-cpu", "ggml-base"] {
        println!("cargo::rustc-link-lib=static={library}");
    }
    println!("cargo::rustc-link-lib=stdc++");
    println!("cargo::rustc-cfg=ggml");
}
