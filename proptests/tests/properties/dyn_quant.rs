//! Properties of the int4 path: the reference passes, mutants are rejected.

use marlinspike::case::ActivationRounding;
use marlinspike::layouts::kleidi::RhsLayout;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike_proptests::ops::{
    DynQuantActivationsInput, DynQuantPackActivations, DynQuantPackWeight, DynQuantWeightInput,
};
use marlinspike_proptests::{Config, Operation, Reference, Report, Subject, SubjectError, run};

fn config(seed: u64) -> Config {
    Config { cases: 150, seed, regressions: None }
}

#[test]
fn the_reference_obeys() {
    for report in [
        run::<DynQuantPackWeight, _>(&Reference, &config(1)),
        run::<DynQuantPackActivations, _>(&Reference, &config(2)),
    ] {
        assert!(report.passed() && report.laws.iter().all(|l| l.passed == 150), "{report}");
    }
}

/// The reference's bytes for other arguments, or changed.
struct Mutant<I, F>(F, std::marker::PhantomData<I>);

impl<O, F> Subject<O> for Mutant<O::Input, F>
where
    O: Operation<Element = u8>,
    F: Fn(&O::Input) -> (O::Input, fn(&O::Input, &mut [u8])),
{
    fn call(&self, input: &O::Input, out: &mut [u8]) -> Result<(), SubjectError> {
        let (other, change) = (self.0)(input);
        let made = O::expected(&other).map_err(|e| SubjectError(e.to_string()))?;
        for (slot, &byte) in out.iter_mut().zip(made.iter().cycle()) {
            *slot = byte;
        }
        change(input, out);
        Ok(())
    }
}

fn expect_rejected(name: &str, report: &Report) {
    let failure = report.failure().unwrap_or_else(|| panic!("{name} passed\n{report}"));
    let mismatch = failure.mismatch.as_ref().unwrap_or_else(|| panic!("{name}\n{report}"));
    assert!(mismatch.count > 0 && !mismatch.place.is_empty(), "{name}\n{report}");
}

fn weights(
    name: &str,
    mutate: impl Fn(&mut DynQuantWeightInput) + Copy,
    change: fn(&DynQuantWeightInput, &mut [u8]),
) {
    let make = move |input: &DynQuantWeightInput| {
        let mut other = input.clone();
        mutate(&mut other);
        (other, change)
    };
    for seed in [1, 2] {
        let subject = Mutant(make, std::marker::PhantomData);
        expect_rejected(name, &run::<DynQuantPackWeight, _>(&subject, &config(seed)));
    }
}

#[test]
fn wrong_weights_fall() {
    let same = |_: &mut DynQuantWeightInput| {};
    weights(
        "nibbles of the input exchanged",
        |i| i.weight_u4.iter_mut().for_each(|b| *b = b.rotate_left(4)),
        |_, _| {},
    );
    weights("the bias left out", |i| i.bias = None, |_, _| {});
    weights("blocks of another width", |i| i.nr = 12 - i.nr, |_, _| {});
    weights("columns past N zero", same, |i, out| {
        let group = GroupSize::from_config(i.group_size).unwrap();
        let layout = RhsLayout::new(Shape::new(i.size_k, i.size_n), group, i.nr).unwrap();
        for (byte, value) in out.iter_mut().enumerate() {
            if layout.locate(byte, 0).column >= i.size_n {
                *value = 0;
            }
        }
    });
    weights("the last byte flipped", same, |_, out| {
        if let Some(last) = out.last_mut() {
            *last ^= 0x80;
        }
    });
}

#[test]
fn wrong_activations_fall() {
    let expect = |name: &str, mutate: fn(&mut DynQuantActivationsInput)| {
        let make = move |input: &DynQuantActivationsInput| {
            let mut other = input.clone();
            mutate(&mut other);
            let unchanged: fn(&DynQuantActivationsInput, &mut [u8]) = |_, _| {};
            (other, unchanged)
        };
        for seed in [1, 2] {
            let subject = Mutant(make, std::marker::PhantomData);
            expect_rejected(name, &run::<DynQuantPackActivations, _>(&subject, &config(seed)));
        }
    };
    expect("the other rounding rule", |i| {
        i.rounding = match i.rounding {
            ActivationRounding::HalfAway => ActivationRounding::HalfEven,
            _ => ActivationRounding::HalfAway,
        };
    });
    expect("blocks of another height", |i| i.mr = 5 - i.mr);
    expect("subnormal activations flushed to zero", |i| {
        i.x.iter_mut().filter(|x| !x.is_normal()).for_each(|x| *x = 0.0);
    });
    expect("the last activation lost", |i| {
        if let Some(last) = i.x.last_mut() {
            *last = 0.0;
        }
    });
}
