//! A job: packs a part of one expert's matrix.

use std::ops::Range;

use marlinspike::Result;
use rayon::prelude::*;

use super::piece::{Constants, Piece};
use super::settings::Settings;
use super::stack::StackPlan;
use super::stack::part::MatrixPart;
use crate::load;
use crate::model::Model;

/// What a job packs.
#[derive(Debug, Clone, Copy)]
pub struct Job<'j> {
    /// The model.
    pub model: &'j Model<'j>,
    /// The stack.
    pub plan: &'j StackPlan,
    /// Values that all jobs of the stack share.
    pub constants: Constants,
    /// The settings of the conversion.
    pub settings: &'j Settings,
    /// The expert's index on this rank.
    pub expert: usize,
    /// Rows and columns.
    pub part: &'j MatrixPart,
}

impl Job<'_> {
    /// Reads and packs the part.
    ///
    /// # Errors
    /// What the format or the layout refuses, naming the tensor.
    pub fn run(&self) -> Result<Vec<Piece>> {
        let Self { model, plan, settings, expert, part, .. } = *self;
        let (rows, columns) = match plan.slice.padding {
            Some(_) => (plan.slice.k.clone(), 0..plan.slice.n.iter().map(Range::len).sum()),
            None => {
                let rows = plan.slice.k.start + part.rows.start..plan.slice.k.start + part.rows.end;
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
