//! Products of kernels that add in an order of their own are judged by their bound, unless they claim
//! the reference's bits.

use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;
use marlinspike_proptests::{
    Config, Failure, Operation, Report, Subject, SubjectError, laws,
    ops::{DenseInput, DenseProduct, ExpertInput, ExpertProduct, ProductWeight},
    run,
};
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;

/// A loop in f32 over the dequantized values.
#[derive(Clone, Copy)]
struct Plain {
    claims_bits: bool,
    /// Multiplies every output.
    factor: f32,
    /// Rows of K that are left out at the end.
    dropped: usize,
}

const RIGHT: Plain = Plain { claims_bits: false, factor: 1.0, dropped: 0 };

impl Plain {
    fn row(self, x: &[f64], weight: &Weight<'_>, form: &ProductWeight, router: f32) -> Vec<u16> {
        let ty = form.quant.dtype;
        let column = |n: usize| {
            let kept = x.len() - self.dropped;
            // Descending k, which no known kernel has.
            let value = |k: usize| (x[k] * weight.dequantize(k, n)) as f32;
            let sum = (0..kept).rev().fold(0f32, |sum, k| value(k) + sum);
            let bias = weight.bias.as_ref().map_or(0.0, |b| b.value(0, n) as f32);
            ty.encode_rne(f64::from((sum + bias) * router * self.factor)) as u16
        };
        (0..form.shape.size_n).map(column).collect()
    }
}

/// Whether the loop computes it: 16-bit activations.
fn is_plain(form: &ProductWeight) -> bool {
    form.quant.input_dtype.is_none()
}

fn decoded(ty: ScalarType, x: &[u16]) -> Vec<f64> {
    x.iter().map(|&bits| ty.to_f64(bits.into())).collect()
}

impl Subject<DenseProduct> for Plain {
    fn call(&self, i: &DenseInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let x = decoded(i.form.quant.dtype, &i.x);
        let rows = x.chunks_exact(i.form.shape.size_k);
        for (y, row) in out.chunks_exact_mut(i.form.shape.size_n).zip(rows) {
            y.copy_from_slice(&self.row(row, &i.weight, &i.form, 1.0));
        }
        Ok(())
    }

    fn claims_bits(&self) -> bool {
        self.claims_bits
    }

    fn takes(&self, i: &DenseInput) -> bool {
        is_plain(&i.form)
    }
}

impl Subject<ExpertProduct> for Plain {
    fn call(&self, i: &ExpertInput, out: &mut [u16]) -> Result<(), SubjectError> {
        let (size_k, size_n) = (i.form.shape.size_k, i.form.shape.size_n);
        let x = decoded(i.form.quant.dtype, &i.x);
        for (slot, y) in out.chunks_exact_mut(size_n).enumerate() {
            let Ok(expert) = usize::try_from(i.topk_ids[slot]) else {
                y.fill(0);
                continue;
            };
            let router = i.topk_weights.as_ref().map_or(1.0, |w| w[slot]);
            let row = &x[slot / i.top_k * size_k..][..size_k];
            y.copy_from_slice(&self.row(row, &i.weights[expert], &i.form, router));
        }
        Ok(())
    }

    fn takes(&self, i: &ExpertInput) -> bool {
        is_plain(&i.form)
    }
}

fn on<O: Operation>(subject: Plain, cases: u32) -> Report
where
    Plain: Subject<O>,
{
    run::<O, _>(&subject, &Config { cases, seed: 11, regressions: None })
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn a_right_product_in_f32_passes() {
    let report = on::<DenseProduct>(RIGHT, 3);
    assert!(report.passed(), "{report}");
    let report = on::<ExpertProduct>(RIGHT, 3);
    assert!(report.passed(), "{report}");
}

/// The first broken property, without the minimal input, which takes hundreds of products.
fn failure<O: Operation>(subject: Plain) -> Failure
where
    Plain: Subject<O>,
{
    let mut runner = TestRunner::deterministic();
    let mut inputs = (0..40).map(|_| O::inputs().new_tree(&mut runner).unwrap().current());
    let failure = inputs.find_map(|input| {
        let input = Some(input).filter(|i| Subject::<O>::takes(&subject, i))?;
        laws::<O>().iter().find_map(|law| (law.check)(&subject, &input).err())
    });
    failure.unwrap_or_else(|| panic!("{} passed", O::NAME))
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn the_same_product_with_a_claim_of_bits_fails() {
    let failure = failure::<DenseProduct>(Plain { claims_bits: true, ..RIGHT });
    assert_eq!(failure.what, "not the reference's output");
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn wrong_products_are_outside_the_bound() {
    for wrong in [Plain { factor: 1.02, ..RIGHT }, Plain { dropped: 16, ..RIGHT }] {
        for failure in [failure::<DenseProduct>(wrong), failure::<ExpertProduct>(wrong)] {
            assert!(failure.what.contains("outside the bound of any kernel"), "{failure:?}");
            assert!(failure.mismatch.is_some(), "{failure:?}");
        }
    }
}
