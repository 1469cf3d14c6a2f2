//! Every measured matrix unit compared with tiles that an H200 computed: no bit may differ.

use marlinspike::container::Container;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::products::tensor_core::{
    Accumulator, Architecture, Decoded, Instruction, KSplit, UNITS, Unit, find,
};
use marlinspike_golden::Manifest;

/// The name that the probe gives a unit: `mma_e4m3_e5m2_f32.k32`.
fn name(unit: &Unit) -> String {
    let ty = |ty| match ty {
        ScalarType::FLOAT16 => "f16",
        ScalarType::BFLOAT16 => "bf16",
        ScalarType::FLOAT32 => "tf32",
        ScalarType::FLOAT8_E4M3FN => "e4m3",
        ScalarType::FLOAT8_E5M2 => "e5m2",
        _ => "s8",
    };
    let instruction = match unit.instruction {
        Instruction::Mma => "mma",
        Instruction::Wgmma => "wgmma",
        Instruction::Tcgen05 => "tcgen05",
    };
    let accumulator = match unit.accumulator {
        Accumulator::F32 { .. } => "f32",
        Accumulator::F16 => "f16",
        Accumulator::S32 => "s32",
    };
    let (a, b) = (ty(unit.inputs.0), ty(unit.inputs.1));
    let inputs = if a == b { a.to_owned() } else { format!("{a}_{b}") };
    format!("{instruction}_{inputs}_{accumulator}.k{}", unit.size_k)
}

fn codes(ty: ScalarType, tensor: &Tensor<'_>) -> Vec<u32> {
    let wide = |c: &[u8]| c.iter().rev().fold(0, |x, &b| x << 8 | u32::from(b));
    tensor.bytes().chunks(ty.storage_bits() as usize / 8).map(wide).collect()
}

#[test]
fn every_measured_unit_reproduces_the_gpu() {
    let golden = Manifest::load().expect("the golden manifest");
    let path = golden.path("data/tables/tensor_core_tiles.safetensors");
    let bytes = std::fs::read(path).expect("the golden tiles");
    let tiles = Container::parse(&bytes).expect("a container");
    let measured = UNITS.iter().filter(|u| u.evidence.starts_with("measured"));
    let mut units = 0;
    for unit in measured {
        let name = name(unit);
        let part = |p: &str| tiles.tensor(&format!("{name}.{p}")).unwrap_or_else(|e| panic!("{e}"));
        let (a, b, c, d) = (part("a"), part("b"), part("c"), part("d"));
        let [count, rows, _] = a.dims3().expect("three dimensions");
        let a = Decoded::new(unit, unit.inputs.0, &codes(unit.inputs.0, &a), unit.size_k);
        let b = Decoded::new(unit, unit.inputs.1, &codes(unit.inputs.1, &b), unit.size_k);
        let (c, d) = (c.elements::<u32>(), d.elements::<u32>());
        let mut outputs = 0;
        for tile in 0..count {
            for (m, n) in (0..rows).flat_map(|m| (0..8).map(move |n| (m, n))) {
                let at = (tile * rows + m) * 8 + n;
                let found = unit.accumulate(a.row(tile * rows + m), b.row(tile * 8 + n), c[at]);
                assert_eq!(
                    found, d[at],
                    "{name}: tile {tile}, row {m}, column {n}, c {:#x}",
                    c[at]
                );
                outputs += 1;
            }
        }
        assert!(outputs >= 2048, "{name}: {outputs} outputs");
        units += 1;
    }
    assert_eq!(units, 19);
    // Nothing was measured that the table lacks.
    assert_eq!(tiles.names().count(), 4 * units);
}

/// The fused sum of numbers that need no care: an independent sum.
#[test]
fn small_integers_are_added_exactly() {
    let half = ScalarType::FLOAT16;
    let unit = find(Architecture::Hopper, Instruction::Mma, (half, half), ScalarType::FLOAT32, 16)
        .expect("a unit");
    let code = |x: i32| half.encode_rne(f64::from(x));
    let a: Vec<i32> = (0..48).map(|k| k % 17 - 8).collect();
    let b: Vec<i32> = (0..48).map(|k| k % 13 - 6).collect();
    let decode = |v: &[i32]| {
        Decoded::new(unit, half, &v.iter().map(|&x| code(x)).collect::<Vec<_>>(), v.len())
    };
    let exact: i32 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
    let found = unit.dot(decode(&a).row(0), decode(&b).row(0), 100f32.to_bits());
    assert_eq!(f32::from_bits(found), (exact + 100) as f32);
    // A length that is not a multiple of the instruction's k.
    let exact: i32 = a[..21].iter().zip(&b[..21]).map(|(a, b)| a * b).sum();
    let found = unit.dot(decode(&a[..21]).row(0), decode(&b[..21]).row(0), 0);
    assert_eq!(f32::from_bits(found), exact as f32);
}

