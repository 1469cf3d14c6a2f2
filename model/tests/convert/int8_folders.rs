//! Folders converted for Marlin's int8 activations through `run`, compared with sums of integers: the
//! original codes times int8 rows, group by group, times the integer scales that upstream makes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use marlinspike::container::Container;
use marlinspike::layouts::marlin::{InputDtype, process_int8_scales_with};
use marlinspike::num::array::rows_of;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::quantize::{Int8Rule, per_token_int8};
use marlinspike::weight::Weight;
use marlinspike_model::convert::settings::Settings;
use marlinspike_model::run::error::RunError;
use marlinspike_model::run::options::{Options, Source};
use marlinspike_model::run::output::Run;
use marlinspike_model::run::run as run_layer;

use crate::blocks::save;
use crate::common::runs::{run as convert, settings};
use crate::common::{EXPERTS, Format, HIDDEN, Noise, files, write_model};

const MOE: &str = "model.layers.0.mlp.experts";
const LINEAR: &str = "model.layers.0.self_attn.q_proj";
const TOKENS: usize = 5;
const TOP_K: usize = 2;

type Weights = BTreeMap<String, Weight<'static>>;

/// Activations, and the experts of each token.
struct Input {
    x: Vec<u16>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

impl Input {
    fn new() -> Self {
        let mut noise = Noise::new("int8 rows");
        let mut bits = || {
            let magnitude = (noise.next() % 0x500) as u16 + 0x3c00;
            magnitude | (noise.next() as u16 & 0x8000)
        };
        let x = (0..TOKENS * HIDDEN).map(|_| bits()).collect();
        let ids = (0..TOKENS * TOP_K).map(|s| ((s + s / 3) % EXPERTS) as i32).collect();
        let weights = (0..TOKENS * TOP_K).map(|s| 0.3 + 0.11 * s as f32).collect();
        Self { x, ids, weights }
    }

    fn write(&self, path: &Path) {
        let slots = vec![TOKENS, TOP_K];
        let x = Tensor::from_vec("x", DType::BF16, vec![TOKENS, HIDDEN], self.x.clone()).unwrap();
        let ids = Tensor::from_vec("topk_ids", DType::I32, slots.clone(), self.ids.clone());
        let weights = Tensor::from_vec("topk_weights", DType::F32, slots, self.weights.clone());
        save(path, &[x, ids.unwrap(), weights.unwrap()]);
    }
}

fn run(dir: &Path, layer: &str, input: &Path) -> Result<Run, RunError> {
    let mut options = Options::default();
    options.layer = Some(layer.to_owned());
    options.check = true;
    options.input = Source::File(input.to_owned());
    run_layer(dir, &options)
}

fn stage(run: &Run, name: &str) -> Vec<u16> {
    let found = run.outputs.iter().find(|o| o.name == name).unwrap();
    found.bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
}

fn widened(bits: &[u16]) -> Vec<f32> {
    bits.iter().map(|&b| f32::from_bits(u32::from(b) << 16)).collect()
}

/// Rows times the matrices of their experts, as integers; `parts` are an expert's matrices side by
/// side, `all` the matrices whose largest scale counts.
fn product(
    x: &[u16],
    size_k: usize,
    experts: &[Vec<&Weight<'_>>],
    expert_of: &[usize],
    router: Option<&[f32]>,
) -> Vec<u16> {
    let values = widened(x);
    let rows = rows_of("x", &values, size_k).unwrap();
    let (codes, scales) = per_token_int8(rows, Int8Rule::Quotient).unwrap().into_vecs();
    let table = |w: &Weight<'_>| {
        w.scales.iter_bits().map(|b| w.scales.ty().to_f64(b) as f32).fold(0.0f32, f32::max)
    };
    let largest = experts.iter().flatten().map(|w| table(w)).fold(0.0f32, f32::max);
    let factor = (1.0 / 4096.0) * largest;
    let mut y = Vec::new();
    for (m, &e) in expert_of.iter().enumerate() {
        let row = &codes[m * size_k..(m + 1) * size_k];
        for weight in &experts[e] {
            let integers = process_int8_scales_with(&weight.scales, largest).unwrap().scales;
            for n in 0..weight.shape().size_n {
                let mut sum = 0i64;
                for (k, &code) in row.iter().enumerate() {
                    let group = weight.groups.group_of(k);
                    let zero = weight.zeros.as_ref().map_or(8, |z| z.bits(group, n) as i64);
                    let w = i64::from(weight.codes.get(k, n)) - zero;
                    let scale = i64::from((integers.bits(group, n) as u16).cast_signed());
                    sum += w * i64::from(code) * scale;
                }
                let scaled = sum as f64 * f64::from(scales[m] * factor);
                let value = scaled * router.map_or(1.0, |r| f64::from(r[m]));
                y.push(ScalarType::BFLOAT16.encode_rne(value) as u16);
            }
        }
    }
    y
}

fn of<'w>(weights: &'w Weights, e: usize, names: &[&str]) -> Vec<&'w Weight<'static>> {
    names.iter().map(|name| &weights[&format!("{MOE}.{e}.{name}")]).collect()
}

