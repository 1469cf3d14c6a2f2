//! DeepGEMM's layouts of the scales of FP8 blocks: MN-major, with rows padded for TMA.
//!
//! Source: DeepGEMM `get_mn_major_tma_aligned_tensor` (f32 scales, Hopper),
//! `get_mn_major_tma_aligned_packed_ue8m0_tensor` (UE8M0 scales, Blackwell), and
//! `transform_sf_into_required_layout`, which repeats the scale of each 128 rows of a weight before it
//! packs UE8M0 scales. A tensor's strides there are memory order here: the packed tensor is contiguous.

use super::positions::{Named, Part, Positions, Request, values};
use super::{Layout, Place, Slot};
use crate::num::scalar::ScalarType;
use crate::weight::{Table, TableData};
use crate::{Error, Result};

/// Elements of 4 bytes in TMA's alignment of 16 bytes.
const ALIGNED: usize = 4;
/// UE8M0 scales in a word.
const PACKED: usize = 4;

/// How a scale is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleForm {
    /// f32.
    Float32,
    /// The exponent byte of an f32 power of two; the scales of four groups in a word, the first one in
    /// its lowest byte.
    PackedUe8m0,
}

/// Scales of `size_mn` rows (tokens, or output features) and `groups` groups of k, the rows of a group
/// next to each other and padded to a multiple of four.
///
/// Scales are a [`Table`] `[groups, size_mn]` of f32. The packed tensor is `[groups, padded rows]` of
/// f32, or `[⌈groups / 4⌉, padded rows]` of int32. Padding is zero; upstream leaves that of f32 scales
/// unset.
///
/// ```
/// use marlinspike::layouts::Layout;
/// use marlinspike::layouts::deepgemm::{MnMajorScales, ScaleForm};
///
/// let layout = MnMajorScales::new(5, 7, ScaleForm::PackedUe8m0)?;
/// assert_eq!(layout.packed_shape(), [2, 8]);
/// assert_eq!((layout.offset(5 - 1, 6).element, layout.offset(2, 0).bit), (14, 16));
/// # Ok::<(), marlinspike::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MnMajorScales {
    groups: usize,
    size_mn: usize,
    form: ScaleForm,
}

impl MnMajorScales {
    /// The layout of scales `[groups, size_mn]`.
    ///
    /// # Errors
    /// [`Error::Size`] without rows or groups, or if the size overflows.
    pub fn new(groups: usize, size_mn: usize, form: ScaleForm) -> Result<Self> {
        let padded = size_mn.checked_next_multiple_of(ALIGNED);
        let len = padded.and_then(|mn| mn.checked_mul(groups)?.checked_mul(4));
        if groups == 0 || size_mn == 0 || len.is_none_or(|len| isize::try_from(len).is_err()) {
            let found = format!("[{groups}, {size_mn}]");
            return Err(Error::size("scales", found, "1 or more of each, within memory"));
        }
        Ok(Self { groups, size_mn, form })
    }

    /// How a scale is stored.
    pub fn form(&self) -> ScaleForm {
        self.form
    }

    /// `[groups, rows]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.groups, self.size_mn]
    }

    /// Bits of a scale.
    fn width(&self) -> u32 {
        match self.form {
            ScaleForm::Float32 => 32,
            ScaleForm::PackedUe8m0 => 8,
        }
    }

    /// The words of the packed tensor.
    ///
    /// # Errors
    /// [`Error::Shape`] for scales of another shape, [`Error::Unsupported`] of another type than f32;
    /// [`Error::Value`] for a scale that UE8M0 cannot hold: all but positive normal powers of two.
    pub fn pack(&self, scales: &Table) -> Result<Vec<u32>> {
        if scales.ty() != ScalarType::FLOAT32 {
            let what = format!("scales of {}", scales.ty());
            return Err(Error::unsupported(what, "float32 is expected"));
        }
        if [scales.rows(), scales.cols()] != self.shape() {
            let (found, expected) = ([scales.rows(), scales.cols()], format!("{:?}", self.shape()));
            return Err(Error::shape("scales", &found, expected));
        }
        let mut packed = vec![0; self.packed_len()];
        for group in 0..self.groups {
            for row in 0..self.size_mn {
                let bits = scales.bits(group, row);
                let code = match self.form {
                    ScaleForm::Float32 => bits,
                    ScaleForm::PackedUe8m0 => exponent(bits).ok_or_else(|| {
                        let found = f32::from_bits(bits);
                        Error::value("scales", &[group, row], found, "a normal power of two")
                    })?,
                };
                let slot = self.offset(group, row);
                packed[slot.element] |= code << slot.bit;
            }
        }
        Ok(packed)
    }

    /// The inverse of [`Self::pack`]; padding is ignored.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of words; [`Error::Value`] for a UE8M0 byte of 0 or 255, no
    /// normal f32.
    pub fn unpack(&self, packed: &[u32]) -> Result<Table> {
        if packed.len() != self.packed_len() {
            let expected = format!("{:?}", self.packed_shape());
            return Err(Error::shape("packed scales", &[packed.len()], expected));
        }
        let mut scales = Vec::with_capacity(self.groups * self.size_mn);
        for group in 0..self.groups {
            for row in 0..self.size_mn {
                let slot = self.offset(group, row);
                let code = packed[slot.element] >> slot.bit;
                scales.push(match self.form {
                    ScaleForm::Float32 => code,
                    ScaleForm::PackedUe8m0 => match code & 0xff {
                        code @ 1..=254 => code << 23,
                        code => {
                            let at = [group, row];
                            return Err(Error::value("packed scales", &at, code, "1 to 254"));
                        }
                    },
                });
            }
        }
        Table::new(ScalarType::FLOAT32, self.groups, self.size_mn, TableData::B32(scales))
    }
}

