//! The inputs of `scripts/probe/marlin_products.py`, made again: every element is a function of a
//! seed, the tensor's tag and the element's index.

use marlinspike::Result;
use marlinspike::act_order;
use marlinspike::num::array::{into_vec, rows_of};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Launches, Rows};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use serde::Deserialize;

/// Of the GPU that computed the products.
const MULTIPROCESSORS: usize = 132;

/// Which tensor of a case.
#[derive(Clone, Copy)]
pub(crate) enum Tag {
    X = 1,
    Codes,
    Scales,
    Zeros,
    Bias,
    Order,
    ActivationScales,
    Route,
    Router,
}

/// A 32-bit hash.
pub(crate) fn mix(seed: u32, tag: Tag, index: usize) -> u32 {
    let mut h = (index as u32)
        .wrapping_mul(0x9E37_79B1)
        .wrapping_add(seed.wrapping_mul(0x85EB_CA77))
        .wrapping_add((tag as u32).wrapping_mul(0xC2B2_AE3D));
    for (shift, factor) in [(16, 0x85EB_CA6B), (13, 0xC2B2_AE35)] {
        h = (h ^ (h >> shift)).wrapping_mul(factor);
    }
    h ^ (h >> 16)
}

/// What the producer says of a matrix.
#[derive(Deserialize)]
pub(crate) struct Format {
    pub(crate) format: String,
    pub(crate) weight_type: String,
    pub(crate) dtype: String,
    pub(crate) group_size: i64,
    #[serde(default)]
    pub(crate) bias: bool,
    /// Tensor-parallel ranks of an act-order matrix, each with a slice of k.
    pub(crate) ranks: Option<usize>,
    #[serde(default)]
    pub(crate) rank: usize,
    /// All codes are 15, all int8 activations 127.
    #[serde(default)]
    pub(crate) aligned: bool,
}

impl Format {
    pub(crate) fn dtype(&self) -> ScalarType {
        ScalarType::from_name(&self.dtype).expect("a type")
    }

    pub(crate) fn weight_type(&self) -> ScalarType {
        ScalarType::from_name(&self.weight_type).expect("a type")
    }

    pub(crate) fn group_size(&self) -> GroupSize {
        GroupSize::from_config(self.group_size).expect("a group size")
    }

    /// A float of either sign, its exponent falling off geometrically from that of 1.
    pub(crate) fn half(&self, h: u32) -> u16 {
        let zeros = ((h >> 10 & 0xFF) | 0x80).trailing_zeros();
        let bits = if self.dtype() == ScalarType::FLOAT16 {
            h >> 31 << 15 | (15 - zeros) << 10 | h & 0x3FF
        } else {
            h >> 31 << 15 | (127 - zeros) << 7 | h & 0x7F
        };
        bits as u16
    }

    fn code(&self, h: u32) -> u8 {
        match self.weight_type() {
            ScalarType::FLOAT8_E4M3FN if h & 0x7F == 0x7F => (h & 0xFF) as u8 - 1,
            ScalarType::FLOAT8_E4M3FN | ScalarType::UINT8B128 => h as u8,
            _ => h as u8 & 0xF,
        }
    }

    fn scale(&self, h: u32) -> u16 {
        let wide = self.weight_type().size_bits() == 8;
        let exponent = match (self.format.as_str(), wide) {
            ("mxfp4" | "mxfp8", _) => {
                return (127 - if wide { 12 } else { 6 } - (h & 3)) as u16;
            }
            ("nvfp4", _) => return (0x28 + (h & 0x3F)) as u16,
            ("fp8", _) => 13,
            (_, true) => 10,
            (_, false) => 6,
        };
        let down = exponent + (h >> 16 & 1);
        let bits = match self.dtype() {
            ScalarType::FLOAT16 => (15 - down) << 10 | h & 0x3FF,
            _ => (127 - down) << 7 | h & 0x7F,
        };
        bits as u16
    }

