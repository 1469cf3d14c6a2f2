//! Rows of the stages of a block's experts.

use marlinspike::moe::block::Near;

/// A value for each stage of the experts: rows of all slots, or of one.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct ExpertRows<T> {
    /// `[M · top_k, N of w13]`; zeros beyond an expert's own columns, and for a zero expert.
    pub(super) gate_up: Vec<T>,
    /// `[M · top_k, I]`, likewise.
    pub(super) activated: Vec<T>,
    /// `[M · top_k, H]`.
    pub(super) down: Vec<T>,
    /// `down` after the stages that follow each expert; the input of a zero expert.
    pub(super) output: Vec<T>,
}

/// Numbers that are taken as they are.
pub(super) fn points(values: &[f32]) -> Vec<Near> {
    values.iter().map(|&v| Near::point(v.into())).collect()
}
