//! Expert layers of 4-bit weights and e4m3fn activations on a GPU against the reference's.

use crate::common::{Experts, HALVES, Law, Random, Tokens, some_to_none};
use crate::fp8_rows::NOT_WRITTEN;
use crate::many_rows::hopper_or_skip;
use crate::w4a8::{any_weight, many_columns};
use marlinspike::case::Activation;
use marlinspike::method::{MethodLayer, Quantizer};
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::num::array::FloatView2;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::Schedule;
use marlinspike_accel::{
    Device,
    ops::gemm_w4a8::{W4a8Layer, W4a8Plan},
};

/// The weights of a layer of six experts.
pub(crate) fn experts_of_layer(
    random: &mut Random,
    form: usize,
    dtype: ScalarType,
    biased: bool,
) -> Experts {
    Experts::new([512, 384], Definition::new(Activation::Silu), dtype, |shape| {
        (0..6).map(|_| any_weight(random, form, dtype, shape, biased)).collect()
    })
}

/// The outputs of a layer for some tokens, by the layer's plan or `plan` for both products, and those of the reference.
pub(crate) fn layer_outputs(
    device: &Device,
    seed: u64,
    layer: Layer<'_>,
    (tokens, plan): (usize, Option<W4a8Plan>),
) -> [Vec<u16>; 2] {
    let (top_k, dtype) = (3, layer.dtype);
    let inputs = Tokens::new(&mut Random(seed), &layer, (tokens, top_k), some_to_none);
    let Tokens { x, ids, weights, .. } = &inputs;
    let quantizers = [Quantizer::Fp8Token, Quantizer::Fp8Token];
    let method = MethodLayer { layer, quantizers, w13_multipliers: None };
    let rows = FloatView2::from_rows("x", dtype, x.len() / tokens, x).unwrap();
    let routed = Routed::from_rows(top_k, ids, weights).unwrap();
    let stages = method.forward(rows, routed, |which, product| {
        product.execute(&Schedule::canonical_wgmma(&[layer.w13, layer.w2][which][0], dtype)?)
    });
    let wanted = stages.unwrap().y.into_bits();
    let there = W4a8Layer::new(device, &layer).unwrap();
    let mut work = match plan {
        Some(plan) => there.workspace_planned(device, tokens, top_k, [plan; 2]),
        None => there.workspace(device, tokens, top_k),
    }
    .unwrap();
    let mut y = device.upload(&vec![NOT_WRITTEN; x.len()]).unwrap();
    let (x, ids) = (device.upload(x).unwrap(), device.upload(ids).unwrap());
    let weights = device.upload(weights).unwrap();
    there.forward(device, &x, &ids, &weights, &mut work, &mut y).unwrap();
    [device.download(&y).unwrap(), wanted]
}

#[test]
fn w4a8_layers_equal_the_reference() {
    let test = "w4a8_layers_equal_the_reference";
    let Some(device) = hopper_or_skip(test) else { return };
    let mut law = Law::new("expert layer, 4-bit weights and e4m3fn activations");
    let mut random = Random(0x4A8A_0006_89AB_CDEF);
    for (i, form) in [0, 3, 5, 8].into_iter().enumerate() {
        let dtype = HALVES[i % 2];
        let parts = experts_of_layer(&mut random, form, dtype, i == 2);
        for router_weight_on_input in [false, true] {
            let layer = Layer { router_weight_on_input, ..parts.layer() };
            // Up to 10 tokens the first product finds its tiles itself; by that plan the second one makes its rows itself.
            let planned = [1, 4, 10].map(|tokens| (tokens, Some(many_columns(8))));
            let chosen = [1, 4, 10, 20, 150, 600].map(|tokens| (tokens, None));
            for size in planned.into_iter().chain(chosen) {
                let [found, wanted] = layer_outputs(&device, random.next().into(), layer, size);
                law.equal(
                    &format!("form {form}, {dtype}, tokens and plan {size:?}"),
                    &found,
                    &wanted,
                );
            }
        }
    }
    law.held();
}
