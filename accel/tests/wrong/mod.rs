//! A backend that runs the reference, with one faulty operation.

use std::any::Any;

use marlinspike::moe::router::Routing;
use marlinspike_accel::{
    AccelError,
    backend::{Operations, Reference},
    call::Call,
    ops::align::Blocks,
};

/// How an operation behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Correctly.
    None,
    /// The lowest bit of its last output is flipped.
    LastBit,
    /// It has no kernel for its arguments.
    Refusal,
    /// The device fails.
    Failure,
}

/// The reference, except for `operation`.
pub(crate) struct Faulty {
    pub(crate) operation: &'static str,
    pub(crate) fault: Fault,
}

/// Flips the lowest bit of the last element; adds a quarter to router weights.
fn flip_last(made: &mut dyn Any) {
    if let Some(value) = made.downcast_mut::<Vec<u32>>().and_then(|values| values.last_mut()) {
        *value ^= 1;
    } else if let Some(value) = made.downcast_mut::<Vec<u16>>().and_then(|all| all.last_mut()) {
        *value ^= 1;
    } else if let Some(routing) = made.downcast_mut::<Routing>() {
        *routing.topk_weights.last_mut().unwrap() += 0.25;
    } else if let Some(blocks) = made.downcast_mut::<Blocks>() {
        *blocks.sorted_token_ids.last_mut().unwrap() ^= 1;
    } else {
        panic!("nothing to flip");
    }
}

impl Operations for Faulty {
    fn run<C: Call>(&self, call: &C) -> Result<C::Output, AccelError> {
        let mut made = Reference.run(call)?;
        if call.row().name == self.operation {
            match self.fault {
                Fault::None => {}
                Fault::LastBit => flip_last(&mut made),
                Fault::Refusal => {
                    return Err(AccelError::Argument {
                        operation: self.operation,
                        what: "weight",
                        found: "this".into(),
                        expected: "another".into(),
                    });
                }
                Fault::Failure => {
                    let call = self.operation;
                    return Err(AccelError::Driver { call, reason: "broken".into() });
                }
            }
        }
        Ok(made)
    }
}
