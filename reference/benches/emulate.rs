//! Multiply-adds per second of the emulated matrix units: output by output, as they are defined,
//! and [`LANES`] outputs at once. Run with `cargo bench -p marlinspike --bench emulate`.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::tensor_core::{Decoded, LANES, Panel, Row, UNITS, Unit};

fn main() {
    divan::main();
}

const SIZE_K: usize = 2048;
const ROWS: usize = 8;
/// `mma.sync` f16, bf16, e4m3; `wgmma` e4m3; int8.
const NAMES: [&str; 5] = ["mma_f16", "mma_bf16", "mma_e4m3", "wgmma_e4m3", "mma_s8"];

fn unit(name: &str) -> &'static Unit {
    let (instruction, ty) = match name {
        "mma_f16" => ("Mma", ScalarType::FLOAT16),
        "mma_bf16" => ("Mma", ScalarType::BFLOAT16),
        "mma_e4m3" => ("Mma", ScalarType::FLOAT8_E4M3FN),
        "wgmma_e4m3" => ("Wgmma", ScalarType::FLOAT8_E4M3FN),
        _ => ("Mma", ScalarType::INT8),
    };
    let found = UNITS
        .iter()
        .find(|u| format!("{:?}", u.instruction) == instruction && u.inputs == (ty, ty));
    found.expect("a unit of the table")
}

/// Values of magnitude 1/8 to 8 of either sign.
fn codes(ty: ScalarType, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|i| {
            let r = i.wrapping_mul(0x9e37_79b9) >> 8;
            let value = f64::from(r % 255) / 16.0 - 8.0;
            ty.encode_rne(value) & (u32::MAX >> (32 - ty.size_bits()))
        })
        .collect()
}

#[divan::bench(args = NAMES)]
fn one_output(bencher: Bencher, name: &str) {
    let unit = unit(name);
    let decode =
        |seed| Decoded::new(unit, unit.inputs.0, &codes(unit.inputs.0, SIZE_K * seed), SIZE_K);
    let (a, b) = (decode(ROWS), decode(LANES));
    bencher.counter(ItemsCount::new(SIZE_K * ROWS * LANES)).bench_local(|| {
        let mut bits = 0;
        for m in 0..ROWS {
            for n in 0..LANES {
                bits ^= unit.dot(black_box(a.row(m)), b.row(n), 0);
            }
        }
        bits
    });
}

#[divan::bench(args = NAMES)]
fn panel(bencher: Bencher, name: &str) {
    let unit = unit(name);
    let ty = unit.inputs.0;
    let rows: Vec<Row> = codes(ty, SIZE_K * ROWS)
        .chunks(SIZE_K)
        .map(|row| Row::new(unit, row).expect("whole instructions"))
        .collect();
    let b = codes(ty, SIZE_K * LANES);
    let panel = Panel::new(unit, SIZE_K, |k, l| b[l * SIZE_K + k]).expect("whole instructions");
    bencher.counter(ItemsCount::new(SIZE_K * ROWS * LANES)).bench_local(|| {
        let mut bits = 0;
        for row in &rows {
            let mut c = [0; LANES];
            unit.accumulate_panel(black_box(row), &panel, 0..SIZE_K, &mut c);
            bits ^= c[0];
        }
        bits
    });
}
