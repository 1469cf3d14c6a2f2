//! The fast product has the bits of the plain one.

use super::layers::matrix;
#[allow(dead_code, reason = "each test uses a part")]
use marlinspike::Error;
use marlinspike::case::ActivationRounding;
use marlinspike::num::array::FloatView2;
use marlinspike::num::array_mut::FloatViewMut2;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::element::{bf16, f16};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::linears::{LinearLayer, forward_all};
use marlinspike::w4a8::{Linear, LinearWorkspace, Values, kernels, linear, scalar::Scalar};
use ndarray::Array2;

#[test]
fn every_shape_type_and_kernel() {
    let mut rng = Rng::new(21);
    let mut workspace = LinearWorkspace::default();
    let pools = [1, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap());
    for round in 0..40 {
        let sides = [(7, -1), (40, -1), (161, -1), (96, 32), (256, 128)];
        let (size_k, group) = sides[rng.below(sides.len())];
        let shape = Shape::new(size_k, 1 + rng.below(300));
        let group = GroupSize::from_config(group).unwrap();
        let weight = matrix(shape, group, [4, 8][round % 2], &mut rng);
        let size_m = [0, 1, 2, 7, 8, 9, 30][rng.below(7)];
        let x = (0..size_m * size_k).map(|_| (rng.below(4001) as f32 - 1800.0) / 512.0).collect();
        let ty = [ScalarType::FLOAT32, ScalarType::BFLOAT16][rng.below(2)];
        let x = Values::from_f32(x, ty).unwrap();
        let rounding = [ActivationRounding::HalfAway, ActivationRounding::HalfEven][rng.below(2)];
        let expected = linear(&Scalar, &x, &weight, rounding).unwrap();
        for kernel in kernels() {
            let what = format!("{shape} group {group} M {size_m} {ty} {}", kernel.name());
            let layer = Linear::new(weight.clone(), rounding).with_kernel(kernel);
            let mut y = Values::from_f32(vec![f32::NAN; size_m * shape.size_n], ty).unwrap();
            let pool = &pools[rng.below(2)];
            let (x, out) = (x.view(size_k).unwrap(), y.view_mut(shape.size_n).unwrap());
            pool.install(|| layer.forward(x, &mut workspace, out)).unwrap();
            assert_eq!(y.bits(), expected.bits(), "{what}");
        }
    }
}

/// Rows with NaN or infinity, in every place of a piece and in the tail, by both rounding rules:
/// NaN wherever the definition gives NaN.
#[test]
fn activations_out_of_range() {
    let mut rng = Rng::new(22);
    let specials =
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1e-44, -0.0, 0.0, 0.5];
    for size_k in [5, 8, 37, 64, 75] {
        let weight = matrix(Shape::new(size_k, 9), GroupSize::Channel, 8, &mut rng);
        let size_m = 120;
        let mut x = vec![0.0; size_m * size_k];
        for row in x.chunks_mut(size_k) {
            // From rows of one special value to rows with few.
            let (common, rare) = (rng.below(4), 1 + rng.below(40));
            for x in row {
                *x = if rng.below(rare) == 0 {
                    specials[rng.below(specials.len())]
                } else {
                    [1.0, 0.0, 1e-41, rng.below(1000) as f32][common]
                };
            }
        }
        for rounding in [ActivationRounding::HalfAway, ActivationRounding::HalfEven] {
            let x = Values::F32(x.clone());
            let expected = linear(&Scalar, &x, &weight, rounding).unwrap().to_f32();
            let mut y = Values::F32(vec![0.0; expected.len()]);
            let layer = Linear::new(weight.clone(), rounding);
            let (x, out) = (x.view(size_k).unwrap(), y.view_mut(9).unwrap());
            layer.forward(x, &mut LinearWorkspace::default(), out).unwrap();
            for (i, (found, expected)) in y.to_f32().iter().zip(&expected).enumerate() {
                let same = found.to_bits() == expected.to_bits();
                // The processor determines the sign of a NaN result.
                assert!(same || found.is_nan() && expected.is_nan(), "K {size_k}, element {i}");
            }
        }
    }
}

