//! Properties beyond right values: the same bits in every run and in every batch.

use super::shrink::{row_inputs, with_rows};
use super::{Fault, Kernel, Outputs, Trial};

/// Properties that a kernel promises. A sum in another order is within every bound, so only these
/// reject it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Laws {
    /// Two runs on the same inputs give the same bits.
    pub deterministic: bool,
    /// The last row has the same bits alone as in its batch. Applies to operations with `size_m`.
    pub batch_invariant: bool,
}

impl Laws {
    /// The first broken law as a fault. `outputs` are those of the first run.
    pub(super) fn broken(
        self,
        kernel: &mut dyn Kernel,
        trial: &Trial,
        outputs: &Outputs,
    ) -> Option<Fault> {
        if self.deterministic {
            let fault = kernel.run(trial).map_or_else(Some, |again| differing(outputs, &again));
            if fault.is_some() {
                return fault;
            }
        }
        if self.batch_invariant { batch(kernel, trial, outputs) } else { None }
    }
}

/// The first output with different bytes.
fn differing(outputs: &Outputs, again: &Outputs) -> Option<Fault> {
    outputs.iter().find_map(|(name, tensor)| {
        let other = again.get(name).map_or(&[][..], |tensor| tensor.bytes());
        let first = first_difference(tensor.bytes(), other)?;
        Some(Fault::Nondeterministic { tensor: name.clone(), first })
    })
}

/// Compares the last row of each output with its bits in a batch of one.
fn batch(kernel: &mut dyn Kernel, trial: &Trial, outputs: &Outputs) -> Option<Fault> {
    let rows = trial.case.config.to_json().get("size_m").and_then(serde_json::Value::as_u64)?;
    let row = (rows as usize).checked_sub(1).filter(|row| *row > 0)?;
    let rows = row + 1;
    let alone = with_rows(trial, &row_inputs(&trial.case).ok()?, row, 1)?;
    let one = match kernel.run(&alone) {
        Ok(one) => one,
        Err(Fault::Unsupported { .. }) => return None,
        Err(fault) => return Some(fault),
    };
    outputs.iter().find_map(|(name, tensor)| {
        let (all, found) = (tensor.bytes(), one.get(name)?.bytes());
        // Outputs that do not follow the rows, such as packed weights, are left out.
        if tensor.shape().len() != 2 || found.len() * rows != all.len() {
            return None;
        }
        let first = first_difference(&all[row * found.len()..], found)?;
        Some(Fault::BatchDependent { tensor: name.clone(), row, rows, first })
    })
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    let same = a.iter().zip(b).position(|(a, b)| a != b);
    same.or((a.len() != b.len()).then_some(a.len().min(b.len())))
}
