//! Memory for the panels of a batch.

use rayon::iter::IndexedParallelIterator;

use super::parallel::Split;
use super::quantize::{Extremes, GROUP, RowScale, Symmetric, group_codes};
use super::wide::Loop;
use super::{Kernel, Line, Panel};
use crate::w4a8::packed::{CHUNK, PIECE, RhsLayout, padded_k};
use crate::w4a8::quantize::ActivationRounding;

/// Rows of quantized activations, panel after panel: a panel of rows `first` to `first + count`
/// starts where `first` rows end. The buffer grows and is reused.
#[derive(Debug, Clone, Default)]
pub(super) struct PanelBuffer {
    codes: Vec<u8>,
    negated_zero_points: Vec<i32>,
    reciprocals: Vec<f32>,
    starts: Vec<i32>,
    scales: Vec<f32>,
    lines: Vec<Line>,
}

/// Lines that a work item writes at least, where they are allocated.
const LINES_OF_ITEM: usize = 4096;

/// How rows become codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowCodes {
    /// A scale and a zero point for each row, for int4 weights.
    PerRow(ActivationRounding),
    /// A scale for each [`GROUP`] of k, for weights with as many scales.
    PerGroup {
        /// What kernels add to each weight so that it is not negative.
        offset: i32,
    },
    /// A scale for each row, for int8 weights.
    Symmetric {
        /// Which operator's rule.
        rounding: ActivationRounding,
        /// Whether kernels take q + 128.
        unsigned: bool,
    },
}

impl RowCodes {
    /// What kernels add to each weight so that it is not negative.
    fn offset(self) -> i32 {
        match self {
            Self::PerRow(_) => 8,
            Self::PerGroup { offset } => offset,
            Self::Symmetric { .. } => 0,
        }
    }

    /// What the bytes of panels differ from the codes in.
    fn flip(self) -> u64 {
        match self {
            Self::Symmetric { unsigned: true, .. } => 0x8080_8080_8080_8080,
            _ => 0,
        }
    }

    /// Scales per row and group that are stored.
    fn scales(self) -> usize {
        match self {
            Self::PerRow(_) | Self::Symmetric { .. } => 0,
            Self::PerGroup { .. } => 1,
        }
    }
}

/// Storage of rows for the weights of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowShape {
    /// Kp.
    pub(super) padded_k: usize,
    /// Groups of k that share a scale.
    pub(super) groups: usize,
    /// k of a group, padded.
    pub(super) group: usize,
    /// How rows become codes.
    pub(super) codes: RowCodes,
    /// Lines of each row: codes that are stored by rows, too.
    pub(super) lines: usize,
}

impl RowShape {
    /// For int4 weights.
    pub(super) fn of(layout: RhsLayout, rounding: ActivationRounding) -> Self {
        Self {
            padded_k: padded_k(layout.shape().size_k),
            groups: layout.groups(),
            group: layout.padded_group(),
            codes: RowCodes::PerRow(rounding),
            lines: 0,
        }
    }

    /// With codes by rows if `kernel` reads them.
    pub(super) fn for_kernel(self, kernel: &dyn Kernel) -> Self {
        let lines = if kernel.reads_lines() { Line::per_row(self.padded_k) } else { 0 };
        Self { lines, ..self }
    }

    /// For weights with `groups` scales in each column, to which kernels add `offset`.
    pub(super) fn of_groups(groups: usize, offset: i32) -> Self {
        let codes = RowCodes::PerGroup { offset };
        Self { padded_k: groups * GROUP, groups, group: GROUP, codes, lines: 0 }
    }

    /// For int8 weights of `padded_k` codes in each column; codes by rows, too, if `lines`.
    pub(super) fn of_tokens(
        padded_k: usize,
        rounding: ActivationRounding,
        [unsigned, lines]: [bool; 2],
    ) -> Self {
        let codes = RowCodes::Symmetric { rounding, unsigned };
        let lines = if lines { Line::per_row(padded_k) } else { 0 };
        Self { padded_k, groups: 1, group: padded_k, codes, lines }
    }

    /// Scales of a row's groups that are stored.
    fn scales(self) -> usize {
        self.groups * self.codes.scales()
    }
}

/// `count` rows from `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Span {
    pub(super) first: usize,
    pub(super) count: usize,
}

impl PanelBuffer {
    /// Makes room for `rows` rows.
    pub(super) fn reserve(&mut self, rows: usize, shape: RowShape) {
        grow(&mut self.codes, rows * shape.padded_k);
        grow(&mut self.negated_zero_points, rows);
        grow(&mut self.reciprocals, rows);
        grow(&mut self.starts, rows * shape.groups);
        grow(&mut self.scales, rows * shape.scales());
        let lines = rows * shape.lines;
        if self.lines.len() < lines {
            // For an aligned type `vec!` does not get zeroed memory from the system: it would write the zeros on one thread.
            let zeros = rayon::iter::repeat_n(Line::default(), lines).with_min_len(LINES_OF_ITEM);
            zeros.collect_into_vec(&mut self.lines);
        }
    }

