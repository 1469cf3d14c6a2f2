//! Outputs of upstream's Marlin operator on an H200, stored as hashes: the launches of its host
//! code and the schedule of its kernel give every bit of them.
//!
//! `scripts/probe/marlin_products.py` made the outputs from inputs that are a function of a seed;
//! `docs/src/internals/tensor-cores.md` lists the results, and the example `marlin_products`
//! compares a whole file.

#[path = "../../examples/marlin_products/inputs.rs"]
#[allow(dead_code, reason = "the example reads more of it")]
mod inputs;

use std::collections::BTreeSet;

use inputs::Linear;
use marlinspike::num::array::{into_vec, rows_of};
use serde::Deserialize;
use sha2::{Digest, Sha256};

#[derive(Deserialize)]
struct Table {
    cases: Vec<Hashed>,
}

#[derive(Deserialize)]
struct Hashed {
    #[serde(flatten)]
    case: Linear,
    /// Hash of the output's bytes, for each M of the case.
    sha256: Vec<String>,
}

fn table() -> Table {
    serde_json::from_str(include_str!("../data/marlin_products.json")).expect("the table")
}

fn sha256(bits: &[u32]) -> String {
    let bytes: Vec<u8> = bits.iter().flat_map(|&b| (b as u16).to_le_bytes()).collect();
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn every_output_of_the_gpu_is_reproduced() {
    let (mut products, mut tiles, mut formats) = (0, BTreeSet::new(), BTreeSet::new());
    for Hashed { case, sha256: expected } in table().cases {
        let columns: Vec<usize> = (0..case.size_n).collect();
        let inputs = case.inputs(&columns).expect("inputs");
        assert_eq!(case.sizes_m.len(), expected.len(), "{}", case.name);
        for (&m, expected) in case.sizes_m.iter().zip(&expected) {
            let (launches, y) = inputs.product(&case, m).expect("a product");
            assert_eq!(&sha256(&y), expected, "{} with {m} rows", case.name);
            products += 1;
            let all = launches.all().iter();
            tiles.extend(all.map(|l| (l.cta.tile_k, l.cta.tile_n, l.cta.warps_k)));
        }
        formats.insert((case.format.format.clone(), case.format.dtype.clone(), case.int8));
    }
    assert!(products >= 30 && formats.len() >= 11, "{products} products, {formats:?}");
    let expected = [(64, 128, 1), (64, 128, 2), (128, 64, 2), (128, 64, 4), (128, 128, 4)];
    assert!(tiles.iter().eq(&expected), "{tiles:?}");
}

/// Every measured property is needed: without it, outputs differ.
#[test]
fn other_rules_give_other_bits() {
    use marlinspike::products::schedule::StepOp;
    let cases = table().cases;
    let find = |name: &str| cases.iter().find(|c| c.case.name == name).expect("the case");
    let run = |name: &str, change: &dyn Fn(&mut marlinspike::products::schedule::Schedule)| {
        let Hashed { case, sha256: expected } = find(name);
        let columns: Vec<usize> = (0..case.size_n).collect();
        let inputs = case.inputs(&columns).expect("inputs");
        let (mut launches, _) = inputs.product(case, case.sizes_m[0]).expect("a product");
        launches.all_mut().iter_mut().for_each(|l| change(&mut l.schedule));
        let x = rows_of("x", &inputs.x[..case.sizes_m[0] * case.size_k], case.size_k).unwrap();
        let made = launches.execute(x, &inputs.weight, Default::default()).expect("a product");
        sha256(&into_vec(made)) == expected[0]
    };
    let bias = "2-u4-channel-bf16-2048x1024-bias";
    assert!(run(bias, &|_| {}));
    assert!(!run(bias, &|s| {
        let step = s.epilogue.iter_mut().find(|s| s.op == StepOp::ChannelScaleBiasMarlin);
        step.expect("the step").op = StepOp::ChannelScaleBias;
    }));
    let small = "2-fp8-channel-bf16-1024x512-small";
    assert!(run(small, &|_| {}));
    assert!(!run(small, &|s| s.weights.exponent = 0));
}
