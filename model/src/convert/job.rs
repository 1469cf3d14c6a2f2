//! One unit of work: a part of one expert's matrix, packed.

use std::ops::Range;

use marlinspike::Result;
use rayon::prelude::*;

use super::piece::{Constants, Piece};
use super::settings::Settings;
use super::stack::StackPlan;
use super::stack::part::Part;
use crate::load;
use crate::model::Model;

/// What a job packs.
#[derive(Debug, Clone, Copy)]
pub struct Job<'j> {
    /// The model.
    pub model: &'j Model<'j>,
    /// The stack.
    pub plan: &'j StackPlan,
    /// What all of the stack's jobs share.
    pub constants: Constants,
    /// What the conversion was asked for.
    pub settings: &'j Settings,
    /// The expert's number among the rank's.
    pub expert: usize,
    /// Rows and columns.
    pub part: &'j Part,
}

impl Job<'_> {
    /// Reads and packs the part.
    ///
    /// # Errors
    /// What the format or the layout refuses, naming the tensor.
    pub fn run(&self) -> Result<Vec<Piece>> {
        let Self { model, plan, settings, expert, part, .. } = *self;
        let (rows, columns) = match plan.padding {
            Some(_) => (plan.k.clone(), 0..plan.n.iter().map(Range::len).sum()),
            None => {
                let rows = plan.k.start + part.rows.start..plan.k.start + part.rows.end;
                (rows, part.columns.clone())
            }
        };
        let reading = plan.reading(settings.preparation);
        let weight = load::load(model, reading, &plan.experts[expert], &rows, &columns)?;
        settings.format.target().pack(self, weight)
    }
}

/// All of a stack's weight in memory, `[experts][expert_len]` bytes, packed on rayon's current pool.
///
/// # Errors
/// As [`Job::run`].
pub fn packed_stack(
    model: &Model<'_>,
    plan: &StackPlan,
    settings: &Settings,
    expert_len: usize,
) -> Result<Vec<u8>> {
    let mut bytes = vec![0u8; plan.experts.len() * expert_len];
    let parts = plan.parts(u64::MAX);
    let experts = bytes.par_chunks_exact_mut(expert_len).enumerate();
    experts.try_for_each(|(expert, bytes)| -> Result<()> {
        for part in &parts {
            let constants = Constants::default();
            let job = Job { model, plan, constants, settings, expert, part };
            for piece in job.run()? {
                let at = piece.offset as usize - expert * expert_len;
                bytes[at..][..piece.bytes.get().len()].copy_from_slice(piece.bytes.get());
            }
        }
        Ok(())
    })?;
    Ok(bytes)
}
