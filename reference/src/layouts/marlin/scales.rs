//! Scales, biases and the int8-activation scale processing.

use super::Activations;
use crate::layouts::{Layout, Place, Slot};
use crate::num::dims::{GroupSize, LogicalK};
use crate::num::scalar::{self, ScalarType};
use crate::weight::Table;
use crate::{Error, Result};

/// Within each 64 columns, position p takes column (p mod 8) · 8 + ⌊p / 8⌋.
pub const GROUPED: [usize; 64] = {
    let mut perm = [0; 64];
    let mut p = 0;
    while p < 64 {
        perm[p] = p % 8 * 8 + p / 8;
        p += 1;
    }
    perm
};

/// Within each 32 columns, position 8i + t takes column 2i + `{0, 1, 8, 9, 16, 17, 24, 25}[t]`.
pub const SINGLE: [usize; 32] = {
    let mut perm = [0; 32];
    let mut p = 0;
    while p < 32 {
        perm[p] = 2 * (p / 8) + p % 2 + p % 8 / 2 * 8;
        p += 1;
    }
    perm
};

/// Marlin's two orders of scale columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScalePermutation {
    /// [`GROUPED`]: scales applied inside the product.
    Grouped,
    /// [`SINGLE`]: scales applied to the finished sum, and every bias.
    Single,
}

impl ScalePermutation {
    /// The order for a matrix of `size_k` rows.
    ///
    /// `size_k` is the logical K of the matrix. Passing another size (the packed K, or the rank's
    /// intermediate size for w13) is a bug that has shipped: in `_process_weights_marlin` of vLLM 0.21.0.
    pub fn choose(group_size: GroupSize, size_k: LogicalK, activations: Activations) -> Self {
        match activations {
            Activations::Bits16 if group_size.is_grouped(size_k) => Self::Grouped,
            _ => Self::Single,
        }
    }

    /// Position p of a run takes the run's column `columns()[p]`.
    pub fn columns(self) -> &'static [usize] {
        match self {
            Self::Grouped => &GROUPED,
            Self::Single => &SINGLE,
        }
    }

    /// The other order.
    pub fn other(self) -> Self {
        match self {
            Self::Grouped => Self::Single,
            Self::Single => Self::Grouped,
        }
    }
}

/// Scales `[groups, N]` (or a bias, one row) in kernel order.
///
/// Source: vLLM 0.21.0 `marlin_permute_scales`, `marlin_permute_bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScaleLayout {
    groups: usize,
    size_n: usize,
    permutation: ScalePermutation,
    width: u32,
    /// Whether each four columns are reordered 0, 2, 1, 3 afterwards (8-bit scales).
    quads: bool,
}

/// The order inside four columns that the 8-bit scale dequantization undoes.
const QUAD: [usize; 4] = [0, 2, 1, 3];

impl ScaleLayout {
    /// The layout of `[groups, size_n]` scales of `ty`. Fails unless N is a multiple of 64.
    pub fn new(
        groups: usize,
        size_n: usize,
        permutation: ScalePermutation,
        ty: ScalarType,
    ) -> Result<Self> {
        if size_n == 0 || !size_n.is_multiple_of(super::MIN_THREAD_N) {
            return Err(Error::size(
                "size_n",
                size_n,
                format!("a positive multiple of {}", super::MIN_THREAD_N),
            ));
        }
        Ok(Self { groups, size_n, permutation, width: ty.storage_bits(), quads: false })
    }

    /// A bias of `size_n` values: always [`ScalePermutation::Single`].
    pub fn bias(size_n: usize, ty: ScalarType) -> Result<Self> {
        Self::new(1, size_n, ScalePermutation::Single, ty)
    }

    /// The same order, then each four columns 0, 2, 1, 3: e8m0 scales and NVFP4's bytes.
    pub fn with_quads(self) -> Self {
        Self { quads: true, width: 8, ..self }
    }

    /// The order of 8-bit scales. Kernels with 8-bit activations read them without quads.
    ///
    /// Source: vLLM 0.21.0 `mxfp4_marlin_process_scales`.
    pub fn of_bytes(self, activations: Activations) -> Self {
        match activations {
            Activations::Bits16 => self.with_quads(),
            Activations::Bits8 => Self { width: 8, ..self },
        }
    }

    /// The permutation of columns.
    pub fn permutation(&self) -> ScalePermutation {
        self.permutation
    }

    /// The column order of one run, quads included: position p takes the run's column p'.
    pub fn columns(&self) -> Vec<usize> {
        let columns = self.permutation.columns();
        if !self.quads {
            return columns.to_vec();
        }
        (0..columns.len()).map(|p| columns[p / 4 * 4 + QUAD[p % 4]]).collect()
    }

