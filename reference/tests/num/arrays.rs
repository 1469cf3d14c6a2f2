//! Element types compared with their definitions, and arrays moved in and out of tensors without a
//! copy.

use marlinspike::Error;
use marlinspike::num::array::{FloatView, FloatView2, HalfArray2, rows_of};
use marlinspike::num::element::{
    E2m1, E2m1x2, E4m3fn, E4m3fnuz, E5m2, E8m0, Element, Float16, bf16, f16,
};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use ndarray::{Array2, ArrayViewD, array, s};

/// The value of sign, exponent and mantissa fields, from the formats' definitions.
fn value(bits: u8, e_bits: i32, m_bits: i32, bias: i32) -> f32 {
    let mantissa = f32::from(bits & ((1 << m_bits) - 1)) / (1u32 << m_bits) as f32;
    let exponent = i32::from(bits >> m_bits) & ((1 << e_bits) - 1);
    let magnitude = match exponent {
        0 => mantissa * 2f32.powi(1 - bias),
        e => (1.0 + mantissa) * 2f32.powi(e - bias),
    };
    if bits >> (e_bits + m_bits) & 1 == 1 { -magnitude } else { magnitude }
}

#[test]
fn values_of_every_code() {
    for bits in 0..=255u8 {
        let same = |found: f32, wanted: f32| {
            assert!(found == wanted || found.is_nan() && wanted.is_nan(), "{bits:#x}: {found}");
        };
        let nan_if = |nan: bool, v: f32| if nan { f32::NAN } else { v };
        same(E4m3fn::from_bits(bits).to_f32(), nan_if(bits & 0x7f == 0x7f, value(bits, 4, 3, 7)));
        same(E4m3fnuz::from_bits(bits).to_f32(), nan_if(bits == 0x80, value(bits, 4, 3, 8)));
        let infinite =
            if bits & 0x7f == 0x7c { value(bits, 5, 2, 15) * f32::INFINITY } else { 0.0 };
        let e5m2 = match bits & 0x7f {
            0x7c => infinite,
            0x7d.. => f32::NAN,
            _ => value(bits, 5, 2, 15),
        };
        same(E5m2::from_bits(bits).to_f32(), e5m2);
        let power = 2f64.powi(i32::from(bits) - 127) as f32;
        same(E8m0::from_bits(bits).to_f32(), nan_if(bits == 0xff, power));
        same(E2m1::from_bits(bits).to_f32(), value(bits & 0xf, 2, 1, 1));
        let pair = E2m1x2::from_bits(bits).pair();
        assert_eq!(pair.map(|c| c.to_bits()), [bits & 0xf, bits >> 4]);
        assert_eq!(E2m1x2::new(pair).to_bits(), bits);
    }
}

/// Every rounding to nearest even compared with a search for the nearest code; ties to the even
/// code.
#[test]
fn e4m3fnuz_rounds_to_the_nearest_code() {
    let mut values: Vec<f32> = (0..=255).map(|b| value(b, 4, 3, 8)).collect();
    values.sort_by(f32::total_cmp);
    let mut inputs: Vec<f32> = values.windows(2).map(|v| (v[0] + v[1]) / 2.0).collect();
    inputs.extend(inputs.clone().iter().flat_map(|v| [v.next_up(), v.next_down()]));
    inputs.extend([1e9, -1e9, f32::INFINITY, 232.0, 231.9, 232.1, 0.0, -0.0]);
    for v in inputs {
        let codes = (0..=255u8).filter(|b| *b != 0x80);
        let nearest = codes.min_by(|a, b| {
            let distance =
                |c: u8| (f64::from(value(c, 4, 3, 8)) - f64::from(v.clamp(-240.0, 240.0))).abs();
            distance(*a).total_cmp(&distance(*b)).then((a & 1).cmp(&(b & 1)))
        });
        assert_eq!(Some(E4m3fnuz::from_f32_rne_saturating(v).to_bits()), nearest, "{v}");
    }
    assert_eq!(E4m3fnuz::from_f32_rne_saturating_224(1e9).to_f32(), 224.0);
    assert_eq!(E4m3fnuz::from_f32_rne_saturating(f32::NAN).to_bits(), 0x80);
}

#[test]
fn halves_round_once() {
    let value = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
    assert_eq!(<f16 as Float16>::from_f64_rne(value).to_bits(), 0x3c01);
    // The conversion that is not used: on x86 it rounds twice, on Arm an instruction rounds once.
    let twice = if cfg!(target_arch = "aarch64") { 0x3c01 } else { 0x3c00 };
    assert_eq!(f16::from_f64(value).to_bits(), twice);
    let value = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
    assert_eq!(<bf16 as Float16>::from_f64_rne(value).to_bits(), 0x3f81);
}

#[test]
fn arrays_move_in_and_out_of_tensors_without_a_copy() {
    fn round<T: Element + PartialEq + Default>(value: T) {
        let mut array = Array2::from_elem((3, 5), T::default());
        array[[2, 1]] = value;
        let (place, wanted) = (array.as_ptr(), array.clone());
        let tensor = Tensor::from_array("t", array).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (T::DTYPE, &[3, 5][..]));
        assert_eq!(tensor.view::<T>().unwrap(), wanted.view().into_dyn());
        assert_eq!(tensor.view::<T>().unwrap().as_ptr(), place);
        let again = tensor.into_array::<T>().unwrap();
        assert_eq!(again.as_ptr(), place);
        assert_eq!(again, wanted.into_dyn());
    }
    round(-7i8);
    round(0xffffu16);
    round(0xdead_beefu32);
    round(-1i64);
    round(1.5f32);
    round(-2.5f64);
    round(f16::from_f32(0.5));
    round(bf16::from_f32(-3.0));
    round(E4m3fn::from_f32_rne_saturating(-3.0));
    round(E5m2::from_bits(0x55));
    round(E8m0::from_bits(3));
    round(E2m1x2::from_bits(0x3f));
}