#[test]
fn folders_for_int8_activations_run_with_them() {
    let temp = tempfile::tempdir().unwrap();
    let (input, path) = (Input::new(), temp.path().join("input.st"));
    input.write(&path);
    let mut ran = 0;
    for format in [Format::Gptq4, Format::CtPack, Format::Awq, Format::Mxint4] {
        let model = temp.path().join(format!("{format:?}"));
        let weights = write_model(format, &model);
        let out = model.join("int8");
        let int8 = Settings { input: InputDtype::Int8, ..settings() };
        if let Err(e) = convert(&model, &out, &int8) {
            // Marlin has no such kernel.
            assert!(e.to_string().contains("Marlin"), "{format:?}: {e}");
            continue;
        }
        ran += 1;
        let found = run(&out, LINEAR, &path).unwrap();
        assert!(found.is_equal() && found.arithmetic.contains("int8"), "{format:?}");
        let expected = product(&input.x, HIDDEN, &[vec![&weights[LINEAR]]], &[0; TOKENS], None);
        assert_eq!(stage(&found, "y"), expected, "{format:?}");

        let found = run(&out, MOE, &path).unwrap();
        assert!(found.is_equal() && found.arithmetic.contains("int8"), "{format:?}");
        assert!(found.notes.iter().all(|n| !n.contains("16 bits")), "{:?}", found.notes);
        let expert_of: Vec<usize> = input.ids.iter().map(|&id| id as usize).collect();
        let token = |s: usize| input.x[s / TOP_K * HIDDEN..][..HIDDEN].to_vec();
        let slots: Vec<u16> = (0..expert_of.len()).flat_map(token).collect();
        let all = |names: &[&str]| (0..EXPERTS).map(|e| of(&weights, e, names)).collect::<Vec<_>>();
        let w13 = all(&["gate_proj", "up_proj"]);
        let gate_up = product(&slots, HIDDEN, &w13, &expert_of, None);
        assert_eq!(stage(&found, "gate_up"), gate_up, "{format:?}");
        let activated = stage(&found, "activated");
        let inner = activated.len() / expert_of.len();
        let w2 = all(&["down_proj"]);
        let down = product(&activated, inner, &w2, &expert_of, Some(&input.weights));
        assert_eq!(stage(&found, "down"), down, "{format:?}");

        // It is near the 16-bit result, and not the same.
        let plain = model.join("plain");
        convert(&model, &plain, &settings()).unwrap();
        let wide = widened(&stage(&run(&plain, MOE, &path).unwrap(), "y"));
        let y = widened(&stage(&found, "y"));
        let size = wide.iter().fold(0.0f32, |m, y| m.max(y.abs()));
        let worst = wide.iter().zip(&y).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!((1e-4..0.05).contains(&(worst / size)), "{format:?}: {worst} of {size}");
        damaged(&out, &path, &found);
    }
    assert!(ran >= 2, "{ran}");
}

/// A changed scale changes the output; factors and scales that are no such numbers are refused.
fn damaged(out: &Path, input: &Path, whole: &Run) {
    let with = |end: &str, change: &dyn Fn(&Tensor<'_>) -> Option<Tensor<'static>>| {
        let file = files(out).into_iter().find(|path| {
            path.extension().is_some_and(|e| e == "safetensors") && {
                let bytes = fs::read(path).unwrap();
                let parsed = Container::parse(&bytes).unwrap();
                parsed.tensors().any(|t| t.unwrap().name().ends_with(end))
            }
        });
        let file = file.unwrap();
        let bytes = fs::read(&file).unwrap();
        let parsed = Container::parse(&bytes).unwrap();
        let tensors = parsed.tensors().map(|t| t.unwrap().into_owned());
        let one = |t: Tensor<'static>| if t.name().ends_with(end) { change(&t) } else { Some(t) };
        save(&file, &tensors.filter_map(one).collect::<Vec<_>>());
        let found = run(out, MOE, input);
        fs::write(&file, &bytes).unwrap();
        found.map(|run| run.y().digest()).map_err(|e| e.to_string())
    };
    let again = |t: &Tensor<'_>, bits: Vec<u16>| {
        Tensor::from_vec(t.name(), t.dtype(), t.shape().to_vec(), bits).ok()
    };
    let section: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
    let name = |role: &str| {
        let names = &section["marlinspike"]["layers"][format!("{MOE}.w13")]["tensors"];
        names[role].as_str().unwrap().to_owned()
    };
    let digest = with(&name("scales"), &|t| {
        again(t, t.elements::<u16>().iter().map(|s| s ^ 0x80).collect())
    });
    assert_ne!(digest.unwrap(), whole.y().digest());
    let factor = name("input_global_scale");
    let float = |x: f32| {
        move |t: &Tensor<'_>| {
            Tensor::from_vec(t.name(), t.dtype(), t.shape().to_vec(), vec![x]).ok()
        }
    };
    assert_ne!(with(&factor, &float(1.0)).unwrap(), whole.y().digest());
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = with(&factor, &float(wrong)).unwrap_err();
        assert!(error.contains("input_global_scale"), "{wrong}: {error}");
    }
    assert!(with(&factor, &|_| None).unwrap_err().contains(&factor));
}
