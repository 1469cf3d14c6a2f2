//! Operations and their implementations.

use std::fmt::Debug;

use marlinspike::Result;
use proptest::strategy::BoxedStrategy;

use crate::report::Failure;

/// An element of an output: `u8`, `u16` or `u32` bits.
pub trait Element: Copy + PartialEq + Debug + Into<u32> + 'static {
    /// Bits of the element.
    const BITS: u32;
    /// The element whose every byte is `byte`.
    fn of_byte(byte: u8) -> Self;
    /// The low bits of `bits`.
    fn of_bits(bits: u32) -> Self;
}

macro_rules! elements {
    ($($ty:ty),+) => { $(
        impl Element for $ty {
            const BITS: u32 = <$ty>::BITS;
            fn of_byte(byte: u8) -> Self {
                <$ty>::from_ne_bytes([byte; size_of::<$ty>()])
            }
            fn of_bits(bits: u32) -> Self {
                bits as $ty
            }
        }
    )+ };
}

elements!(u8, u16, u32);

/// An operation: a strategy for its inputs, and its expected output.
pub trait Operation: Sized + 'static {
    /// Upstream's name, or a similar one.
    const NAME: &'static str;
    /// Arguments of one call.
    type Input: Clone + Debug;
    /// Storage element of the output.
    type Element: Element;

    /// Arguments over the whole lattice, which shrink to small shapes and plain values.
    fn inputs() -> BoxedStrategy<Self::Input>;

    /// The output that the reference defines, row-major.
    ///
    /// # Errors
    /// Returns no error for inputs of [`Self::inputs`].
    fn expected(input: &Self::Input) -> Result<Vec<Self::Element>>;

    /// Elements of the output.
    ///
    /// # Errors
    /// As [`Self::expected`].
    fn len(input: &Self::Input) -> Result<usize> {
        Ok(Self::expected(input)?.len())
    }

    /// Bits of one value; a storage element holds as many as fit.
    fn width(_input: &Self::Input) -> u32 {
        Self::Element::BITS
    }

    /// Describes the place of the value at bit `bit` of output element `element`.
    fn place(input: &Self::Input, element: usize, bit: u32) -> String;

    /// Describes the arguments without their data.
    fn describe(input: &Self::Input) -> String;

    /// Whether `found` is also right although it differs from the expected output (another valid
    /// sort).
    fn accepts(_input: &Self::Input, _found: &[Self::Element]) -> bool {
        false
    }

    /// Elements of `found` that no kernel of the operation's arithmetic can have computed; `None` if every
    /// bit has one right value. Subjects that claim no bits ([`Subject::claims_bits`]) are judged by it.
    ///
    /// # Errors
    /// As [`Self::expected`].
    fn out_of_bounds(_input: &Self::Input, _found: &[Self::Element]) -> Result<Option<Vec<usize>>> {
        Ok(None)
    }

    /// Properties of this operation only.
    fn own_laws() -> Vec<Law<Self>> {
        Vec::new()
    }
}

/// An implementation of an operation: a kernel behind a copy to a device, a library, a mutant.
pub trait Subject<O: Operation> {
    /// Fills `out`, which has the length of the expected output and arbitrary contents.
    ///
    /// # Errors
    /// Returns an error if the implementation refuses or fails, which counts as a failure of the
    /// property.
    fn call(&self, input: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError>;

    /// Whether products must have the reference's bits: those of the canonical schedule, for any number of
    /// rows and any division of the work. Other implementations may add in any order; their products
    /// are judged by a derived bound ([`Operation::out_of_bounds`]). Outputs with one right value, such
    /// as packed weights, are compared bit for bit in any case.
    fn claims_bits(&self) -> bool {
        false
    }

    /// Whether the implementation is meant for such an input at all (a weight type that it has no
    /// kernel for). Others are drawn in its place, and the report counts what was left out.
    fn takes(&self, _input: &O::Input) -> bool {
        true
    }
}

/// A law: `Err` says how it was broken.
pub struct Law<O: Operation> {
    /// Name, as reports print it.
    pub name: &'static str,
    /// Tries it on one input.
    pub check: fn(&dyn Subject<O>, &O::Input) -> Result<(), Failure>,
}

/// Why a subject did not answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct SubjectError(pub String);

/// The reference as a subject: every law holds of it.
#[derive(Debug, Clone, Copy)]
pub struct Reference;

impl<O: Operation> Subject<O> for Reference {
    fn call(&self, input: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        let expected = O::expected(input).map_err(|e| SubjectError(e.to_string()))?;
        out.copy_from_slice(&expected);
        Ok(())
    }

    fn claims_bits(&self) -> bool {
        true
    }
}
