//! A layer of experts that PyTorch's operators computed on aarch64 (KleidiAI's kernels, under qemu), stage by
//! stage: `scripts/gen/w4a8_layer.py`.

use marlinspike::case::{Activation, ActivationRounding};
use marlinspike::container::Container;
use marlinspike::layouts::kleidi::{Columns, PackedRhs, RhsLayout};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::f32_to_bf16_rne;
use marlinspike::w4a8::moe::GatedActivation;
use marlinspike::w4a8::{Values, kernels, linear};
use marlinspike_golden::Manifest;

const HIDDEN: usize = 64;
const INTER: usize = 64;
const EXPERTS: usize = 3;
const TOP_K: usize = 2;
const TOKENS: usize = 4;
const GROUP: usize = 32;
/// KleidiAI 1.15, which PyTorch 2.10 pins.
const ROUNDING: ActivationRounding = ActivationRounding::HalfEven;

/// SplitMix64's outputs for a seed.
fn numbers(seed: u64, count: usize) -> impl Iterator<Item = u64> {
    (1..=count as u64).map(move |i| {
        let z = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    })
}

fn packed(seed: u64, shape: Shape) -> PackedRhs<'static> {
    let codes = numbers(seed, shape.len()).map(|z| (z % 16) as i8 - 8).collect();
    let scale = |z: u64| f32_to_bf16_rne((z % 256 + 1) as f32 / 8192.0);
    let scales = numbers(seed + 1, shape.len() / GROUP).map(scale).collect();
    let columns = Columns::group_wise(shape, GROUP, codes, scales, None).unwrap();
    RhsLayout::new(shape, GroupSize::Of(GROUP), 8).unwrap().pack(&columns).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn every_stage_of_torchs_layer() {
    let golden = Manifest::load().expect("the golden manifest");
    let bytes = std::fs::read(golden.path("data/tables/w4a8_layer.safetensors")).unwrap();
    let file = Container::parse(&bytes).unwrap();
    let stage = |name: &str, width: usize| -> Vec<Vec<f32>> {
        let values = file.tensor(name).unwrap().elements::<f32>().into_owned();
        values.chunks(width).map(<[f32]>::to_vec).collect()
    };
    let (gate_up, activated) = (stage("gate_up", 2 * INTER), stage("activated", INTER));
    let (down, y) = (stage("down", HIDDEN), stage("y", HIDDEN));
    assert_eq!([gate_up.len(), activated.len(), down.len(), y.len()], [8, 8, 8, TOKENS]);
    let x: Vec<f32> =
        numbers(1, TOKENS * HIDDEN).map(|z| (z % 4001) as f32 / 512.0 - 3.5).collect();
    let weights: Vec<f32> =
        numbers(2, TOKENS * TOP_K).map(|z| (z % 64 + 1) as f32 / 64.0).collect();
    let expert = |slot: usize| {
        let (token, j) = (slot / TOP_K, slot % TOP_K);
        (token + j * (1 + token % 2)) % EXPERTS
    };
    let silu = GatedActivation::of(Activation::Silu).unwrap();
    let mut sums = vec![vec![0.0f32; HIDDEN]; TOKENS];
    let mut slots = 0;
    for e in 0..EXPERTS {
        let of = |seed, k, n| packed(seed + 10 * e as u64, Shape::new(k, n));
        let (w13, w2) = (of(100, HIDDEN, 2 * INTER), of(200, INTER, HIDDEN));
        let other = packed(100 + 10 * ((e + 1) % EXPERTS) as u64, Shape::new(HIDDEN, 2 * INTER));
        for slot in (0..TOKENS * TOP_K).filter(|&slot| expert(slot) == e) {
            let token = slot / TOP_K;
            let row = Values::F32(x[token * HIDDEN..][..HIDDEN].to_vec());
            let inner = Values::F32(activated[slot].clone());
            for kernel in kernels() {
                let name = kernel.name();
                let found = linear(kernel.as_ref(), &row, &w13, ROUNDING).unwrap();
                assert_eq!(found.bits(), bits(&gate_up[slot]), "w13, slot {slot}, {name}");
                let found = linear(kernel.as_ref(), &inner, &w2, ROUNDING).unwrap();
                assert_eq!(found.bits(), bits(&down[slot]), "w2, slot {slot}, {name}");
                let wrong = linear(kernel.as_ref(), &row, &other, ROUNDING).unwrap();
                assert_ne!(wrong.bits(), bits(&gate_up[slot]), "another expert's weights");
            }
            // torch's exp is another one.
            let found = silu.apply(&Values::F32(gate_up[slot].clone()), INTER).unwrap().to_f32();
            for (i, (found, torch)) in found.iter().zip(&activated[slot]).enumerate() {
                let error = (found - torch).abs();
                assert!(error <= torch.abs() * 4e-7 + 1e-30, "slot {slot}, {i}: {found}, {torch}");
            }
            for (sum, value) in sums[token].iter_mut().zip(&down[slot]) {
                let product = value * weights[slot];
                *sum += product;
            }
            slots += 1;
        }
    }
    assert_eq!(slots, TOKENS * TOP_K);
    for (token, (sum, y)) in sums.iter().zip(&y).enumerate() {
        assert_eq!(bits(sum), bits(y), "token {token}");
    }
}
