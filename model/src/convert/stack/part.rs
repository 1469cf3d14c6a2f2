//! How the matrices of a stack are cut into jobs, and the memory of each.

use std::ops::Range;

use marlinspike::config::Scheme;
use marlinspike::formats::integers::Packing;
use marlinspike::num::dims::GroupSize;

use super::StackPlan;
use crate::model::bind;

/// Bytes of packed weight of one job, or somewhat more: they stay in the L2 cache until they are
/// written.
const JOB_BYTES: usize = 512 << 10;

/// Rows of a job where the file holds K in its last dimension: a run of them in memory is then
/// long enough for the machine to read ahead.
const COLUMN_MAJOR_ROWS: usize = 1024;

/// A job's rows are a multiple of this: whole tiles, and Marlin's smallest K.
const ROW_UNIT: usize = 128;

/// A job's columns are a multiple of this: whole tiles, and whole runs of permuted scales.
const COLUMN_UNIT: usize = marlinspike::layouts::marlin::MIN_THREAD_N;

/// Columns of a job that takes all rows, if memory allows: it writes its rows of tiles one by one.
const COLUMNS: usize = 256;

/// How each expert's matrix is cut into jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Jobs {
    /// A job is a whole expert.
    Experts,
    /// By columns; a job has all rows.
    Columns {
        /// A job's columns are a multiple of this.
        unit: usize,
        /// Fewest columns of a job, if memory allows.
        wanted: usize,
    },
    /// By rows; a job has all columns. Under act-order, which may gather a row from anywhere, by
    /// columns.
    Rows,
}

/// Rows and columns, of the rank's matrix, that one job packs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatrixPart {
    /// Rows; all of them under act-order, which may gather a row from anywhere, and on the int4
    /// path.
    pub rows: Range<usize>,
    /// Columns; all of them except in these two cases.
    pub columns: Range<usize>,
}

impl StackPlan {
    /// The parts of each expert's matrix. A job on one takes at most `memory` bytes
    /// ([`Self::part_bytes`]), or the part has the smallest size.
    pub fn parts(&self, memory: u64) -> Vec<MatrixPart> {
        let (size_k, size_n) = (self.slice.shape.size_k, self.slice.shape.size_n);
        let bytes = |part: &MatrixPart| self.part_bytes(part);
        // The largest multiple of the unit that is wanted and fits.
        let step = |unit: usize, wanted: usize, size: usize, part: &dyn Fn(usize) -> MatrixPart| {
            let mut step = (wanted / unit * unit).max(unit).min(size);
            while step > unit && bytes(&part(step)) > memory {
                step = (step / 2 / unit * unit).max(unit);
            }
            step
        };
        let per_code = |codes: usize| JOB_BYTES * 8 / self.code_bits() as usize / codes.max(1);
        let cut = |size: usize, step: usize| {
            (0..size).step_by(step.max(1)).map(move |at| at..(at + step).min(size))
        };
        let by_columns = match self.jobs {
            Jobs::Experts => return vec![MatrixPart { rows: 0..size_k, columns: 0..size_n }],
            Jobs::Columns { unit, wanted } => Some((unit, wanted)),
            Jobs::Rows => self.groups.act_order.then_some((COLUMN_UNIT, COLUMNS)),
        };
        if let Some((unit, wanted)) = by_columns {
            let part = |columns| MatrixPart { rows: 0..size_k, columns: 0..columns };
            let columns = step(unit, per_code(size_k).max(wanted), size_n, &part);
            let part = |columns| MatrixPart { rows: 0..size_k, columns };
            return cut(size_n, columns).map(part).collect();
        }
        let unit = match self.groups.size {
            GroupSize::Channel => ROW_UNIT,
            GroupSize::Of(g) => lcm(g, ROW_UNIT),
        };
        let column_major = bind::bindings(&self.scheme)
            .first()
            .is_some_and(|weight| weight.k.is_some_and(|k| k.dim == 1));
        let wanted = match column_major {
            true => per_code(size_n).max(COLUMN_MAJOR_ROWS),
            false => per_code(size_n),
        };
        let part = |rows| MatrixPart { rows: 0..rows, columns: 0..size_n };
        let rows = step(unit, wanted, size_k, &part);
        let part = |rows| MatrixPart { rows, columns: 0..size_n };
        cut(size_k, rows).map(part).collect()
    }

    /// Bytes of packed weight that `part` makes.
    pub fn packed_bytes(&self, part: &MatrixPart) -> u64 {
        let codes = part.rows.len() as u64 * part.columns.len() as u64;
        codes * u64::from(self.code_bits()) / 8
    }

    /// The most memory that the job of `part` may take, in bytes: the packed codes, their forms on the
    /// way there, scales in several forms, and the order of the rows.
    pub fn part_bytes(&self, part: &MatrixPart) -> u64 {
        // The slice of the file, the codes of the hub, their rewriting for the kernel, the result;
        // a file of one byte for each 4-bit code makes two more.
        let forms = match &self.scheme {
            Scheme::Wna16(w) if matches!(w.checkpoint_format.packing, Packing::Bytes) => 6,
            _ => 4,
        };
        let (rows, columns) = (part.rows.len() as u64, part.columns.len() as u64);
        let groups = match self.groups.act_order {
            true => self.groups.count as u64,
            false => self.groups.count as u64 * rows / self.slice.shape.size_k.max(1) as u64 + 1,
        };
        let order = if self.groups.act_order { 32 * rows } else { 0 };
        forms * self.packed_bytes(part) + 24 * groups * columns + order
    }

    /// Whether `part` is large enough for several threads.
    pub fn is_large(&self, part: &MatrixPart) -> bool {
        self.packed_bytes(part) >= 4 * JOB_BYTES as u64
    }
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b)
}
