//! The Arm int4 path: 4-bit weights, and activations quantized to 8 bits per row at run time.
//!
//! This is what PyTorch's `_dyn_quant_matmul_4bit` runs on an Arm CPU (KleidiAI's micro-kernels),
//! and upstream's `CompressedTensorsW4A8Int8MoEMethod` on top of it. Every bit of the
//! result is defined, by f32 operations that round to nearest even, without flushing:
//!
//! 1. [`quantize()`] turns rows of activations into int8 codes, a zero point and a scale.
//! 2. [`packed`] interleaves codes and weights for the kernels.
//! 3. A [`Kernel`] multiplies a block of rows by a block of columns. Sums of code products are
//!    exact integers, so only the operations after them have an order:
//!    channel-wise `float(16·Σqw + (−z)·16·Σw) · (scale/16 · 1/s)`; group-wise `a = fma(Σqw, scale,
//!    a)` for ascending groups, `a = fma(Σ scale·Σw, −z, a)`, `a · 1/s`.
//! 4. [`multiply`] adds the bias (always, in a separate operation), clamps to the finite range (an
//!    infinity becomes the largest finite number; NaN stays) and rounds to the output's type.
//!
//! Weights may have zero points (`zero_points` adds what they change) and rows in another order
//! (act-order: columns of x are gathered before they are quantized). The operator has neither.
//!
//! A row's result depends only on that row and the weights, so batches may be split anywhere.
//!
//! | kernels | mr | nr |
//! | --- | --- | --- |
//! | dot product, one row | 1 | 8 (PyTorch's), 4 |
//! | channel-wise matrix multiply | 4 | 8 |
//! | group-wise matrix multiply, f32 | 4 | 8 (PyTorch's), 4 |
//! | group-wise matrix multiply, bf16 | 4 | 4 |
//!
//! The formulas reproduce KleidiAI's packed activations, packed weights and outputs bit for bit in
//! every golden case. Rows with NaN or infinities are in no case; their rules come from the source of
//! KleidiAI's packing routine.

mod buffer;
pub mod e2m1;
pub mod experts;
mod gather;
pub mod int8;
pub mod limits;
mod linear;
pub mod linears;
mod matrices;
pub mod moe;
pub mod neon;
mod panel;
mod parallel;
pub mod portable;
pub mod quantize;
mod router;
mod rows;
mod runs;
pub mod scalar;
pub mod stored;
mod values;
pub mod wide;
#[cfg(target_arch = "x86_64")]
pub mod x86;
mod zero_points;

pub use linear::{Linear, LinearOf, LinearWorkspace};
pub use panel::{Line, MAX_ROWS, Panel, PanelRows};
pub use quantize::quantize;
pub use router::{FamilyRouting, LayerRouter};
pub use values::Values;

use std::fmt::Debug;

/// The layout that the kernels multiply from.
pub use crate::layouts::cpu_int4 as packed;
use crate::num::scalar::ScalarType;
use crate::{Error, Result};
use packed::{LhsLayout, MR, NR, PackedLhs, PackedRhs, RhsLayout};

/// Results of a panel times a block of columns, before bias and clamp: `[rows][nr]` in the upper left
/// corner.
pub type Tile = [[f32; MAX_NR]; MAX_ROWS];
/// Largest number of columns of a block.
pub const MAX_NR: usize = NR[1];

/// A panel of activations and one block of packed weights, of the same K and groups.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    /// The rows.
    pub panel: Panel<'a>,
    /// How `rhs` is packed.
    pub rhs_layout: RhsLayout,
    /// [`RhsLayout::block_bytes`] bytes.
    pub rhs: &'a [u8],
}

impl Blocks<'_> {
    /// −zero point and 1 / scale of row `m` of the panel.
    pub fn row_factors(&self, m: usize) -> (i32, f32) {
        (self.panel.negated_zero_points()[m], self.panel.reciprocals()[m])
    }

    /// Word `i` (of 4 bytes) after the codes and group scales of the weight block.
    pub fn tail_word(&self, i: usize) -> u32 {
        let at = self.rhs_layout.groups() * self.rhs_layout.group_bytes() + 4 * i;
        u32::from_le_bytes([self.rhs[at], self.rhs[at + 1], self.rhs[at + 2], self.rhs[at + 3]])
    }

    /// Codes of group `g` of the weight block, `[padded group / 32][2][nr][8]`.
    pub fn codes(&self, g: usize) -> &[u8] {
        let len = self.rhs_layout.nr() * self.rhs_layout.padded_group() / 2;
        &self.rhs[g * self.rhs_layout.group_bytes()..][..len]
    }

    /// Activation codes of group `g`, `[padded group / 8][rows][8]`.
    pub fn activations(&self, g: usize) -> &[u8] {
        let len = self.panel.rows() * self.rhs_layout.padded_group();
        &self.panel.codes()[g * len..][..len]
    }

    /// −8·Σq of group `g` for each row.
    pub fn starts(&self, g: usize) -> &[i32] {
        &self.panel.starts()[g * self.panel.rows()..][..self.panel.rows()]
    }

    /// The bf16 scale of group `g` and column `n` of a group-wise block, as f32.
    pub fn group_scale(&self, g: usize, n: usize) -> f32 {
        let at = (g + 1) * self.rhs_layout.group_bytes() - 2 * (self.rhs_layout.nr() - n);
        crate::num::scalar::bf16_to_f32(u16::from_le_bytes([self.rhs[at], self.rhs[at + 1]]))
    }
}