    fn scale_type(&self) -> ScalarType {
        match self.format.as_str() {
            "mxfp4" | "mxfp8" => ScalarType::FLOAT8_E8M0FNU,
            "nvfp4" => ScalarType::FLOAT8_E4M3FN,
            _ => self.dtype(),
        }
    }

    /// The group of each row of this rank.
    fn g_idx(&self, seed: u32, size_k: usize) -> Vec<u32> {
        let whole = size_k * self.ranks.unwrap_or(1);
        let mut places: Vec<usize> = (0..whole).collect();
        places.sort_by_key(|&i| (mix(seed, Tag::Order, i), i));
        let mut group = vec![0; whole];
        for (i, &place) in places.iter().enumerate() {
            group[place] = (i / self.group_size as usize) as u32;
        }
        group[self.rank * size_k..][..size_k].to_vec()
    }

    /// Those `columns` of the matrix `[size_k, size_n]`.
    pub(crate) fn weight(
        &self,
        seed: u32,
        size_k: usize,
        size_n: usize,
        columns: &[usize],
    ) -> Result<Weight<'static>> {
        let shape = Shape::new(size_k, columns.len());
        let whole = size_k * self.ranks.unwrap_or(1);
        let groups = match self.group_size() {
            GroupSize::Channel => 1,
            GroupSize::Of(g) => whole / g,
        };
        let at = |tag, g: usize, n: usize| mix(seed, tag, g * size_n + n);
        let all = || (0..groups).flat_map(|g| columns.iter().map(move |&n| (g, n)));
        let table = |ty: ScalarType, rows, values: Vec<u16>| {
            let data = match ty.size_bits() {
                16 => TableData::B16(values),
                _ => TableData::B8(values.into_iter().map(|v| v as u8).collect()),
            };
            Table::new(ty, rows, columns.len(), data)
        };
        let scales = all().map(|(g, n)| self.scale(at(Tag::Scales, g, n))).collect();
        let zeros = (self.format == "awq")
            .then(|| all().map(|(g, n)| (at(Tag::Zeros, g, n) & 15) as u16).collect())
            .map(|values| table(ScalarType::UINT4, groups, values))
            .transpose()?;
        let bias = self
            .bias
            .then(|| columns.iter().map(|&n| self.half(mix(seed, Tag::Bias, n))).collect())
            .map(|values| table(self.dtype(), 1, values))
            .transpose()?;
        let groups_of = match self.ranks {
            None => Groups::Uniform(self.group_size()),
            Some(_) => {
                Groups::Indexed { g_idx: self.g_idx(seed, size_k), group_size: self.group_size() }
            }
        };
        let bits = self.weight_type().size_bits();
        Ok(Weight {
            name: "weight".to_owned(),
            ty: self.weight_type(),
            codes: Codes::from_fn(bits, shape, |k, i| match self.aligned {
                true => 15,
                false => self.code(mix(seed, Tag::Codes, k * size_n + columns[i])),
            })?,
            scales: table(self.scale_type(), groups, scales)?,
            zeros,
            groups: groups_of,
            global_scale: (self.format == "nvfp4").then_some(11.0 / 2048.0),
            bias,
        })
    }
}

/// The rows of a rank's slice of an act-ordered matrix with the groups that upstream's kernel reads
/// (`is_k_full` false), in the order of its loop, and that order: of each second 16 rows, row
/// 16 + j gets the scale of row j + 1.
pub(crate) fn slice_as_read(weight: &Weight<'_>) -> Result<(Weight<'static>, Vec<u32>)> {
    let Groups::Indexed { g_idx, group_size } = &weight.groups else { panic!("act-order") };
    let sorted = act_order::sort(g_idx);
    let read = (0..g_idx.len()).map(|r| sorted.g_idx[if r / 16 % 2 == 1 { r - 15 } else { r }]);
    let gathered = Weight {
        name: weight.name.clone(),
        codes: weight.codes.gather_rows(&sorted.perm)?,
        scales: weight.scales.clone(),
        zeros: weight.zeros.clone(),
        bias: weight.bias.clone(),
        groups: Groups::Indexed { g_idx: read.collect(), group_size: *group_size },
        ..*weight
    };
    Ok((gathered, sorted.perm))
}