    /// The panel of `span`.
    pub(super) fn panel(&self, span: Span, shape: RowShape) -> Panel<'_> {
        let Span { first, count } = span;
        let panel = Panel::new(
            &self.codes[first * shape.padded_k..][..count * shape.padded_k],
            &self.negated_zero_points[first..][..count],
            &self.reciprocals[first..][..count],
            &self.starts[first * shape.groups..][..count * shape.groups],
        )
        .with_scales(&self.scales[first * shape.scales()..][..count * shape.scales()]);
        match shape.lines {
            0 => panel,
            lines => panel.with_lines(&self.lines[first * lines..][..count * lines]),
        }
    }

    /// The first `rows` rows, for writing.
    pub(super) fn rows_mut(&mut self, rows: usize, shape: RowShape) -> PanelsMut<'_> {
        PanelsMut {
            shape,
            codes: &mut self.codes[..rows * shape.padded_k],
            negated_zero_points: &mut self.negated_zero_points[..rows],
            reciprocals: &mut self.reciprocals[..rows],
            starts: &mut self.starts[..rows * shape.groups],
            scales: &mut self.scales[..rows * shape.scales()],
            lines: &mut self.lines[..rows * shape.lines],
        }
    }
}

/// Consecutive panels, or one of them.
pub(super) struct PanelsMut<'a> {
    shape: RowShape,
    codes: &'a mut [u8],
    negated_zero_points: &'a mut [i32],
    reciprocals: &'a mut [f32],
    starts: &'a mut [i32],
    scales: &'a mut [f32],
    lines: &'a mut [Line],
}

impl Split for PanelsMut<'_> {
    fn split(self, at: usize) -> (Self, Self) {
        let shape = self.shape;
        let (codes, rest_codes) = self.codes.split_at_mut(at * shape.padded_k);
        let (zeros, rest_zeros) = self.negated_zero_points.split_at_mut(at);
        let (reciprocals, rest_reciprocals) = self.reciprocals.split_at_mut(at);
        let (starts, rest_starts) = self.starts.split_at_mut(at * shape.groups);
        let (scales, rest_scales) = self.scales.split_at_mut(at * shape.scales());
        let (lines, rest_lines) = self.lines.split_at_mut(at * shape.lines);
        let rest = PanelsMut {
            shape,
            codes: rest_codes,
            negated_zero_points: rest_zeros,
            reciprocals: rest_reciprocals,
            starts: rest_starts,
            scales: rest_scales,
            lines: rest_lines,
        };
        (
            PanelsMut {
                shape,
                codes,
                negated_zero_points: zeros,
                reciprocals,
                starts,
                scales,
                lines,
            },
            rest,
        )
    }
}

/// One panel, whose rows fill its memory.
impl PanelsMut<'_> {
    /// Prepares row `m` of the panel for its codes.
    #[inline(always)]
    fn begin(&mut self, m: usize, negated_zero_point: i32, reciprocal: f32) {
        self.negated_zero_points[m] = negated_zero_point;
        self.reciprocals[m] = reciprocal;
        let rows = self.reciprocals.len();
        self.starts.iter_mut().skip(m).step_by(rows).for_each(|start| *start = 0);
    }

    /// Stores chunks of row `m` from chunk `first` on.
    #[inline(always)]
    fn put(&mut self, m: usize, first: usize, codes: &[u8]) {
        let (rows, flip) = (self.reciprocals.len(), self.shape.codes.flip());
        for (chunk, codes) in (first..).zip(codes.chunks_exact(CHUNK)) {
            let to = &mut self.codes[chunk * CHUNK * rows..][..CHUNK * rows];
            let mut sum = 0;
            for (to, piece) in to.chunks_exact_mut(PIECE * rows).zip(codes.chunks_exact(PIECE)) {
                let bits = word(piece);
                to[m * PIECE..][..PIECE].copy_from_slice(&(bits ^ flip).to_le_bytes());
                sum += biased_sums(bits);
            }
            let start = &mut self.starts[chunk * CHUNK / self.shape.group * rows + m];
            let sum = total(sum) - 128 * CHUNK as i32;
            *start = start.wrapping_sub(self.shape.codes.offset() * sum);
            if self.shape.lines > 0 {
                Line::put(&mut self.lines[m * self.shape.lines..], chunk, codes);
            }
        }
    }

    /// Stores the codes of row `m` in groups of [`GROUP`] k, each with its scale.
    #[inline(always)]
    fn put_groups<'t, T: Copy + 't>(
        &mut self,
        m: usize,
        segments: impl Iterator<Item = &'t [T]>,
        value: impl Fn(T) -> f32 + Copy,
    ) {
        let rows = self.reciprocals.len();
        // Factors of rows are not used.
        (self.negated_zero_points[m], self.reciprocals[m]) = (0, 1.0);
        let mut at = 0;
        for segment in segments {
            for activations in segment.chunks_exact(GROUP) {
                let mut codes = [0; GROUP];
                self.scales[at * rows + m] = group_codes(activations, value, &mut codes);
                self.starts[at * rows + m] = 0;
                self.put(m, at, &codes);
                at += 1;
            }
        }
    }

    /// Copies row `m` from a panel of that row alone.
    pub(super) fn copy(&mut self, m: usize, row: Panel<'_>) {
        let rows = self.reciprocals.len();
        self.negated_zero_points[m] = row.negated_zero_points()[0];
        self.reciprocals[m] = row.reciprocals()[0];
        for (to, &start) in self.starts[m..].iter_mut().step_by(rows).zip(row.starts()) {
            *to = start;
        }
        for (to, &scale) in self.scales.iter_mut().skip(m).step_by(rows).zip(row.scales()) {
            *to = scale;
        }
        let lines = self.shape.lines;
        self.lines[m * lines..][..lines].copy_from_slice(row.lines());
        let pieces = self.codes.chunks_exact_mut(rows * PIECE).zip(row.codes().chunks_exact(PIECE));
        for (to, piece) in pieces {
            to[m * PIECE..][..PIECE].copy_from_slice(piece);
        }
    }
}

