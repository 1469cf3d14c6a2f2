//! Runs an int4 layer from a checkpoint: mapped where it is packed, packed first where it is not.
//!
//! `cargo run --release -p marlinspike-model --example w4a8_layer -- [CHECKPOINT [LAYER [TOKENS]]]`
//!
//! CHECKPOINT is a folder that `marlinspike convert --to kleidiai` has written, one of its files, or
//! an original checkpoint of int4 weights (default: a small one of the repository). The same digest
//! comes out on every CPU: `scripts/aarch64 run --release -p marlinspike-model --example w4a8_layer`
//! runs it for Arm under qemu.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result};
use marlinspike::case::ActivationRounding;
use marlinspike::num::scalar::ScalarType;
use marlinspike_model::run::input::Inputs;
use marlinspike_model::run::layer::{LoadOptions, Opened};
use sha2::{Digest as _, Sha256};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let small = concat!(env!("CARGO_MANIFEST_DIR"), "/../golden/data/checkpoints/ct-int-w4a8-moe");
    let path = args.next().map_or_else(|| PathBuf::from(small), PathBuf::from);
    let name = args.next();
    let tokens = args.next().map_or(Ok(16), |n| n.parse()).context("TOKENS")?;

    // A packed layer borrows the mapped file: opening it reads a header, and nothing else.
    let opened = Opened::open(&path, None)?;
    let pool = rayon::ThreadPoolBuilder::new().build()?;
    let rounding = ActivationRounding::HalfAway;
    let begun = Instant::now();
    let loaded =
        opened.load(LoadOptions { layer: name.as_deref(), rounding, kernel: None, pool: &pool })?;
    println!("{}: loaded in {:.2?}", loaded.module, begun.elapsed());

    let inputs = Inputs::seeded(1, tokens, ScalarType::FLOAT32, loaded.layer.sizes())?;
    let mut y = loaded.layer.output(&inputs)?;
    let begun = Instant::now();
    pool.install(|| loaded.layer.runner(&inputs)(&mut y))?;
    let bits = y.bits();
    let (size_n, kernel_name) = (loaded.layer.size_n(), loaded.layer.kernel_name());
    println!("y [{}, {size_n}] by {kernel_name} in {:.2?}", bits.len() / size_n, begun.elapsed());

    let equal = pool.install(|| loaded.layer.definition(&inputs))?.bits() == bits;
    let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
    let digest: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    println!("sha256 {digest}, {} the scalar definition", if equal { "equal to" } else { "NOT" });
    anyhow::ensure!(equal, "the kernel {kernel_name} differs from the definition");
    Ok(())
}