#[test]
fn strides_types_and_alignment_are_checked() {
    let wide = Array2::<u32>::zeros((4, 6));
    let columns = wide.slice(s![.., 1..3]);
    assert_eq!(
        Tensor::from_view("qweight", columns).unwrap_err(),
        Error::NotContiguous { tensor: "qweight".into(), found: vec![4, 2] }
    );
    assert!(Tensor::from_view("qweight", wide.slice(s![1..3, ..])).is_ok());
    let transposed = wide.clone().reversed_axes();
    assert!(matches!(Tensor::from_array("t", transposed), Err(Error::NotContiguous { .. })));

    let tensor = Tensor::from_view("w", wide.view()).unwrap();
    assert!(matches!(tensor.view::<f32>(), Err(Error::Dtype { found: DType::U32, .. })));
    assert!(ArrayViewD::<i32>::try_from(&tensor).is_err());
    assert_eq!(ArrayViewD::<u32>::try_from(&tensor).unwrap().shape(), [4, 6]);

    // One of four consecutive addresses is aligned to four bytes.
    let bytes = [0u8; 8];
    let tensors = (0..4).map(|i| Tensor::new("b", DType::F32, vec![1], &bytes[i..i + 4]).unwrap());
    let refused =
        tensors.filter(|t| matches!(t.view::<f32>(), Err(Error::Unaligned { expected: 4, .. })));
    assert_eq!(refused.count(), 3);

    // e8m0 scales are U8 in many files; an f16 is never a bf16.
    let scales = Tensor::new("s", DType::U8, vec![2], vec![127u8, 128]).unwrap();
    assert_eq!(scales.view::<E8m0>().unwrap()[1].to_f32(), 2.0);
    let half = Tensor::from_array("h", array![[f16::ONE]]).unwrap();
    assert!(half.view::<bf16>().is_err());
}

#[test]
fn dynamic_arrays_keep_type_and_place() {
    let bits: Vec<u16> = (0..6).map(|i| 0x3c00 + i).collect();
    let view = FloatView2::from_bits("x", ScalarType::FLOAT16, [2, 3], &bits).unwrap();
    assert_eq!(view.shape(), [2, 3]);
    assert_eq!(view.widened()[1], 1.0 + 1.0 / 1024.0);
    assert_eq!(&view.bits_of("x", ScalarType::FLOAT16).unwrap()[..], &bits[..]);
    let error = view.bits_of("x", ScalarType::BFLOAT16).unwrap_err();
    assert_eq!(error.to_string(), "tensor `x`: found dtype F16, expected bfloat16");
    for shape in [[2, 4], [2, 2], [0, 3], [usize::MAX, 2]] {
        let other = FloatView2::from_bits("x", ScalarType::FLOAT16, shape, &bits);
        assert!(matches!(other, Err(Error::Shape { .. })), "{shape:?}");
    }
    let wrong = FloatView2::from_bits("x", ScalarType::FLOAT8_E5M2, [2, 3], &bits);
    assert!(matches!(wrong, Err(Error::Unsupported { .. })));

    let values = array![[1.0f32, 2.0], [3.0, 4.0]].mapv(bf16::from_f32);
    let tensor = Tensor::from_view("x", values.view()).unwrap();
    let found = tensor.float_view2().unwrap();
    assert_eq!((found.scalar_type(), found.shape()), (ScalarType::BFLOAT16, &[2, 2][..]));
    assert_eq!(&found.widened()[..], [1.0, 2.0, 3.0, 4.0]);
    let words = Tensor::from_array("q", array![[1u32]]).unwrap();
    assert!(matches!(words.float_view2(), Err(Error::Dtype { found: DType::U32, .. })));
    // A transposed view has other strides: its elements come in the order of its indices.
    let transposed = FloatView::from(values.t());
    assert_eq!(&transposed.widened()[..], [1.0, 3.0, 2.0, 4.0]);

    let place = bits.as_ptr();
    let array = HalfArray2::from_bits("y", ScalarType::FLOAT16, [3, 2], bits).unwrap();
    assert!(array.clone().into_array::<bf16>().is_err());
    let typed = array.into_array::<f16>().unwrap();
    assert_eq!(typed.as_ptr().cast::<u16>(), place);
    assert_eq!(typed[[2, 1]].to_bits(), 0x3c05);

    assert_eq!(rows_of("x", &[1, 2, 3, 4], 2).unwrap()[[1, 0]], 3);
    assert!(matches!(rows_of("x", &[1, 2, 3], 2), Err(Error::Shape { .. })));
    assert!(matches!(rows_of("x", &[1, 2, 3], 0), Err(Error::Size { .. })));
}

#[test]
fn bits_fill_their_shape() {
    let bits = [0u16; 7];
    for ty in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
        let view = |len: usize| FloatView::from_bits("x", ty, (2, 3), &bits[..len]);
        assert!(view(6).is_ok());
        for len in [0, 5, 7] {
            assert!(matches!(view(len), Err(Error::Shape { .. })), "{len}");
        }
    }
}