#[test]
fn sides_that_do_not_fit_are_refused() {
    let weight = matrix(Shape::new(64, 9), GroupSize::Of(32), 8, &mut Rng::new(23));
    let layer = Linear::new(weight, ActivationRounding::HalfEven);
    fn refuse<'x, 'o>(
        layer: &Linear<'_>,
        x: impl Into<FloatView2<'x>>,
        out: impl Into<FloatViewMut2<'o>>,
    ) -> Error {
        layer.forward(x, &mut LinearWorkspace::default(), out).unwrap_err()
    }
    let zeros = |m: usize, cols: usize| Array2::<f32>::zeros((m, cols));
    for [m, cols] in [[1, 65], [2, 32], [64, 1]] {
        let refused = refuse(&layer, zeros(m, cols).view(), zeros(m, 9).view_mut());
        assert!(matches!(&refused, Error::Shape { tensor, .. } if tensor == "x"), "{refused}");
    }
    for [m, cols] in [[1, 9], [9, 2], [2, 8]] {
        let refused = refuse(&layer, zeros(2, 64).view(), zeros(m, cols).view_mut());
        assert!(matches!(&refused, Error::Shape { tensor, .. } if tensor == "out"), "{refused}");
    }
    let refused =
        refuse(&layer, zeros(1, 64).view(), Array2::from_elem((1, 9), bf16::ZERO).view_mut());
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    let [x, mut y] = [64, 9].map(|cols| Array2::from_elem((1, cols), f16::ZERO));
    let refused = refuse(&layer, x.view(), y.view_mut());
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    // Columns that follow each other.
    let refused = refuse(&layer, zeros(64, 2).t(), zeros(2, 9).view_mut());
    assert!(
        matches!(&refused, Error::NotContiguous { tensor, found } if tensor == "x" && found == &[2, 64]),
        "{refused}"
    );
    let refused = refuse(&layer, zeros(2, 64).view(), zeros(9, 2).view_mut().reversed_axes());
    assert!(
        matches!(&refused, Error::NotContiguous { tensor, .. } if tensor == "out"),
        "{refused}"
    );
}

/// Layers in groups of one size share the quantized rows; in others each layer has its own.
#[test]
fn several_layers_have_the_bits_of_each() {
    let mut rng = Rng::new(24);
    let pools = [1, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap());
    for groups in [[32, 32, 32], [-1, -1, -1], [32, 64, 32]] {
        let rounding = ActivationRounding::HalfAway;
        let layers = [[300, 0], [33, 1], [70, 2]].map(|[size_n, i]| {
            let group = GroupSize::from_config(groups[i]).unwrap();
            Linear::new(matrix(Shape::new(128, size_n), group, 8, &mut rng), rounding)
        });
        let dynamic = layers.each_ref().map(|layer| layer as &dyn LinearLayer);
        for size_m in [0, 1, 9, 40] {
            let x: Vec<f32> =
                (0..size_m * 128).map(|_| (rng.below(4001) as f32 - 1800.0) / 512.0).collect();
            let mut outs = layers.each_ref().map(|l| vec![f32::NAN; size_m * l.shape().size_n]);
            let to = outs.each_mut().map(|out| &mut out[..]);
            let mut workspace = LinearWorkspace::default();
            pools[size_m % 2].install(|| forward_all(dynamic, &x, &mut workspace, to)).unwrap();
            for (layer, out) in layers.iter().zip(&outs) {
                let x = Values::F32(x.clone());
                let expected = linear(&Scalar, &x, layer.weight(), rounding).unwrap();
                assert_eq!(Values::F32(out.clone()).bits(), expected.bits(), "{groups:?} {size_m}");
            }
        }
    }
}

#[test]
fn lengths_of_several_layers_that_do_not_fit_are_refused() {
    let mut rng = Rng::new(25);
    let mut layer = |size_k| {
        let weight = matrix(Shape::new(size_k, 9), GroupSize::Of(32), 8, &mut rng);
        Linear::new(weight, ActivationRounding::HalfAway)
    };
    let [first, second, longer] = [64, 64, 96].map(&mut layer);
    for (layers, x, lengths, named) in [
        ([&first, &second], 65, [9, 9], "x"),
        ([&first, &second], 128, [18, 9], "out"),
        ([&first, &longer], 64, [9, 9], "x"),
    ] {
        let mut outs = lengths.map(|len| vec![7.0; len]);
        let to = outs.each_mut().map(|out| &mut out[..]);
        let layers = layers.map(|layer| layer as &dyn LinearLayer);
        let refused =
            forward_all(layers, &vec![1.0; x], &mut LinearWorkspace::default(), to).unwrap_err();
        assert!(matches!(&refused, Error::Shape { tensor, .. } if tensor == named), "{refused}");
        assert!(outs.iter().flatten().all(|&y| y == 7.0), "{named}");
    }
}
