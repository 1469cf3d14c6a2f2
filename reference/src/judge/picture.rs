//! Positions of mismatches on a grid coarse enough to draw.

/// Counts of mismatches on a grid of cells that covers a rectangle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grid {
    /// Rows of the rectangle (k or group; rows of the packed buffer).
    pub rows: usize,
    /// Columns of the rectangle (n; elements of a packed row).
    pub cols: usize,
    /// Rows of cells.
    pub cell_rows: usize,
    /// Columns of cells.
    pub cell_cols: usize,
    /// Mismatches per cell, row-major.
    pub counts: Vec<u32>,
}

/// Largest number of cells in either direction.
const MAX_CELLS: usize = 128;

impl Grid {
    fn new(rows: usize, cols: usize) -> Self {
        let (cell_rows, cell_cols) = (rows.clamp(1, MAX_CELLS), cols.clamp(1, MAX_CELLS));
        Self { rows, cols, cell_rows, cell_cols, counts: vec![0; cell_rows * cell_cols] }
    }

    fn add(&mut self, row: usize, col: usize) {
        let r = row * self.cell_rows / self.rows.max(1);
        let c = col * self.cell_cols / self.cols.max(1);
        self.counts[r * self.cell_cols + c] += 1;
    }
}

/// The mismatches of one output in the (k, n) plane and in the packed buffer.
#[derive(Debug, Clone, PartialEq)]
pub struct Picture {
    /// What a row of the plane is: `k` or `group`.
    pub row_label: &'static str,
    /// What a column of the plane is: `n`, or `row` of activations.
    pub col_label: &'static str,
    /// The matrices with mismatches, up to [`Picture::MAX_PLANES`]: expert and its plane.
    pub planes: Vec<(usize, Grid)>,
    /// Matrices with mismatches that are not drawn.
    pub planes_left_out: usize,
    /// The packed buffer, all matrices below each other.
    pub buffer: Grid,
    /// The errors of a product.
    pub errors: Option<ErrorMap>,
}

impl Picture {
    /// Largest number of planes that are drawn.
    pub const MAX_PLANES: usize = 8;

    /// An empty picture of `experts` packed tensors of `packed` rows and columns.
    pub(crate) fn new(row_label: &'static str, experts: usize, packed: [usize; 2]) -> Self {
        let buffer = Grid::new(experts * packed[0], packed[1]);
        let col_label = "n";
        Self { row_label, col_label, planes: Vec::new(), planes_left_out: 0, buffer, errors: None }
    }

    /// Marks one mismatch: value (`row`, `col`) of a `shape` matrix, `element` of the buffer.
    pub(crate) fn add(
        &mut self,
        expert: usize,
        shape: [usize; 2],
        row: usize,
        col: usize,
        element: usize,
    ) {
        let cols = self.buffer.cols.max(1);
        self.buffer.add(element / cols, element % cols);
        if self.planes.last().is_none_or(|(e, _)| *e != expert) {
            if self.planes.len() == Self::MAX_PLANES {
                return;
            }
            self.planes.push((expert, Grid::new(shape[0], shape[1])));
        }
        if let Some((_, plane)) = self.planes.last_mut() {
            plane.add(row, col);
        }
    }
}

/// The errors of a product `[rows, size_n]`, each over its bound.
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorMap {
    /// Rows of the product.
    pub rows: usize,
    /// Columns of the product.
    pub cols: usize,
    /// Rows of cells.
    pub cell_rows: usize,
    /// Columns of cells.
    pub cell_cols: usize,
    /// Largest error over bound in each cell, row-major; infinite for NaN.
    pub largest: Vec<f64>,
    /// Name of the first product row in each row of cells (`token 3, slot 1, expert 7`).
    pub names: Vec<String>,
    /// The part of the sum that explains the errors.
    pub cause: Option<Cause>,
}

/// The rows k of a weight matrix that explain wrong sums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// Rows of the matrix.
    pub size_k: usize,
    /// Rows per group of scales.
    pub group_size: usize,
    /// Ranges of rows, as stored.
    pub ranges: Vec<std::ops::Range<usize>>,
}

impl ErrorMap {
    pub(crate) fn new([rows, cols]: [usize; 2], name: impl Fn(usize) -> String) -> Self {
        let (cell_rows, cell_cols) = (rows.clamp(1, MAX_CELLS), cols.clamp(1, MAX_CELLS));
        // The first row that falls into a cell.
        let first = |cell: usize| (cell * rows).div_ceil(cell_rows);
        Self {
            rows,
            cols,
            cell_rows,
            cell_cols,
            largest: vec![0.0; cell_rows * cell_cols],
            names: (0..cell_rows).map(|cell| name(first(cell))).collect(),
            cause: None,
        }
    }

    pub(crate) fn add(&mut self, row: usize, col: usize, ratio: f64) {
        let r = row * self.cell_rows / self.rows.max(1);
        let c = col * self.cell_cols / self.cols.max(1);
        let cell = &mut self.largest[r * self.cell_cols + c];
        *cell = cell.max(ratio);
    }
}

impl Cause {
    /// The rows for which `is_cause` holds.
    pub(crate) fn new(size_k: usize, group_size: usize, is_cause: impl Fn(usize) -> bool) -> Self {
        let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
        for k in (0..size_k).filter(|&k| is_cause(k)) {
            match ranges.last_mut() {
                Some(range) if range.end == k => range.end += 1,
                _ => ranges.push(k..k + 1),
            }
        }
        Self { size_k, group_size, ranges }
    }
}
