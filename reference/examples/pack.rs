//! Quantizes a matrix to int4, packs it for Marlin, and finds which values a wrong scale order mixes up.
//!
//! `cargo run --release -p marlinspike --example pack`

use marlinspike::half::f16;
use marlinspike::layouts::Layout as _;
use marlinspike::ndarray::Array2;
use marlinspike::quantize::quantize_weights;
use marlinspike::weight::Groups;
use marlinspike::{GroupSize, MarlinOptions, Result, ScalarType, pack_marlin};

fn main() -> Result<()> {
    let (size_k, size_n, group_size) = (256, 128, GroupSize::Of(32));
    let w = Array2::from_shape_fn((size_k, size_n), |(k, n)| {
        f16::from_f32(((k * 7 + n * 13) % 97) as f32 / 97.0 - 0.5)
    });
    let weight = quantize_weights(w.view(), ScalarType::UINT4B8, group_size)?
        .into_weight(Groups::Uniform(group_size))?;

    // A stack of one matrix: what `gptq_marlin_repack` and `marlin_permute_scales` give.
    let marlin =
        pack_marlin(std::slice::from_ref(&weight), MarlinOptions::new(ScalarType::FLOAT16))?;
    println!("qweight {:?}, {} groups of scales", marlin.qweight.shape(), marlin.groups());

    // Where a value is: a kernel that reads another place reads another value.
    let slot = marlin.weight_layout.offset(100, 17);
    println!(
        "the code of k 100, n 17 is bits {} to {} of word {}",
        slot.bit,
        slot.bit + slot.width,
        slot.element
    );
    println!(
        "bit {} of that word: {}",
        slot.bit,
        marlin.weight_layout.locate(slot.element, slot.bit)
    );

    // The scales of a kernel that forgot the permutation.
    let plain = &weight.scales;
    let moved = (0..plain.cols()).filter(|&n| marlin.scales.bits(0, n) != plain.bits(0, n)).count();
    println!("{moved} of {size_n} columns of the first group are wrong without the permutation");
    Ok(())
}
