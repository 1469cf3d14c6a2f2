//! A linear layer of 4-bit weights on this CPU, as KleidiAI's operator computes it: every kernel of the
//! processor gives the same bits.
//!
//! `cargo run --release -p marlinspike --example int4_layer`

use marlinspike::case::ActivationRounding;
use marlinspike::half::bf16;
use marlinspike::layouts::kleidi::RhsLayout;
use marlinspike::ndarray::Array2;
use marlinspike::quantize::quantize_weights;
use marlinspike::w4a8::{Linear, LinearWorkspace, kernels};
use marlinspike::weight::Groups;
use marlinspike::{GroupSize, Result, ScalarType};

fn main() -> Result<()> {
    let (size_m, size_k, size_n, group_size) = (3, 512, 256, GroupSize::Of(32));
    let w = Array2::from_shape_fn((size_k, size_n), |(k, n)| {
        bf16::from_f32(((k * 31 + n * 17) % 101) as f32 / 101.0 - 0.5)
    });
    let weight = quantize_weights(w.view(), ScalarType::UINT4B8, group_size)?
        .into_weight(Groups::Uniform(group_size))?;
    let x =
        Array2::from_shape_fn((size_m, size_k), |(m, k)| ((m * 5 + k) % 23) as f32 / 23.0 - 0.4);

    let mut first: Option<Vec<u32>> = None;
    for kernel in kernels() {
        let name = kernel.name();
        let packed = RhsLayout::new(weight.shape(), group_size, 8)?.pack_weight(&weight)?;
        let linear = Linear::new(packed, ActivationRounding::HalfAway).with_kernel(kernel);
        let mut y = Array2::<f32>::zeros((size_m, size_n));
        linear.forward(x.view(), &mut LinearWorkspace::default(), y.view_mut())?;
        let bits: Vec<u32> = y.iter().map(|y| y.to_bits()).collect();
        println!("{name}: y[0, 0] = {}", y[[0, 0]]);
        assert_eq!(first.get_or_insert_with(|| bits.clone()), &bits, "{name}");
    }
    Ok(())
}