/// A matrix and its products, as the producer says them.
#[derive(Deserialize)]
pub(crate) struct Linear {
    pub(crate) index: u32,
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) format: Format,
    pub(crate) size_k: usize,
    pub(crate) size_n: usize,
    pub(crate) sizes_m: Vec<usize>,
    #[serde(default)]
    pub(crate) int8: bool,
    /// Activations are less by 2^20.
    #[serde(default)]
    pub(crate) small: bool,
    /// Chunks are added through the 16-bit type.
    #[serde(default)]
    pub(crate) reduce16: bool,
}

/// The inputs of a case, for its largest M.
pub(crate) struct Inputs {
    pub(crate) weight: Weight<'static>,
    pub(crate) x: Vec<u32>,
    pub(crate) activation_scales: Option<Vec<f32>>,
    /// The weight's rows stand in the order of the kernel's loop already, x as well.
    pub(crate) gathered: bool,
}

impl Linear {
    pub(crate) fn is_slice(&self) -> bool {
        self.format.ranks.is_some_and(|r| r > 1)
    }

    /// Those `columns` of the matrix, and all activations.
    pub(crate) fn inputs(&self, columns: &[usize]) -> Result<Inputs> {
        let seed = self.index + 1;
        let most = self.sizes_m.iter().copied().max().unwrap_or(0);
        let mut weight = self.format.weight(seed, self.size_k, self.size_n, columns)?;
        let element = |i| {
            let h = mix(seed, Tag::X, i);
            match self.int8 {
                true if self.format.aligned => 127,
                true => u32::from((h % 255).wrapping_sub(127) as u8),
                // bf16: 20 less in the exponent.
                false if self.small => u32::from(self.format.half(h) - (20 << 7)),
                false => u32::from(self.format.half(h)),
            }
        };
        let mut x: Vec<u32> = (0..most * self.size_k).map(element).collect();
        if self.is_slice() {
            let order;
            (weight, order) = slice_as_read(&weight)?;
            let rows = x.chunks_exact(self.size_k);
            x = rows.flat_map(|row| order.iter().map(|&k| row[k as usize])).collect();
        }
        let factor = self.int8.then(|| self.int8_factor(&weight)).flatten().unwrap_or(1.0);
        let activation_scales = self.int8.then(|| {
            let scale = |m| {
                let bits = (127 - 9) << 23 | mix(seed, Tag::ActivationScales, m) & 0x7F_FFFF;
                f32::from_bits(bits) * factor
            };
            (0..most).map(scale).collect()
        });
        Ok(Inputs { weight, x, activation_scales, gathered: self.is_slice() })
    }

    /// What the scales as int16 leave to the activations' scales.
    fn int8_factor(&self, weight: &Weight<'_>) -> Option<f32> {
        let scales = &weight.scales;
        let max = scales.iter_bits().map(|b| scales.ty().to_f64(b) as f32).fold(0.0, f32::max);
        (scales.rows() > 1).then_some(max / 4096.0)
    }
}

impl Inputs {
    /// The launches of the first `size_m` rows, and their output.
    pub(crate) fn product(&self, case: &Linear, size_m: usize) -> Result<(Launches, Vec<u32>)> {
        let dtype = case.format.dtype();
        let input = if case.int8 { ScalarType::INT8 } else { dtype };
        let mut launches = Launches::new(&self.weight, dtype, input, size_m, MULTIPROCESSORS)?;
        for launch in launches.all_mut() {
            if self.gathered {
                launch.schedule.rows = Rows::Stored;
            }
            if case.reduce16 {
                launch.schedule.chunk_sum.ty = dtype;
            }
        }
        let activation_scales = self.activation_scales.as_ref().map(|s| &s[..size_m]);
        let extras = Extras { activation_scales, ..Default::default() };
        let x = rows_of("x", &self.x[..size_m * case.size_k], case.size_k)?;
        let made = launches.execute(x, &self.weight, extras)?;
        Ok((launches, into_vec(made)))
    }
}
