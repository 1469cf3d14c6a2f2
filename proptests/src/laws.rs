//! Properties of every implementation of an operation.

use crate::report::{Failure, Mismatch};
pub use crate::subject::Law;
use crate::subject::{Element, Operation, Subject};

/// The properties of an operation: the common ones, then its own.
pub fn laws<O: Operation>() -> Vec<Law<O>> {
    let mut laws = vec![
        Law { name: "equals the reference", check: equals_reference },
        Law { name: "same input twice gives the same bits", check: deterministic },
        Law { name: "every byte of the output is written", check: writes_everything },
    ];
    laws.extend(O::own_laws());
    laws
}

/// A failure without a mismatch.
pub(crate) fn broken<O: Operation>(input: &O::Input, what: impl Into<String>) -> Failure {
    Failure {
        input: O::describe(input),
        minimal: format!("{input:?}"),
        what: what.into(),
        mismatch: None,
    }
}

/// The subject's output, from a buffer full of `poison`.
pub(crate) fn call<O: Operation>(
    subject: &dyn Subject<O>,
    input: &O::Input,
    poison: u8,
) -> Result<Vec<O::Element>, Failure> {
    let len =
        O::len(input).map_err(|e| broken::<O>(input, format!("the reference refused: {e}")))?;
    let mut out = vec![O::Element::of_byte(poison); len];
    subject
        .call(input, &mut out)
        .map_err(|e| broken::<O>(input, format!("the subject failed: {e}")))?;
    Ok(out)
}

pub(crate) fn expected<O: Operation>(input: &O::Input) -> Result<Vec<O::Element>, Failure> {
    O::expected(input).map_err(|e| broken::<O>(input, format!("the reference refused: {e}")))
}

/// Compares two outputs of one input, value by value.
pub(crate) fn compare<O: Operation>(
    input: &O::Input,
    expected: &[O::Element],
    found: &[O::Element],
    what: &str,
) -> Result<(), Failure> {
    let width = O::width(input);
    let mask = u32::MAX >> (32 - width);
    let mut mismatch: Option<Mismatch> = None;
    for (element, (&e, &f)) in expected.iter().zip(found).enumerate() {
        let (e, f): (u32, u32) = (e.into(), f.into());
        for bit in (0..O::Element::BITS).step_by(width as usize) {
            let (e, f) = (e >> bit & mask, f >> bit & mask);
            if e == f {
                continue;
            }
            let first = mismatch.get_or_insert_with(|| Mismatch {
                count: 0,
                total: expected.len() * (O::Element::BITS / width) as usize,
                element,
                bit,
                place: O::place(input, element, bit),
                expected: e,
                found: f,
            });
            first.count += 1;
        }
    }
    match mismatch {
        None if expected.len() == found.len() => Ok(()),
        None => Err(broken::<O>(input, format!("{what}: lengths differ"))),
        Some(first) => Err(Failure { mismatch: Some(Box::new(first)), ..broken::<O>(input, what) }),
    }
}

/// Every bit, or the bound of an operation whose subject claims no bits.
fn equals_reference<O: Operation>(s: &dyn Subject<O>, input: &O::Input) -> Result<(), Failure> {
    let found = call(s, input, 0xa5)?;
    let expected = expected::<O>(input)?;
    if found == expected || O::accepts(input, &found) {
        return Ok(());
    }
    match s.claims_bits() {
        true => compare::<O>(input, &expected, &found, "not the reference's output"),
        false => judged::<O>(input, &expected, &found, "not the reference's output"),
    }
}

/// Compares by the operation's bound, if it has one: values within it count as expected.
pub(crate) fn judged<O: Operation>(
    input: &O::Input,
    expected: &[O::Element],
    found: &[O::Element],
    what: &str,
) -> Result<(), Failure> {
    let outside = O::out_of_bounds(input, found);
    let outside = outside.map_err(|e| broken::<O>(input, format!("the reference refused: {e}")))?;
    let Some(outside) = outside.filter(|_| expected.len() == found.len()) else {
        return compare::<O>(input, expected, found, what);
    };
    let mut rest = expected.to_vec();
    for at in outside {
        rest[at] = found[at];
    }
    compare::<O>(input, expected, &rest, &format!("{what}, and outside the bound of any kernel"))
}

fn deterministic<O: Operation>(s: &dyn Subject<O>, input: &O::Input) -> Result<(), Failure> {
    let (first, second) = (call(s, input, 0)?, call(s, input, 0)?);
    compare::<O>(input, &first, &second, "a second call gave other bits")
}

/// Buffers with different contents must give the same output, which reveals unwritten elements.
fn writes_everything<O: Operation>(s: &dyn Subject<O>, input: &O::Input) -> Result<(), Failure> {
    let (first, second) = (call(s, input, 0x5a)?, call(s, input, 0xc3)?);
    compare::<O>(input, &first, &second, "the output depends on what its buffer held before")
}