/// The bytes of a piece as an integer.
#[inline(always)]
fn word(piece: &[u8]) -> u64 {
    let mut bytes = [0; PIECE];
    bytes.copy_from_slice(piece);
    u64::from_le_bytes(bytes)
}

/// Sums of pairs of eight codes, each with 128 added, in 16 bits. The sums of a chunk's pieces can be
/// added without overflow.
#[inline(always)]
fn biased_sums(piece: u64) -> u64 {
    const LOW: u64 = 0x00ff_00ff_00ff_00ff;
    let biased = piece ^ 0x8080_8080_8080_8080;
    (biased & LOW) + (biased >> 8 & LOW)
}

/// The sum of four 16-bit fields, below 2^16.
#[inline(always)]
fn total(sums: u64) -> i32 {
    (sums.wrapping_mul(0x0001_0001_0001_0001) >> 48) as i32
}

/// Codes computed before they are stored: as many as stay in the L1 cache.
const STRETCH: usize = 16 * CHUNK;

/// Quantizes a row of a panel.
pub(super) struct Quantize<'p, 'a, S, V> {
    /// One panel.
    pub(super) panel: &'p mut PanelsMut<'a>,
    /// The row's index in the panel.
    pub(super) m: usize,
    /// The row as slices of multiples of [`CHUNK`] elements, except the last one.
    pub(super) segments: S,
    /// An element's activation.
    pub(super) value: V,
}

impl<'t, T: Copy + 't, S: Iterator<Item = &'t [T]> + Clone, V: Fn(T) -> f32 + Copy> Loop
    for Quantize<'_, '_, S, V>
{
    #[inline(always)]
    fn run(self) {
        let rounding = match self.panel.shape.codes {
            RowCodes::PerRow(rounding) => rounding,
            RowCodes::PerGroup { .. } => {
                return self.panel.put_groups(self.m, self.segments, self.value);
            }
            RowCodes::Symmetric { rounding, .. } => return self.put_token(rounding),
        };
        let mut extremes = Extremes::new();
        for segment in self.segments.clone() {
            extremes.add(segment, self.value);
        }
        let row = extremes.scaled(rounding);
        self.panel.begin(self.m, row.negated_zero_point(), row.reciprocal());
        self.put_codes(&row);
    }
}

impl<'t, T: Copy + 't, S: Iterator<Item = &'t [T]> + Clone, V: Fn(T) -> f32 + Copy>
    Quantize<'_, '_, S, V>
{
    /// Stores the codes that `row` makes of stretches of the row.
    #[inline(always)]
    fn put_codes(self, row: &impl RowScale) {
        let (mut at, mut codes) = (0, [0; STRETCH]);
        for segment in self.segments {
            for activations in segment.chunks(STRETCH) {
                let codes = &mut codes[..activations.len().next_multiple_of(CHUNK)];
                row.codes(activations, self.value, codes);
                self.panel.put(self.m, at, codes);
                at += codes.len() / CHUNK;
            }
        }
    }

    /// Stores the row with one scale. Chunks past its end keep what they held: weights there are zeros.
    #[inline(always)]
    fn put_token(self, rounding: ActivationRounding) {
        let segments = self.segments.clone();
        let row = Symmetric::of(segments, self.value, rounding);
        self.panel.begin(self.m, 0, row.scale());
        self.put_codes(&row);
    }
}

/// Makes `values` at least `len` long, and never shorter. A longer vector is allocated anew, as zeros of the system: the
/// threads that write it first share the work of mapping its pages.
pub(super) fn grow<T: Clone + Default>(values: &mut Vec<T>, len: usize) {
    if values.len() < len {
        *values = Vec::new();
        *values = vec![T::default(); len];
    }
}
