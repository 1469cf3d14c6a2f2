//! Compares the emulated matrix units with tiles that a GPU computed.
//!
//! `cargo run --release -p marlinspike --example verify_tiles FILE`, with the file that
//! `scripts/probe/tensor_core.cu` writes: for each instruction a 32-byte name, six int32
//! (unused, unused, unused, bytes of a row's k, rows of a tile, tiles), then `a [tiles, rows, kb]`,
//! `b [tiles, 8, kb]`, `c` and `d [tiles, rows, 8]` as 32-bit words.

use std::io::Read;
use std::process::ExitCode;

use marlinspike::num::scalar::ScalarType;
use marlinspike::products::tensor_core::{Architecture, Decoded, Instruction, Unit, find};
use rayon::prelude::*;

/// `mma_e4m3_f32` and so on to a row of the table.
fn unit(name: &str, size_k: usize) -> Option<&'static Unit> {
    let mut parts = name.split('_');
    let instruction = match parts.next()? {
        "mma" => Instruction::Mma,
        "wgmma" => Instruction::Wgmma,
        _ => return None,
    };
    let ty = |name| match name {
        "f16" => Some(ScalarType::FLOAT16),
        "bf16" => Some(ScalarType::BFLOAT16),
        "tf32" | "f32" => Some(ScalarType::FLOAT32),
        "e4m3" => Some(ScalarType::FLOAT8_E4M3FN),
        "e5m2" => Some(ScalarType::FLOAT8_E5M2),
        "s8" | "s32" => Some(ScalarType::INT8),
        _ => None,
    };
    let names: Vec<_> = parts.collect();
    let (a, b, c) = match names[..] {
        [a, c] => (a, a, c),
        [a, b, c] => (a, b, c),
        _ => return None,
    };
    find(Architecture::Hopper, instruction, (ty(a)?, ty(b)?), ty(c)?, size_k)
}

fn codes(ty: ScalarType, bytes: &[u8]) -> Vec<u32> {
    let wide = |c: &[u8]| c.iter().rev().fold(0, |x, &b| x << 8 | u32::from(b));
    bytes.chunks(ty.storage_bits() as usize / 8).map(wide).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    codes(ScalarType::FLOAT32, bytes)
}

fn main() -> std::io::Result<ExitCode> {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("usage: verify_tiles FILE");
        return Ok(ExitCode::from(2));
    };
    let mut file = std::io::BufReader::new(std::fs::File::open(path)?);
    let mut ok = true;
    println!("{:16} {:>12} {:>12} {:>10}", "instruction", "outputs", "differing", "MMAC/s");
    let mut name = [0u8; 32];
    while file.read_exact(&mut name).is_ok() {
        let mut header = [0u8; 24];
        file.read_exact(&mut header)?;
        let header = words(&header);
        let [_, _, _, row_bytes, rows, tiles] = header[..] else { unreachable!("six words") };
        let (row_bytes, rows, tiles) = (row_bytes as usize, rows as usize, tiles as usize);
        let mut read = |len: usize| {
            let mut bytes = vec![0; len];
            file.read_exact(&mut bytes).map(|()| bytes)
        };
        let a = read(tiles * rows * row_bytes)?;
        let b = read(tiles * 8 * row_bytes)?;
        let c = words(&read(tiles * rows * 8 * 4)?);
        let d = words(&read(tiles * rows * 8 * 4)?);
        let name = String::from_utf8_lossy(&name);
        let name = name.trim_end_matches('\0');
        let bytes = if name.contains("tf32") {
            4
        } else if name.contains("_f16_") || name.contains("bf16") {
            2
        } else {
            1
        };
        let size_k = row_bytes / bytes;
        let Some(unit) = unit(name, size_k) else {
            println!("{name:16} no row of the table");
            ok = false;
            continue;
        };
        let start = std::time::Instant::now();
        let wrong: usize = (0..tiles)
            .into_par_iter()
            .map(|t| {
                let tile = |x: &[u8], ty, rows: usize| {
                    let part = &x[t * rows * row_bytes..][..rows * row_bytes];
                    Decoded::new(unit, ty, &codes(ty, part), size_k)
                };
                let (a, b) = (tile(&a, unit.inputs.0, rows), tile(&b, unit.inputs.1, 8));
                let outputs = (0..rows * 8).filter(|&i| {
                    let at = t * rows * 8 + i;
                    unit.accumulate(a.row(i / 8), b.row(i % 8), c[at]) != d[at]
                });
                outputs.count()
            })
            .sum();
        let seconds = start.elapsed().as_secs_f64();
        let outputs = tiles * rows * 8;
        let rate = (outputs * size_k) as f64 / seconds / 1e6;
        println!("{name:16} {outputs:12} {wrong:12} {rate:10.0}");
        ok &= wrong == 0;
    }
    Ok(ExitCode::from(u8::from(!ok)))
}