/// The exponent byte of a positive normal power of two.
fn exponent(bits: u32) -> Option<u32> {
    let normal = (1..=254).contains(&(bits >> 23));
    (bits & 0x7f_ffff == 0 && normal).then_some(bits >> 23)
}

/// The scales `[groups, size_n]` of a weight's rows from those of its blocks, `[groups, ⌈size_n / n⌉]`,
/// as upstream repeats them before it packs UE8M0 scales.
///
/// # Errors
/// [`Error::Shape`] unless there is a scale for each block; [`Error::Size`] for blocks of no rows.
pub fn repeat_blocks(blocks: &Table, size_n: usize, block_n: usize) -> Result<Table> {
    if block_n == 0 {
        return Err(Error::size("rows of a block", block_n, "1 or more"));
    }
    if blocks.cols() != size_n.div_ceil(block_n) {
        let expected = format!("[groups, {}]", size_n.div_ceil(block_n));
        return Err(Error::shape("scales", &[blocks.rows(), blocks.cols()], expected));
    }
    let columns: Vec<usize> = (0..size_n).map(|n| n / block_n).collect();
    blocks.gather_columns(&columns)
}

impl Layout for MnMajorScales {
    /// `[groups, padded rows]` of f32, or `[⌈groups / 4⌉, padded rows]` of int32.
    fn packed_shape(&self) -> [usize; 2] {
        let lines = match self.form {
            ScaleForm::Float32 => self.groups,
            ScaleForm::PackedUe8m0 => self.groups.div_ceil(PACKED),
        };
        [lines, self.size_mn.next_multiple_of(ALIGNED)]
    }

    fn offset(&self, group: usize, row: usize) -> Slot {
        assert!(group < self.groups && row < self.size_mn);
        let padded = self.size_mn.next_multiple_of(ALIGNED);
        let (line, bit) = match self.form {
            ScaleForm::Float32 => (group, 0),
            ScaleForm::PackedUe8m0 => (group / PACKED, group % PACKED * 8),
        };
        Slot { element: line * padded + row, bit: bit as u32, width: self.width() }
    }

    /// For padding, its position outside the matrix.
    fn locate(&self, element: usize, bit: u32) -> Place {
        assert!(element < self.packed_len() && bit < 32);
        let [_, padded] = self.packed_shape();
        let in_word = (32 / self.width()) as usize;
        let row = element / padded * in_word + (bit / self.width()) as usize;
        Place { row, col: element % padded, fragment: None }
    }
}

/// DeepGEMM's scales in the list of layouts.
pub(super) const ALL: &[Named] = &[
    Named {
        name: "deepgemm_scales",
        title: "DeepGEMM: f32 scales of groups, MN-major, aligned for TMA",
        options: &["group_size"],
        one: |r| positions(r, ScaleForm::Float32),
    },
    Named {
        name: "deepgemm_scales_ue8m0",
        title: "DeepGEMM: UE8M0 scales of groups, four in a word, MN-major, aligned for TMA",
        options: &["group_size"],
        one: |r| positions(r, ScaleForm::PackedUe8m0),
    },
];

fn positions(r: &Request, form: ScaleForm) -> Result<Positions> {
    let groups = r.groups()?;
    let layout = MnMajorScales::new(groups, r.size_n, form)?;
    values(&layout, 32, [groups, r.size_n], Part::Scale)
}