    /// Moves the columns into kernel order; bits are unchanged.
    pub fn pack(&self, scales: &Table) -> Result<Table> {
        self.expect(scales)?;
        scales.permute_columns(&self.columns())
    }

    /// The inverse of [`Self::pack`].
    pub fn unpack(&self, packed: &Table) -> Result<Table> {
        self.expect(packed)?;
        let columns = self.columns();
        let mut inverse = vec![0; columns.len()];
        for (p, &c) in columns.iter().enumerate() {
            inverse[c] = p;
        }
        packed.permute_columns(&inverse)
    }

    fn expect(&self, table: &Table) -> Result<()> {
        if (table.rows(), table.cols()) == (self.groups, self.size_n) {
            return Ok(());
        }
        Err(Error::shape(
            "scales",
            &[table.rows(), table.cols()],
            format!("[{}, {}]", self.groups, self.size_n),
        ))
    }
}

impl Layout for ScaleLayout {
    fn packed_shape(&self) -> [usize; 2] {
        [self.groups, self.size_n]
    }

    fn offset(&self, group: usize, n: usize) -> Slot {
        assert!(group < self.groups && n < self.size_n);
        let columns = self.columns();
        let run = columns.len();
        let p = columns.iter().position(|&c| c == n % run).unwrap_or_default();
        Slot { element: group * self.size_n + n / run * run + p, bit: 0, width: self.width }
    }

    fn locate(&self, element: usize, _bit: u32) -> Place {
        assert!(element < self.groups * self.size_n);
        let columns = self.columns();
        let run = columns.len();
        let (group, p) = (element / self.size_n, element % self.size_n);
        Place { row: group, col: p / run * run + columns[p % run], fragment: None }
    }
}

/// Scales for int8 activations, as [`process_int8_scales`] makes them.
#[derive(Debug, Clone, PartialEq)]
pub struct Int8Scales {
    /// Integers in −32768..=32767 (in practice 0..=4096) in the bits of the scale type.
    pub scales: Table,
    /// Factor of the activation scales: max / 4096.
    pub input_global_scale: f32,
}

/// Decoding and nearest-even encoding of a 16-bit float.
pub(crate) type HalfCodec = (fn(u16) -> f32, fn(f32) -> u16);

/// The conversions of f16 or bf16; `None` for another type.
pub(crate) fn half_codec(ty: ScalarType) -> Option<HalfCodec> {
    match ty {
        ScalarType::FLOAT16 => Some((scalar::f16_to_f32, scalar::f32_to_f16_rne)),
        ScalarType::BFLOAT16 => Some((scalar::bf16_to_f32, scalar::f32_to_bf16_rne)),
        _ => None,
    }
}

/// Turns group scales into 16-bit integers for the int8-activation kernel: scales / max · 4096,
/// rounded half to even, and the factor max / 4096 that restores them.
///
/// Each step rounds to the scale type, as upstream does it (vLLM 0.21.0
/// `marlin_act_int8_process_scales`). For a MoE, `max` runs over all experts. Returns an error for
/// a type other than f16 and bf16, and if a scale is not finite or none is positive.
pub fn process_int8_scales(scales: &Table) -> Result<Int8Scales> {
    process_int8_scales_with(scales, f32::NEG_INFINITY)
}

/// [`process_int8_scales`] of a part of a stack: `max` is the largest scale of the other parts, so
/// that processing in parts gives the same result as for the whole.
pub fn process_int8_scales_with(scales: &Table, max: f32) -> Result<Int8Scales> {
    let ty = scales.ty();
    let Some((to_f32, from_f32)) = half_codec(ty) else {
        return Err(Error::unsupported(format!("scales of {ty}"), "float16 or bfloat16"));
    };
    let mut max = max;
    for (i, bits) in scales.iter_bits().enumerate() {
        let value = to_f32(bits as u16);
        if !value.is_finite() {
            let at = [i / scales.cols(), i % scales.cols()];
            return Err(Error::value("scales", &at, value, "a finite scale"));
        }
        max = max.max(value);
    }
    if max <= 0.0 {
        return Err(Error::value("scales", &[], format!("largest {max}"), "a positive scale"));
    }
    // Division, product and rounding each go through the 16-bit type. f32 holds a product of
    // two 11-bit significands exactly, and its quotient rounds to 16 bits as the real one does.
    let round = |bits: u32| {
        let quotient = to_f32(from_f32(to_f32(bits as u16) / max));
        let scaled = to_f32(from_f32(quotient * 4096.0));
        u32::from((scaled.round_ties_even() as i16).cast_unsigned())
    };
    Ok(Int8Scales { scales: scales.map(ty, round), input_global_scale: (1.0 / 4096.0) * max })
}
