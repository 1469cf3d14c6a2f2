//! A wrong variant of an operation, and the wrong variants that every operation has.

use crate::subject::{Element, Operation, Reference, Subject, SubjectError};
use crate::{Config, Report, run};

/// A wrong variant of an operation.
pub struct Mutant {
    /// What is wrong with it.
    pub name: &'static str,
    /// Name of the operation.
    pub operation: &'static str,
    /// Runs the properties of the operation on it.
    pub run: Box<dyn Fn(&Config) -> Report>,
}

/// A function as a subject.
struct FnSubject<F>(F);

impl<O, F> Subject<O> for FnSubject<F>
where
    O: Operation,
    F: Fn(&O::Input) -> Result<Vec<O::Element>, marlinspike::Error>,
{
    /// An output that is too long is truncated, one that is too short is repeated.
    fn call(&self, input: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        let values = (self.0)(input).map_err(|e| SubjectError(e.to_string()))?;
        for (slot, &value) in out.iter_mut().zip(values.iter().cycle()) {
            *slot = value;
        }
        Ok(())
    }

    fn claims_bits(&self) -> bool {
        true
    }
}

pub(crate) fn mutant<O: Operation>(
    name: &'static str,
    make: impl Fn(&O::Input) -> Result<Vec<O::Element>, marlinspike::Error> + 'static,
) -> Mutant {
    let subject = FnSubject(make);
    Mutant { name, operation: O::NAME, run: Box::new(move |c| run::<O, _>(&subject, c)) }
}

/// Every element made of the same byte.
struct Constant(u8);

impl<O: Operation> Subject<O> for Constant {
    fn call(&self, _: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        out.fill(O::Element::of_byte(self.0));
        Ok(())
    }

    fn claims_bits(&self) -> bool {
        true
    }
}

/// Right, except that the last element is not written.
struct Unwritten;

impl<O: Operation> Subject<O> for Unwritten {
    fn call(&self, input: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        let last = out.last().copied();
        Subject::<O>::call(&Reference, input, out)?;
        if let (Some(slot), Some(last)) = (out.last_mut(), last) {
            *slot = last;
        }
        Ok(())
    }

    fn claims_bits(&self) -> bool {
        true
    }
}

/// Right in the first call, with a flipped bit in each later call, as with a race.
struct Drifting(std::cell::Cell<u32>);

impl<O: Operation> Subject<O> for Drifting {
    fn call(&self, input: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        Subject::<O>::call(&Reference, input, out)?;
        let calls = self.0.replace(self.0.get() + 1);
        let at = calls as usize % out.len();
        let bits: u32 = out[at].into();
        out[at] = O::Element::of_bits(bits ^ calls & 1);
        Ok(())
    }

    fn claims_bits(&self) -> bool {
        true
    }
}

/// Mutants of every operation.
pub(crate) fn common<O: Operation>() -> [Mutant; 5] {
    let made = |name, run| Mutant { name, operation: O::NAME, run };
    [
        made("all zeros", Box::new(|c: &Config| run::<O, _>(&Constant(0), c))),
        made("all ones (NaN in every float type)", Box::new(|c| run::<O, _>(&Constant(0xff), c))),
        made("float16 NaN bytes", Box::new(|c| run::<O, _>(&Constant(0x7f), c))),
        made("last element unwritten", Box::new(|c| run::<O, _>(&Unwritten, c))),
        made("differs from call to call", Box::new(|c| run::<O, _>(&Drifting(0.into()), c))),
    ]
}

/// The reference on changed arguments.
pub(crate) fn with<O: Operation>(
    name: &'static str,
    change: impl Fn(&mut O::Input) + 'static,
) -> Mutant {
    mutant::<O>(name, move |input| {
        let mut input = input.clone();
        change(&mut input);
        O::expected(&input)
    })
}
