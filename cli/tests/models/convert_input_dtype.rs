//! `convert --input-dtype`: codes and scales for int8 and fp8 activations, compared with the
//! source weights; weights that no such Marlin kernel supports.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::{Converted, Format, write_model};
use marlinspike::layouts::marlin::{Activations, WeightLayout};
use marlinspike::num::dims::Shape;
use marlinspike::weight::Weight;

fn convert(model: &Path, out: &Path, input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_marlinspike"));
    command.args(["convert", "--to", "marlin", "--input-dtype", input, "--json"]);
    command.args([model, out]).output().unwrap()
}

const DENSE: &str = "model.layers.0.self_attn.q_proj";
const W13: &str = "model.layers.0.mlp.experts.w13";

/// The weights of a small model, by module.
type Weights = BTreeMap<String, Weight<'static>>;

/// A converted model and its source weights.
fn converted(input: &str) -> (Converted, Weights) {
    let temp = tempfile::tempdir().unwrap();
    let (model, out) = (temp.path().join("model"), temp.path().join("out"));
    let weights = write_model(Format::Gptq4, &model);
    let output = convert(&model, &out, input);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{input}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let converted = Converted::read(&out);
    assert_eq!(converted.config["marlinspike"]["input_dtype"], input);
    (converted, weights)
}

/// Every code of q_proj and of expert 2's gate and up, under the tiles of 8-bit activations.
fn assert_codes(converted: &Converted, weights: &Weights, stored: impl Fn(u8) -> u8) {
    let part = |p: &str| &weights[&format!("model.layers.0.mlp.experts.2.{p}")];
    for (layer, expert, parts) in [
        (DENSE, None, vec![&weights[DENSE]]),
        (W13, Some(2), vec![part("gate_proj"), part("up_proj")]),
    ] {
        let size_k = parts[0].shape().size_k;
        let size_n = parts.iter().map(|w| w.shape().size_n).sum();
        let layout = WeightLayout::new(Shape::new(size_k, size_n), 4, Activations::Bits8).unwrap();
        let words = converted.tensor(layer, "weight", expert).unwrap();
        let codes = layout.unpack(words.view2().unwrap(), None).unwrap();
        for n in 0..size_n {
            let (w, column) = (parts[n / parts[0].shape().size_n], n % parts[0].shape().size_n);
            for k in 0..size_k {
                let expected = stored(w.codes.get(k, column));
                assert_eq!(codes.get(k, n), expected, "{layer} ({k}, {n})");
            }
        }
    }
}

/// Codes are unchanged; scales become integers up to 4096 with one factor for the whole stack.
#[test]
fn int8_scales_are_integers_under_one_factor() {
    let (converted, weights) = converted("int8");
    assert_codes(&converted, &weights, |code| code);
    let largest = |names: &mut dyn Iterator<Item = &String>| {
        let scales = names.map(|name| &weights[name].scales);
        let values = scales.flat_map(|t| t.iter_bits().map(|b| t.ty().to_f64(b)));
        values.fold(0.0, f64::max)
    };
    let experts =
        |part: [&'static str; 2]| move |name: &&String| part.iter().any(|p| name.ends_with(p));
    for (layer, expected) in [
        (DENSE, largest(&mut weights.keys().filter(|name| *name == DENSE))),
        (W13, largest(&mut weights.keys().filter(experts(["gate_proj", "up_proj"])))),
    ] {
        let factor = converted.tensor(layer, "input_global_scale", None).unwrap();
        let found = factor.elements::<f32>()[0];
        assert_eq!(f64::from(found), expected / 4096.0, "{layer}");
        let scales = converted.tensor(layer, "scales", None).unwrap();
        let scales = scales.elements::<i16>().to_vec();
        assert_eq!(scales.iter().max(), Some(&4096), "{layer}");
        assert!(scales.iter().all(|&s| (0..=4096).contains(&s)), "{layer}");
    }
}

/// Codes hold a sign and a magnitude: v − 8 from 8 on, 15 − v below; scales are 512-fold.
#[test]
fn fp8_codes_hold_sign_and_magnitude() {
    let (converted, weights) = converted("fp8");
    assert_codes(&converted, &weights, |code| if code >= 8 { code - 8 } else { 15 - code });
    let sum = |bits: &mut dyn Iterator<Item = u16>| -> f64 {
        bits.map(|b| f64::from(f32::from_bits(u32::from(b) << 16))).sum()
    };
    // bf16 represents a factor of 512 exactly, and the order of columns does not change a sum.
    let found = converted.tensor(DENSE, "scales", None).unwrap();
    let expected = &weights[DENSE].scales;
    let expected = sum(&mut expected.iter_bits().map(|b| b as u16)) * 512.0;
    assert_eq!(sum(&mut found.elements::<u16>().iter().copied()), expected);
}

#[test]
fn weights_without_such_a_kernel_are_refused() {
    for (format, input) in
        [(Format::Gptq8Channel, "int8"), (Format::Fp8Channel, "fp8"), (Format::Nvfp4, "fp8")]
    {
        let temp = tempfile::tempdir().unwrap();
        let (model, out) = (temp.path().join("model"), temp.path().join("out"));
        write_model(format, &model);
        let output = convert(&model, &out, input);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{format:?} {input}: {text}");
        assert!(text.contains("Marlin cannot take"), "{format:?} {input}: {text}");
        assert!(!out.join("config.json").exists());
    }
}