/// A kernel that multiplies panels by blocks. All kernels produce the same bits.
pub trait Kernel: Debug + Send + Sync {
    /// The kernel, if this CPU supports it. A value of the type proves the support.
    fn new() -> Option<Self>
    where
        Self: Sized;

    /// A name for reports.
    fn name(&self) -> &'static str;

    /// Fills the upper left `[rows][nr]` of `tile`.
    fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile);

    /// The finished results (bias and clamp included, f32) of a panel times a run of blocks:
    /// row `m`, column `n` of the run to `y[m * stride + n]`, for columns below `columns`. The rest of
    /// `y` is unchanged. `rhs` holds whole blocks; `columns` ends within the last one.
    ///
    /// Panics if a slice is too short.
    fn run(&self, panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
        self.run_by_tiles(panel, rhs, y, stride);
    }

    /// [`Kernel::run`] of two panels: the second one's rows follow the first one's in `y`. Kernels
    /// may decode the weights once for both.
    fn run_pair(&self, panels: [Panel<'_>; 2], rhs: Run<'_>, y: &mut [f32], stride: usize) {
        self.run_one_by_one(panels, rhs, y, stride);
    }

    /// The largest number of panels that [`Kernel::run_all`] takes.
    fn panels(&self) -> usize {
        PANELS
    }

    /// Whether [`Kernel::run_all`] reads [`Panel::lines`].
    fn reads_lines(&self) -> bool {
        false
    }

    /// [`Kernel::run`] of up to [`Kernel::panels`] panels; the rows of each follow those of the
    /// previous one in `y`.
    fn run_all(&self, panels: &[Panel<'_>], rhs: Run<'_>, y: &mut [f32], stride: usize) {
        let mut row = 0;
        for pair in panels.chunks(2) {
            let y = &mut y[row * stride..];
            row += pair.iter().map(Panel::rows).sum::<usize>();
            match *pair {
                [first, second] => self.run_pair([first, second], rhs, y, stride),
                _ => self.run(pair[0], rhs, y, stride),
            }
        }
    }

    /// [`Kernel::run_pair`], one [`Kernel::run`] after the other.
    fn run_one_by_one(&self, panels: [Panel<'_>; 2], rhs: Run<'_>, y: &mut [f32], stride: usize) {
        let (first, second) = y.split_at_mut(panels[0].rows() * stride);
        self.run(panels[0], rhs, first, stride);
        self.run(panels[1], rhs, second, stride);
    }

    /// [`Kernel::run`], one [`Kernel::tile`] after the other.
    fn run_by_tiles(&self, panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
        let (nr, mut tile) = (rhs.layout.nr(), Tile::default());
        for (b, block) in rhs.bytes.chunks_exact(rhs.layout.block_bytes()).enumerate() {
            let blocks = Blocks { panel, rhs_layout: rhs.layout, rhs: block };
            self.tile(blocks, &mut tile);
            let bias_at = if rhs.layout.is_channel_wise() { 2 } else { 1 } * nr;
            let columns = nr.min(rhs.columns - b * nr);
            for (m, sums) in tile.iter().enumerate().take(panel.rows()) {
                let out = &mut y[m * stride + b * nr..][..columns];
                for (n, (y, &sum)) in out.iter_mut().zip(sums).enumerate() {
                    *y = finish(sum, f32::from_bits(blocks.tail_word(bias_at + n)));
                }
            }
        }
    }
}

/// Whole blocks of packed weights, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// How they are packed.
    pub layout: RhsLayout,
    /// A whole number of [`RhsLayout::block_bytes`].
    pub bytes: &'a [u8],
    /// Columns to compute: all but those past N in the matrix's last block.
    pub columns: usize,
}

impl<'a> Run<'a> {
    /// The blocks that cover columns `from` to `to` of a whole packed matrix, and the number of
    /// columns before `from` in the first one. Panics if the range is outside the matrix.
    pub fn covering(layout: RhsLayout, matrix: &'a [u8], from: usize, to: usize) -> (Self, usize) {
        let (nr, len) = (layout.nr(), layout.block_bytes());
        let first = from / nr;
        let bytes = &matrix[first * len..to.div_ceil(nr) * len];
        (Self { layout, bytes, columns: to - first * nr }, from - first * nr)
    }
}

/// Panels that most kernels process at once, where results are buffered anyway.
pub(crate) const PANELS: usize = if cfg!(target_arch = "aarch64") { 2 } else { 1 };
/// The largest number of panels that any kernel processes at once.
pub(crate) const MAX_PANELS: usize = if cfg!(target_arch = "x86_64") { 16 } else { PANELS };

/// What runs the experts of each format.
static ENGINES: [moe::Engine; 3] = [moe::ENGINE, e2m1::ENGINE, int8::ENGINE];
/// What runs the linear layers of each format that has them.
static LINEARS: [linears::LinearEngine; 2] = [linears::INT4, int8::LINEAR];

/// Every kernel that this CPU supports, slowest first.
pub fn kernels() -> Vec<Box<dyn Kernel>> {
    let mut all: Vec<Box<dyn Kernel>> = vec![Box::new(scalar::Scalar)];
    all.extend(portable::Portable::new().map(|k| Box::new(k) as Box<dyn Kernel>));
    #[cfg(target_arch = "x86_64")]
    all.extend(x86::kernels());
    all.extend(neon::kernels());
    all
}

/// The fastest kernel that this CPU supports.
pub fn fastest() -> Box<dyn Kernel> {
    kernels().pop().unwrap_or_else(|| Box::new(scalar::Scalar))
}

/// `y` `[M, N]` of type `ty`, FLOAT32 or BFLOAT16.
///
/// # Errors
/// [`Error::Shape`] if the two sides were packed for different K; [`Error::Unsupported`] for other
/// types.
pub fn multiply(
    kernel: &dyn Kernel,
    lhs: &PackedLhs<'_>,
    rhs: &PackedRhs<'_>,
    ty: ScalarType,
) -> Result<Values> {
    let (lhs_layout, rhs_layout) = (lhs.layout(), rhs.layout());
    if lhs_layout.size_k() != rhs_layout.shape().size_k {
        let found = [lhs_layout.size_m(), lhs_layout.size_k()];
        let expected = format!("[M, {}], K of the packed weights", rhs_layout.shape().size_k);
        return Err(Error::shape("lhs_packed", &found, expected));
    }
    let (size_m, size_n) = (lhs_layout.size_m(), rhs_layout.shape().size_n);
    let mut y = vec![0.0f32; size_m * size_n];
    let run = Run { layout: rhs_layout, bytes: rhs.parts().blocks, columns: size_n };
    for (block, y) in y.chunks_mut(lhs_layout.mr() * size_n).enumerate() {
        let rows = PanelRows::from_block(lhs, block, y.len() / size_n, rhs_layout);
        kernel.run(rows.panel(), run, y, size_n);
        if rhs_layout.tables().zero_points {
            zero_points::define(rows.panel(), rhs, y);
        }
    }
    Values::from_f32(y, ty)
}

/// Adds the bias; then infinities become the largest finite number.
pub(crate) fn finish(sum: f32, bias: f32) -> f32 {
    // `clamp` keeps NaN.
    (sum + bias).clamp(f32::MIN, f32::MAX)
}

/// Quantizes, packs and multiplies: `x` `[M, K]` by packed weights, to `x`'s type. Where rows of the
/// weight are ordered, the columns of x are ordered in the same way before they are quantized.
///
/// # Errors
/// As [`quantize()`] and [`multiply`].
pub fn linear(
    kernel: &dyn Kernel,
    x: &Values,
    rhs: &PackedRhs<'_>,
    rounding: quantize::ActivationRounding,
) -> Result<Values> {
    let size_k = rhs.layout().shape().size_k;
    let ordered = match rhs.layout().tables().act_order {
        true if x.len().is_multiple_of(size_k) => &x.ordered(size_k, rhs.parts()),
        _ => x,
    };
    let rows = quantize(ordered, size_k, rounding)?;
    // Upstream's choice between its one-row and its matrix kernels; the bits are the same.
    let mr = if rows.size_m == 1 { MR[0] } else { MR[1] };
    let lhs = LhsLayout::new(rows.size_m, rows.size_k, mr)?.pack(&rows)?;
    multiply(kernel, &lhs, rhs, x.ty())
}
