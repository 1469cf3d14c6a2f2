//! `run_on`: a device's outputs are compared with the canonical schedule, and what no device computes
//! is refused by name.

use std::path::Path;
use std::sync::Mutex;

use marlinspike::method::{Arithmetic, MethodLayer, Product, Quantizer};
use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::num::array::FloatView2;
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;
use marlinspike_model::run::device::{Computed, Device, DeviceError};
use marlinspike_model::run::options::Options;
use marlinspike_model::run::output::Run;
use marlinspike_model::run::{run, run_on};

use crate::common::runs::golden;
use crate::common::{Format, write_model};

/// The definition, product by product, as a device.
#[derive(Default)]
struct Defined {
    calls: Mutex<usize>,
    /// The last output.
    y: Mutex<Vec<u16>>,
    /// The output instead of the definition's.
    stated: Option<Vec<u16>>,
}

impl Defined {
    /// A device whose output differs from the last one of this device in the lowest bit of value `at`.
    fn flipped(&self, at: usize) -> Self {
        let mut y = self.y.lock().unwrap().clone();
        y[at] ^= 1;
        Self { stated: Some(y), ..Self::default() }
    }

    fn computed(
        &self,
        define: impl FnOnce() -> marlinspike::Result<Vec<u16>>,
        repeat: usize,
    ) -> Result<Computed, DeviceError> {
        *self.calls.lock().unwrap() += repeat;
        let y = match &self.stated {
            Some(y) => y.clone(),
            None => define()?,
        };
        self.y.lock().unwrap().clone_from(&y);
        Ok(Computed { y, seconds: 1e-3 })
    }
}

impl Device for Defined {
    fn name(&self) -> String {
        "a device".into()
    }

    fn linear(
        &self,
        weight: &Weight<'_>,
        dtype: ScalarType,
        x: &[u16],
        repeat: usize,
    ) -> Result<Computed, DeviceError> {
        let size_k = weight.shape().size_k;
        let expert_of = vec![Some(0); x.len() / size_k];
        let x = FloatView2::from_rows("x", dtype, size_k, x)?;
        let product = Product {
            rows: &Quantizer::None.quantize(x, &expert_of)?,
            expert_of: &expert_of,
            weights: std::slice::from_ref(weight),
            halves: None,
            router_weights: None,
            dtype,
        };
        self.computed(|| Ok(product.define(Arithmetic::Canonical)?.into_bits()), repeat)
    }

    fn experts(
        &self,
        layer: &Layer<'_>,
        routed: Routed<'_>,
        x: &[u16],
        repeat: usize,
    ) -> Result<Computed, DeviceError> {
        let quantizers = [Quantizer::None, Quantizer::None];
        let method = MethodLayer { layer: *layer, quantizers, w13_multipliers: None };
        let x = FloatView2::from_rows("x", layer.dtype, layer.hidden_size(), x)?;
        let y = || {
            let stages = method.forward(x, routed, |_, p| p.define(Arithmetic::Canonical))?;
            Ok(stages.y.into_bits())
        };
        self.computed(y, repeat)
    }
}

fn options(layer: Option<&str>) -> Options {
    let mut options = Options::default();
    options.layer = layer.map(str::to_owned);
    options.check = true;
    options
}

fn mismatches(run: &Run) -> usize {
    run.check.unwrap().mismatches
}

#[test]
fn a_right_device_passes_and_one_wrong_bit_fails() {
    let temp = tempfile::tempdir().unwrap();
    for format in [Format::Gptq4, Format::CtActOrder, Format::Fp8Channel, Format::Mxfp4] {
        let model = temp.path().join(format!("{format:?}"));
        write_model(format, &model);
        for layer in [None, Some("model.layers.0.self_attn.q_proj")] {
            let mut options = options(layer);
            options.method.activations = marlinspike_model::run::options::Activations::SixteenBit;
            let right = Defined::default();
            let found = run_on(&model, &options, Some(&right)).unwrap();
            assert_eq!(mismatches(&found), 0, "{format:?} {layer:?}");
            assert_eq!((found.timing.kernel.as_str(), found.timing.threads), ("a device", None));
            assert_eq!(*right.calls.lock().unwrap(), 1);
            // The same digest as the reference's, by the schedule that the device has.
            options.arithmetic = Some(Arithmetic::Canonical);
            let reference = run(&model, &options).unwrap();
            assert_eq!(found.y().digest(), reference.y().digest(), "{format:?} {layer:?}");
            let wrong = run_on(&model, &options, Some(&right.flipped(7))).unwrap();
            assert_eq!(mismatches(&wrong), 1, "{format:?} {layer:?}");
        }
    }
}

#[test]
fn a_shared_expert_is_added_to_the_devices_sum() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/models/gpt-oss-tiny");
    let right = run_on(&model, &options(None), Some(&Defined::default())).unwrap();
    assert_eq!(mismatches(&right), 0);
}

/// f16 scales and bf16 activations: the kernels hold scales in bf16. The digests are those of
/// `run --backend cuda` on an H200.
#[test]
fn scales_are_rounded_to_the_type_of_the_activations() {
    let model = golden("checkpoints").join("gptq-dynamic");
    for (name, digest) in [
        ("mlp.gate_proj", "919628bb5503f230dc277195fdd4539d88575befbc4612c5ef94d436f8e00e01"),
        ("mlp.up_proj", "0929e2cfb51dc33edd97c0c283d1f4b1a501955887f9f87387237a9e5b70cd5e"),
        ("self_attn.o_proj", "abd717488f5ac791c8c50a527cbd67fc3ac5adf70f6919e6575e15b0b9378772"),
    ] {
        let mut options = options(Some(&format!("model.layers.0.{name}")));
        let found = run_on(&model, &options, Some(&Defined::default())).unwrap();
        assert_eq!((mismatches(&found), &*found.y().digest()), (0, digest), "{name}");
        assert!(found.notes.iter().any(|n| n.contains("scales rounded from float16 to bfloat16")));
        // The checkpoint's own scales give other bits.
        options.arithmetic = Some(Arithmetic::Canonical);
        assert_ne!(run(&model, &options).unwrap().y().digest(), digest, "{name}");
    }
}

#[test]
fn what_no_device_computes_is_refused_by_name() {
    let reason = |model: &Path, options: &Options| {
        run_on(model, options, Some(&Defined::default())).unwrap_err().to_string()
    };
    let text = reason(&golden("checkpoints").join("ct-fp8-moe"), &options(None));
    assert!(text.contains("experts: activations: found fp8"), "{text}");
    assert!(text.contains("expected 16 bits"), "{text}");

    let mut exact = options(None);
    exact.arithmetic = Some(Arithmetic::Exact);
    let text = reason(&golden("checkpoints").join("gptq-actorder"), &exact);
    assert_eq!(
        text,
        "--arithmetic: found exact, expected canonical, the schedule of the device's kernels"
    );
}
