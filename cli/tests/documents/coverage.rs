//! The page of laws, axis values and devices.

use std::path::Path;

use crate::support::{run, stdout};

/// The page is what the program prints, and no cell is empty without a reason.
#[test]
fn the_page_is_what_the_program_prints() {
    let printed = stdout(&run(["vectors", "--coverage"])).to_owned();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/results/coverage.md");
    if std::env::var_os("MARLINSPIKE_WRITE_DOCS").is_some() {
        std::fs::write(&path, &printed).unwrap();
    }
    let page = std::fs::read_to_string(&path).unwrap_or_default();
    let help = "run this test with MARLINSPIKE_WRITE_DOCS=1 to write docs/src/results/coverage.md";
    assert!(page == printed, "{help}");
    assert!(!printed.contains("no test"), "an empty cell without a reason");
}

#[test]
fn one_operation_alone() {
    let moe = stdout(&run(["vectors", "--coverage", "--op", "moe"])).to_owned();
    assert!(moe.starts_with("## `moe`") && moe.contains("| `top_k` | 6 |"), "{moe}");
    // Without a covering array, and without a law on CUDA.
    let swizzle = stdout(&run(["vectors", "--coverage", "--op", "swizzle_blockscale"])).to_owned();
    assert!(swizzle.contains("no kernel of this project computes the operation"), "{swizzle}");
    let both = run(["vectors", "--coverage", "--list", "--op", "moe"]);
    assert_eq!(both.status.code(), Some(2));
}
