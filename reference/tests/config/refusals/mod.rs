//! Tensors for the tests of rejected inputs, and assertions about the errors.

// Each test program uses a part of this module.
#![allow(dead_code)]

use marlinspike::Error;
use marlinspike::num::tensor::{DType, Tensor};

pub(crate) type T = Tensor<'static>;

pub(crate) fn zeros(name: &str, dtype: DType, shape: &[usize]) -> T {
    let len = shape.iter().product::<usize>() * dtype.bytes();
    Tensor::new(name, dtype, shape.to_vec(), vec![0; len]).unwrap()
}

pub(crate) fn ints(name: &str, shape: &[usize], values: Vec<i32>) -> T {
    Tensor::from_vec(name, DType::I32, shape.to_vec(), values).unwrap()
}

pub(crate) fn floats(name: &str, shape: &[usize], values: Vec<f32>) -> T {
    Tensor::from_vec(name, DType::F32, shape.to_vec(), values).unwrap()
}

pub(crate) fn bytes(name: &str, dtype: DType, shape: &[usize], values: Vec<u8>) -> T {
    Tensor::from_vec(name, dtype, shape.to_vec(), values).unwrap()
}

#[track_caller]
pub(crate) fn shape<V: std::fmt::Debug>(result: Result<V, Error>, name: &str) {
    match result.unwrap_err() {
        Error::Shape { tensor, .. } => assert_eq!(tensor, name),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub(crate) fn dtype<V: std::fmt::Debug>(result: Result<V, Error>, name: &str) {
    match result.unwrap_err() {
        Error::Dtype { tensor, .. } => assert_eq!(tensor, name),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub(crate) fn value<V: std::fmt::Debug>(
    result: Result<V, Error>,
    name: &str,
    at: &[usize],
) -> String {
    match result.unwrap_err() {
        Error::Value { tensor, index, expected, .. } => {
            assert_eq!((tensor.as_str(), index.as_slice()), (name, at));
            expected
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub(crate) fn size<V: std::fmt::Debug>(result: Result<V, Error>) {
    assert!(matches!(result.unwrap_err(), Error::Size { .. }));
}

#[track_caller]
pub(crate) fn missing<V: std::fmt::Debug>(result: Result<V, Error>, name: &str) {
    match result.unwrap_err() {
        Error::Missing { tensor, .. } => assert_eq!(tensor, name),
        other => panic!("{other:?}"),
    }
}

pub(crate) const NOT_FINITE: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
