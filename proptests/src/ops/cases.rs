//! Operations over whole cases: a subject reads a case's inputs and config and writes the bytes of
//! all outputs in the order of their names. There is one for each row of the reference's table with
//! a bit-exact computation.

use marlinspike::Result;
use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{Verdict, add_outputs, check_case};
use marlinspike::num::tensor::Tensor;
use marlinspike::vectors::{Rng, case_of, lattice};
use proptest::prelude::*;

use crate::laws::{Law, broken, call, compare};
use crate::report::Failure;
use crate::{Operation, Subject};

/// Arguments of an operation: a case with the reference's outputs, which a subject must not read.
#[derive(Debug, Clone)]
pub struct CaseInput {
    /// Inputs, config, and the outputs that are expected.
    pub case: Case<'static>,
}

impl CaseInput {
    /// The inputs that `seed` draws for a configuration, with the outputs of the reference.
    ///
    /// # Errors
    /// Returns no error for a configuration of a lattice.
    pub fn draw(config: CaseConfig, seed: u64) -> Result<Self> {
        Ok(Self { case: case_of(config, &mut Rng::new(seed))? })
    }

    /// The bytes of the outputs.
    pub(crate) fn bytes(case: &Case<'_>) -> Vec<u8> {
        case.outputs.values().flat_map(|t| t.bytes().iter().copied()).collect()
    }

    /// The case with outputs taken from a subject's bytes.
    fn with_outputs(&self, bytes: &[u8]) -> Result<Case<'static>> {
        let mut case = self.case.clone();
        let mut start = 0;
        for (name, tensor) in &self.case.outputs {
            let end = start + tensor.bytes().len();
            let part = bytes[start..end].to_vec();
            case.add_output(name, Tensor::new("", tensor.dtype(), tensor.shape().to_vec(), part)?);
            start = end;
        }
        Ok(case)
    }

    /// The output's name and index at a byte.
    fn place(&self, mut byte: usize) -> String {
        for (name, tensor) in &self.case.outputs {
            if byte >= tensor.bytes().len() {
                byte -= tensor.bytes().len();
                continue;
            }
            let mut element = byte / tensor.dtype().bytes();
            let mut index = vec![0; tensor.shape().len()];
            for (at, &size) in index.iter_mut().zip(tensor.shape()).rev() {
                (*at, element) = (element % size, element / size);
            }
            return format!("{name} at {index:?}");
        }
        "after the outputs".to_owned()
    }

    /// The same input with only the first row of x.
    fn first_row(&self) -> Option<Self> {
        let (config, rows) = self.case.config.with_one_row()?;
        let mut case = Case::new("", config, "");
        for (name, tensor) in &self.case.inputs {
            let mut tensor = tensor.clone();
            if rows.contains(&name.as_str()) {
                let row = tensor.index0(0).ok()?.into_owned();
                let shape = std::iter::once(1).chain(row.shape().iter().copied()).collect();
                tensor = Tensor::new("", row.dtype(), shape, row.bytes().to_vec()).ok()?;
            }
            case.add_input(name, tensor);
        }
        add_outputs(&mut case).ok()?;
        Some(Self { case })
    }

    /// Rows of `y`.
    pub(crate) fn tokens(&self) -> Option<usize> {
        self.case.outputs.get("y").map(|y| y.shape()[0])
    }
}

/// The first row's `y` is the same alone as in its batch.
fn row_alone<O: Operation<Input = CaseInput, Element = u8>>(
    subject: &dyn Subject<O>,
    input: &CaseInput,
) -> std::result::Result<(), Failure> {
    let (Some(alone), Some(tokens)) = (input.first_row(), input.tokens()) else { return Ok(()) };
    if tokens < 2 {
        return Ok(());
    }
    let all = call::<O>(subject, input, 0)?;
    let mut one = vec![0; CaseInput::bytes(&alone.case).len()];
    subject
        .call(&alone, &mut one)
        .map_err(|e| broken::<O>(&alone, format!("the subject failed: {e}")))?;
    // `y` is the last output.
    let len = alone.case.outputs.values().next_back().map_or(0, |y| y.bytes().len());
    let expected = &all[all.len() - len * tokens..][..len];
    compare::<O>(&alone, expected, &one[one.len() - len..], "a row depends on its batch")
}

macro_rules! subjects {
    (staged { $($_staged:tt)* } computed {
        $($(#[$doc:meta])* $name:ident $_file:tt $_module:ident::$_config:ident,)+
    }) => { $(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name;

        impl Operation for $name {
            const NAME: &'static str = Op::$name.name();
            type Input = CaseInput;
            type Element = u8;

            fn inputs() -> BoxedStrategy<CaseInput> {
                let configs = lattice(Op::$name).unwrap_or_default();
                let points = 0..configs.len();
                let made = move |(point, seed): (usize, u64)| {
                    let config = configs[point].clone();
                    // The reference accepts every configuration of a lattice, which a test
                    // verifies.
                    case_of(config, &mut Rng::new(seed)).ok().map(|case| CaseInput { case })
                };
                // The first points of a lattice are its smallest; seeds are not ordered by
                // simplicity.
                (points, any::<u64>().no_shrink())
                    .prop_filter_map("a case", made)
                    .boxed()
            }

            fn expected(input: &CaseInput) -> Result<Vec<u8>> {
                Ok(CaseInput::bytes(&input.case))
            }

            fn accepts(input: &CaseInput, found: &[u8]) -> bool {
                !input.case.config.fixes_every_bit()
                    && input
                        .with_outputs(found)
                        .and_then(|case| check_case(&case))
                        .is_ok_and(|report| report.verdict == Verdict::Pass)
            }

            fn place(input: &CaseInput, element: usize, _bit: u32) -> String {
                input.place(element)
            }

            fn describe(input: &CaseInput) -> String {
                serde_json::Value::Object(input.case.config.to_json()).to_string()
            }

            fn own_laws() -> Vec<Law<Self>> {
                vec![Law { name: "a row is the same alone as in a batch", check: row_alone }]
            }
        }
    )+ };
}

marlinspike::operations!(subjects);