/// What no IEEE sum does: a product 2^26 below the largest one is lost before the addition.
#[test]
fn small_terms_are_truncated_at_f_bits() {
    let half = ScalarType::FLOAT16;
    let unit = find(Architecture::Hopper, Instruction::Mma, (half, half), ScalarType::FLOAT32, 16)
        .expect("a unit");
    let row = |values: [f64; 2]| {
        let mut codes = vec![0; 16];
        codes[..2].copy_from_slice(&values.map(|v| half.encode_rne(v)));
        Decoded::new(unit, half, &codes, 16)
    };
    let sum = |small: f64| {
        let (a, b) = (row([4096.0, small]), row([1.0, 1.0]));
        f32::from_bits(unit.accumulate(a.row(0), b.row(0), (-4096f32).to_bits()))
    };
    // 4096 = 2^12, F = 25: the last kept weight is 2^-13.
    assert_eq!(sum(2f64.powi(-13)), 2f32.powi(-13));
    assert_eq!(sum(2f64.powi(-14)), 0.0);
    assert_eq!(sum(-2f64.powi(-14)), 0.0);
}

/// A unit's row in `docs/src/internals/tensor-cores.md`.
fn documented(unit: &Unit) -> String {
    let ty = |ty: ScalarType| if ty == ScalarType::FLOAT32 { "tf32" } else { ty.name() };
    let instruction = match unit.instruction {
        Instruction::Mma => "mma.sync",
        Instruction::Wgmma => "wgmma",
        Instruction::Tcgen05 => "tcgen05.mma",
    };
    let (to, kept) = match unit.accumulator {
        Accumulator::F32 { kept_bits: 24 } => ("float32", "truncated".to_owned()),
        Accumulator::F32 { kept_bits } => ("float32", format!("truncated to {kept_bits} bits")),
        Accumulator::F16 => ("float16", "nearest even".to_owned()),
        Accumulator::S32 => ("int32", "exact".to_owned()),
    };
    let sums = match unit.split {
        KSplit::Whole => "one".to_owned(),
        KSplit::Blocks(n) => format!("{} of {n} k", unit.size_k / n),
        KSplit::Pairs => "k mod 4 in {0, 1}, then {2, 3}; c last".to_owned(),
    };
    let bits = match unit.accumulator {
        Accumulator::S32 => "–".to_owned(),
        _ => unit.fraction_bits.to_string(),
    };
    let evidence = unit.evidence.split([' ', ',', ':']).next().unwrap_or_default();
    format!(
        "| {:?} | {instruction} | {} × {} → {to} | {} | {sums} | {bits} | {kept} | {evidence} |",
        unit.architecture,
        ty(unit.inputs.0),
        ty(unit.inputs.1),
        unit.size_k
    )
}

#[test]
fn the_documents_table_is_the_table() {
    let page = include_str!("../../../docs/src/internals/tensor-cores.md");
    let table = page.split_once("## Table of units").expect("the section").1;
    let found: Vec<&str> =
        table.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| generation")).collect();
    let rows: Vec<String> = UNITS.iter().map(documented).collect();
    let found: Vec<&str> = found.into_iter().filter(|l| !l.starts_with("| ---")).collect();
    assert_eq!(found, rows, "the table should read\n{}", rows.join("\n"));
    // No two rows answer to one name.
    for (i, u) in UNITS.iter().enumerate() {
        let same = |v: &Unit| {
            (v.architecture, v.instruction, v.inputs, v.size_k)
                == (u.architecture, u.instruction, u.inputs, u.size_k)
                && std::mem::discriminant(&v.accumulator) == std::mem::discriminant(&u.accumulator)
        };
        assert_eq!(UNITS.iter().position(same), Some(i), "{u:?}");
    }
}
