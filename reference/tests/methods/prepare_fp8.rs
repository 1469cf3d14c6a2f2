//! W8A8-FP8 experts: the order of the steps, and every rejected input.

use marlinspike::Error;
use marlinspike::config::{ActivationScheme, FloatContainer, Fp8Scheme, ScaleStrategy};
use marlinspike::layers::{LayerError, MoeShard};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::prepare::fp8::{ExpertMatrix, Fp8Experts, Fp8Options};
use marlinspike::prepare::requantize::{Fp8Type, Requantize};

const E: usize = 2;
const H: usize = 128;
const I: usize = 64;

fn scheme(strategy: ScaleStrategy, activations: ActivationScheme) -> Fp8Scheme {
    Fp8Scheme {
        container: FloatContainer::CompressedTensors,
        strategy,
        activations,
        scale_inv: false,
    }
}

const STATIC: (ScaleStrategy, ActivationScheme) =
    (ScaleStrategy::Tensor, ActivationScheme::StaticTensor);

fn codes(name: &str, shape: &[usize]) -> Tensor<'static> {
    let len: usize = shape.iter().product();
    let bytes: Vec<u8> = (0..len).map(|i| (i * 5 + i / 256) as u8).collect();
    Tensor::from_vec(name, DType::F8E4M3, shape.to_vec(), bytes).unwrap()
}

fn floats(name: &str, shape: &[usize], values: &[f32]) -> Tensor<'static> {
    let len: usize = shape.iter().product();
    let values = values.iter().copied().cycle().take(len).collect();
    Tensor::from_vec(name, DType::F32, shape.to_vec(), values).unwrap()
}

fn values(tensor: &Tensor<'_>) -> Vec<f32> {
    tensor.elements::<f32>().to_vec()
}

/// Per tensor, static: w1's scale is the smaller in expert 0, the larger in expert 1.
fn tensors() -> Fp8Experts<'static> {
    Fp8Experts {
        w13: codes("w13_weight", &[E, 2 * I, H]),
        w2: codes("w2_weight", &[E, H, I]),
        w13_scale: floats("w13_weight_scale", &[E, 2], &[0.5, 1.0, 2.0, 0.25]),
        w2_scale: floats("w2_weight_scale", &[E], &[0.125, 0.5]),
        w13_input_scale: Some(floats("w13_input_scale", &[E], &[0.5, 0.75])),
        w2_input_scale: Some(floats("w2_input_scale", &[E], &[3.0, 1.0])),
    }
}

fn shard() -> MoeShard {
    MoeShard::new(E, H, I, 1).unwrap()
}

#[test]
fn per_tensor_scales_become_one_for_each_expert() {
    let (strategy, activations) = STATIC;
    let before = tensors();
    let found =
        tensors().prepare(&scheme(strategy, activations), &shard(), Fp8Options::default()).unwrap();
    let after = &found.tensors;
    assert_eq!(after.w13_scale.shape(), [E]);
    assert_eq!(values(&after.w13_scale), [1.0, 2.0]);
    assert_eq!(values(after.w13_input_scale.as_ref().unwrap()), [0.75]);
    assert_eq!(values(after.w2_input_scale.as_ref().unwrap()), [3.0]);
    assert_eq!(after.w2, before.w2);
    // The shard with the larger scale is untouched, the other one is 2 or 8 times smaller.
    let (was, is) = (before.w13.bytes(), after.w13.bytes());
    let shard = |i: usize| i * I * H..(i + 1) * I * H;
    assert_eq!(is[shard(1)], was[shard(1)]);
    assert_eq!(is[shard(2)], was[shard(2)]);
    for (i, factor) in [(0, 0.5), (3, 0.125)] {
        for (&code, &from) in is[shard(i)].iter().zip(&was[shard(i)]) {
            let value = marlinspike::num::scalar::e4m3fn_to_f64;
            if from & 0x7f == 0x7f {
                assert_eq!(code, from, "NaN stays");
            } else if value(from).abs() * factor >= 0.015625 {
                assert_eq!(value(code), value(from) * factor, "{from:#x}");
            } else {
                // Below the normal range steps are 2^−9.
                let distance = (value(code) - value(from) * factor).abs();
                assert!(distance <= 1.0 / 1024.0, "{from:#x} {code:#x}");
            }
        }
    }
    let matrices = found.matrices(ExpertMatrix::W13).unwrap();
    assert_eq!(matrices.len(), E);
    assert_eq!(matrices[1].scales.value(0, 2 * I - 1), 2.0);
    assert_eq!(found.matrices(ExpertMatrix::W2).unwrap()[0].scales.value(0, 0), 0.125);
}

