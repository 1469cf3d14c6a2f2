//! The bits of products and experts are those of the definition.

use candle_core::{DType, Device, Module as _, Tensor, Var};
use marlinspike::w4a8::packed::PackedRhs;
use marlinspike::w4a8::{Linear, Values};
use marlinspike_bench::tile::activations;
use marlinspike_candle::{DenseLinear, Int4Linear};

use crate::common::*;

#[test]
fn products_have_the_definitions_bits() {
    let linear = product();
    assert_eq!([linear.size_k(), linear.size_n()], [K, N]);
    for dtype in TYPES {
        for (strides, x) in strided(K, 4, dtype) {
            let expected = rounded(&defined_product(&values(&x)), dtype);
            assert!(expected.iter().any(|&bits| bits << 1 != 0));
            for threads in 1..=3 {
                let y = pool(threads).install(|| linear.forward(&x)).unwrap();
                assert_eq!((y.dims(), y.dtype()), ([5, 2, N].as_slice(), dtype));
                assert!(bits(&y) == expected, "{dtype:?}, {strides}, {threads} threads");
            }
        }
    }
}

#[test]
fn experts_have_the_definitions_bits() {
    let experts = experts();
    assert_eq!([experts.hidden_size(), experts.num_experts(), experts.top_k()], [K, EXPERTS, 2]);
    for dtype in TYPES {
        let rows = strided(K, 6, dtype).into_iter().zip(strided(EXPERTS, 5, DType::F32));
        for ((strides, x), (_, logits)) in rows {
            let Values::F32(flat) = values(&logits) else { panic!("f32") };
            let expected = rounded(&defined_experts(&values(&x), &flat), dtype);
            for threads in 1..=3 {
                let y = pool(threads).install(|| experts.forward(&x, &logits)).unwrap();
                assert_eq!((y.dims(), y.dtype()), (x.dims(), dtype));
                assert!(bits(&y) == expected, "{dtype:?}, {strides}, {threads} threads");
            }
        }
    }
}

/// Logits of 16 bits are widened.
#[test]
fn logits_have_any_type() {
    let (experts, x) = (experts(), strided(K, 6, DType::F32).remove(0).1);
    for dtype in TYPES {
        let logits = strided(EXPERTS, 5, dtype).remove(0).1;
        let flat = values(&logits).to_f32();
        let y = experts.forward(&x, &logits).unwrap();
        assert!(bits(&y) == rounded(&defined_experts(&values(&x), &flat), DType::F32), "{dtype:?}");
    }
}

#[test]
fn no_rows_give_no_rows() {
    let none = |shape: &[usize]| Tensor::zeros(shape, DType::BF16, &Device::Cpu).unwrap();
    let y = product().forward(&none(&[2, 0, K])).unwrap();
    assert_eq!((y.dims(), y.dtype()), ([2, 0, N].as_slice(), DType::BF16));
    let y = experts().forward(&none(&[0, K]), &none(&[0, EXPERTS])).unwrap();
    assert_eq!(y.dims(), [0, K]);
}

/// One wrong code changes its column, and no other.
#[test]
fn a_wrong_weight_gives_other_bits() {
    let packed = tile(K, N, 1).matrix(0).unwrap();
    let x = strided(K, 4, DType::F32).remove(0).1;
    let right = bits(&product().forward(&x).unwrap());
    for byte in [0, packed.layout().block_bytes() + 3] {
        let mut bytes = packed.bytes().to_vec();
        bytes[byte] ^= 0x30;
        let place = packed.layout().locate(byte, 4);
        let wrong = PackedRhs::new(packed.layout(), bytes).unwrap();
        let found = packed.compare(&wrong).unwrap().unwrap();
        assert_eq!(found, place);
        let wrong = Int4Linear::new("wrong", Linear::new(wrong, ROUNDING)).forward(&x).unwrap();
        let wrong = bits(&wrong);
        let mut columns: Vec<usize> =
            (0..right.len()).filter(|&i| right[i] != wrong[i]).map(|i| i % N).collect();
        columns.sort_unstable();
        columns.dedup();
        assert_eq!(columns.len(), 1, "{place}");
        assert_eq!(columns[0] / 8, byte / packed.layout().block_bytes(), "{place}");
    }
}

/// The documented order of additions; a row alone has the bits that it has in a batch.
#[test]
fn unquantized_layers_add_in_the_documented_order() {
    let weight = activations(N * K, 11);
    let bias = activations(N, 12);
    for dtype in TYPES {
        let stored = Tensor::from_slice(&weight, (N, K), &Device::Cpu).unwrap();
        let stored = stored.to_dtype(dtype).unwrap();
        let offsets = Tensor::from_slice(&bias, N, &Device::Cpu).unwrap();
        let linear = DenseLinear::new("gate", &stored, Some(&offsets)).unwrap();
        let weight = values(&stored).to_f32();
        for (strides, x) in strided(K, 4, DType::F32) {
            let Values::F32(rows) = values(&x) else { panic!("f32") };
            let row = |x: &[f32]| -> Vec<f32> {
                lanes(x, &weight).iter().zip(&bias).map(|(y, b)| y + b).collect()
            };
            let expected: Vec<f32> = rows.chunks_exact(K).flat_map(row).collect();
            let y = linear.forward(&x).unwrap();
            assert!(bits(&y) == rounded(&Values::F32(expected), DType::F32), "{dtype:?} {strides}");
            let alone = linear.forward(&x.narrow(0, 3, 1).unwrap()).unwrap();
            assert!(bits(&alone) == bits(&y.narrow(0, 3, 1).unwrap()), "{dtype:?} {strides}");
        }
    }
}

/// Four threads that share a layer, and a call inside each rayon task.
#[test]
fn a_layer_is_called_from_many_threads() {
    use rayon::prelude::*;
    let (linear, x) = (product(), strided(K, 4, DType::F32).remove(0).1);
    let expected = bits(&linear.forward(&x).unwrap());
    let same = pool(4).install(|| {
        (0..64).into_par_iter().all(|_| bits(&linear.clone().forward(&x).unwrap()) == expected)
    });
    assert!(same);
}

/// A gradient that would have to pass a layer is refused; one that need not is computed.
#[test]
fn gradients_are_refused() {
    let x = Var::from_tensor(&strided(K, 4, DType::F32).remove(0).1).unwrap();
    let logits = strided(EXPERTS, 5, DType::F32).remove(0).1;
    let outputs = [
        ("q_proj", product().forward(&x).unwrap()),
        ("mlp.experts", experts().forward(&x, &logits).unwrap()),
    ];
    for (module, y) in outputs {
        let error = y.sum_all().unwrap().backward().unwrap_err().to_string();
        assert!(error.contains(module) && error.contains("backward pass"), "{error}");
    }
    let y = product().forward(&x.detach()).unwrap().sum_all().unwrap();
    let loss = (x.sqr().unwrap().sum_all().unwrap() + y).unwrap();
    let gradients = loss.backward().unwrap();
    let found = gradients.get(&x).unwrap();
    assert!(bits(found) == bits(&(x.as_tensor() * 2.0).unwrap()));
}