#[test]
fn other_strategies_keep_codes_and_scales() {
    use ActivationScheme::{DynamicGroup, DynamicToken};
    let block = ScaleStrategy::Block { block_n: 64, block_k: 64 };
    for (strategy, activations, s13, s2) in [
        (ScaleStrategy::Channel, DynamicToken, vec![E, 2 * I, 1], vec![E, H, 1]),
        (block, DynamicGroup(64), vec![E, 2, 2], vec![E, 2, 1]),
    ] {
        let given = Fp8Experts {
            w13_scale: floats("w13_weight_scale", &s13, &[0.5, 1.0, 2.0, 0.25, 3.0]),
            w2_scale: floats("w2_weight_scale", &s2, &[0.125, 0.5, 0.75]),
            w13_input_scale: None,
            w2_input_scale: None,
            ..tensors()
        };
        let found = given
            .clone()
            .prepare(&scheme(strategy, activations), &shard(), Fp8Options::default())
            .unwrap();
        assert_eq!(found.tensors, given, "{strategy:?}");
        for (matrix, n) in [(ExpertMatrix::W13, 2 * I), (ExpertMatrix::W2, H)] {
            let matrices = found.matrices(matrix).unwrap();
            assert_eq!((matrices.len(), matrices[0].shape().size_n), (E, n));
        }
    }
}

#[test]
fn the_fnuz_device_doubles_scales_before_the_rest() {
    let (strategy, activations) = STATIC;
    let options =
        Fp8Options { device_type: Fp8Type::E4m3fnuz, requantize: Requantize::UpstreamCpu };
    let found = tensors().prepare(&scheme(strategy, activations), &shard(), options).unwrap();
    assert_eq!(values(&found.tensors.w13_scale), [2.0, 4.0]);
    assert_eq!(values(&found.tensors.w2_scale), [0.25, 1.0]);
    assert_eq!(values(found.tensors.w2_input_scale.as_ref().unwrap()), [6.0]);
    assert!(!found.tensors.w13.bytes().contains(&0x80), "NaN of e4m3fnuz");
    assert!(!found.tensors.w2.bytes().contains(&0x80), "NaN of e4m3fnuz");
    let error = found.matrices(ExpertMatrix::W13).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

#[test]
fn refusals_name_the_tensor() {
    let (strategy, activations) = STATIC;
    let prepare = |tensors: Fp8Experts<'static>, scheme: &Fp8Scheme| {
        tensors.prepare(scheme, &shard(), Fp8Options::default()).unwrap_err()
    };
    let stat = scheme(strategy, activations);
    let wrong = Fp8Experts { w13: codes("w13_weight", &[E, I, H]), ..tensors() };
    let error = prepare(wrong, &stat);
    assert!(matches!(&error, Error::Shape { tensor, .. } if tensor == "w13_weight"), "{error}");
    let wrong = Fp8Experts { w2_scale: codes("w2_weight_scale", &[E]), ..tensors() };
    let error = prepare(wrong, &stat);
    assert!(
        matches!(&error, Error::Dtype { tensor, .. } if tensor == "w2_weight_scale"),
        "{error}"
    );
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let w13_scale = floats("w13_weight_scale", &[E, 2], &[1.0, 1.0, bad, 1.0]);
        let error = prepare(Fp8Experts { w13_scale, ..tensors() }, &stat);
        assert!(matches!(&error, Error::Value { index, .. } if index == &[2]), "{bad}: {error}");
    }
    let error = prepare(Fp8Experts { w2_input_scale: None, ..tensors() }, &stat);
    assert!(
        matches!(&error, Error::Missing { tensor, .. } if tensor == "w2_input_scale"),
        "{error}"
    );
    let dynamic = scheme(strategy, ActivationScheme::DynamicTensor);
    let error = prepare(tensors(), &dynamic);
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let pair = scheme(ScaleStrategy::Channel, ActivationScheme::StaticTensor);
    let error = prepare(tensors(), &pair);
    assert!(matches!(error.downcast_ref(), Some(LayerError::StrategyPair { .. })), "{error}");
}

#[test]
fn blocks_divide_a_ranks_intermediate_size() {
    let activations = ActivationScheme::DynamicGroup(128);
    let refused = |block_n, block_k, tp_size| {
        let shard = MoeShard::new(E, H, 192 * tp_size, tp_size).unwrap();
        let scheme = scheme(ScaleStrategy::Block { block_n, block_k }, activations);
        let tensors = Fp8Experts { w13_input_scale: None, w2_input_scale: None, ..tensors() };
        match tensors.prepare(&scheme, &shard, Fp8Options::default()).unwrap_err() {
            Error::Module(error) => match error.downcast_ref() {
                Some(&LayerError::NotDivisible { what, by, found, of }) => {
                    Some((what, by, found, of))
                }
                other => panic!("{other:?}"),
            },
            // Valid sizes with another layer's tensors.
            Error::Shape { .. } => None,
            other => panic!("{other}"),
        }
    };
    let what = "intermediate_size_per_partition";
    assert_eq!(refused(128, 128, 1), Some((what, "block_n", 192, 128)));
    assert_eq!(refused(64, 128, 2), Some((what, "block_k", 192, 128)));
    assert_eq!(refused(64, 128, 1), None, "one rank does not cut K");
    assert_eq!(refused(64, 64, 4), None);
}
