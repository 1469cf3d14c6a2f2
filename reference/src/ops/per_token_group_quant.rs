//! Quantization of activations to e4m3fn with a scale for each group of k of a row.

use serde_json::{Value, json};

use crate::Result;
use crate::judge::compare::{Elements, Rows};
use crate::judge::{Declared, OutputReport};
use crate::layouts::Layout as _;
use crate::layouts::deepgemm::{MnMajorScales, ScaleForm};
use crate::moe::widen;
use crate::num::array::FloatView2;
use crate::num::element::E4m3fn;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Form, Mistake, bitwise, ids, known};
use crate::ops::draw::{Rng, activations};
use crate::ops::quant::keys::divisible;
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule, finite, stored};
use crate::ops::tensors::{E4M3, F32, FLAGS, HALF, HALF_TYPES, I32, input, is, name_of, output};
use crate::ops::{CaseConfig, Operation};
use crate::quantize::{CodeBy, Fp8GroupOperations, Fp8GroupRule, ScaleBy, per_group_fp8_by};
use crate::weight::{Table, TableData};

/// The order of the scales in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GroupScaleLayout {
    /// `[M, K / group]`.
    #[default]
    RowMajor,
    /// `[K / group, M]`.
    ColumnMajor,
    /// `[K / group, M padded to a multiple of 4]`; padding is not compared.
    TmaAligned,
    /// int32 `[⌈K / group / 4⌉, M padded to a multiple of 4]`, four UE8M0 scales in a word.
    PackedUe8m0,
}

impl GroupScaleLayout {
    /// Every layout with its name.
    pub const NAMED: &'static [(&'static str, Self)] = &[
        ("row_major", Self::RowMajor),
        ("column_major", Self::ColumnMajor),
        ("tma_aligned", Self::TmaAligned),
        ("packed_ue8m0", Self::PackedUe8m0),
    ];
}

/// Config of `per_token_group_fp8_quant`: activations to e4m3fn, with a scale for each group of k.
///
/// in: `x` `[M, K]`. out: `x_q` `[M, K]` e4m3fn, `x_s` in memory order ([`GroupScaleLayout`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupQuantConfig {
    /// Type of x.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// K.
    pub size_k: usize,
    /// k per scale.
    pub group_size: usize,
    /// The kernel's operations.
    pub quantizer: Fp8GroupRule,
    /// Whether scales are rounded up to powers of two.
    pub use_ue8m0: bool,
    /// `scale_layout`: the order of the scales in memory.
    pub scale_layout: GroupScaleLayout,
}

impl GroupQuantConfig {
    fn groups(&self) -> usize {
        self.size_k / self.group_size.max(1)
    }

    /// The layout of padded scales.
    fn padded(&self) -> Result<Option<MnMajorScales>> {
        let form = match self.scale_layout {
            GroupScaleLayout::TmaAligned => ScaleForm::Float32,
            GroupScaleLayout::PackedUe8m0 => ScaleForm::PackedUe8m0,
            _ => return Ok(None),
        };
        MnMajorScales::new(self.groups(), self.size_m, form).map(Some)
    }

    /// Shape of the scales.
    fn scales(&self) -> Result<[usize; 2]> {
        Ok(match (self.scale_layout, self.padded()?) {
            (_, Some(layout)) => layout.packed_shape(),
            (GroupScaleLayout::RowMajor, None) => [self.size_m, self.groups()],
            (_, None) => [self.groups(), self.size_m],
        })
    }
}

impl Operation for GroupQuantConfig {
    fn keys() -> &'static [&'static str] {
        &["dtype", "size_m", "size_k", "group_size", "quantizer", "use_ue8m0", "scale_layout"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let use_ue8m0 = r.flag("use_ue8m0", false)?;
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.size("size_m")?,
            size_k: r.size("size_k")?,
            group_size: r.optional_size("group_size")?.unwrap_or(128),
            quantizer: r.optional_name("quantizer", Fp8GroupRule::NAMED)?.unwrap_or_default(),
            use_ue8m0,
            scale_layout: r
                .optional_name("scale_layout", GroupScaleLayout::NAMED)?
                .unwrap_or_default(),
        };
        divisible("size_k", config.size_k, config.group_size, "whole groups")?;
        if config.scale_layout == GroupScaleLayout::PackedUe8m0 && !use_ue8m0 {
            return Err(r.refuse("use_ue8m0", false, "true, for scale_layout packed_ue8m0"));
        }
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_k": self.size_k,
            "group_size": self.group_size,
            "quantizer": name_of(Fp8GroupRule::NAMED, &self.quantizer),
            "use_ue8m0": self.use_ue8m0,
            "scale_layout": name_of(GroupScaleLayout::NAMED, &self.scale_layout),
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, k) = (is(self.size_m), is(self.size_k));
        let packed = self.scale_layout == GroupScaleLayout::PackedUe8m0;
        Ok(vec![
            input("x", &[stored(self.dtype)], &[m, k]),
            output("x_q", E4M3, &[m, k]),
            output("x_s", if packed { I32 } else { F32 }, &self.scales()?.map(is)),
        ])
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        finite(&inputs["x"])
    }

    /// Rows around TMA's alignment, groups around the word of four scales.
    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for dtype in HALF {
            for &(_, quantizer) in Fp8GroupRule::NAMED {
                for use_ue8m0 in FLAGS {
                    for &(_, scale_layout) in GroupScaleLayout::NAMED {
                        if scale_layout == GroupScaleLayout::PackedUe8m0 && !use_ue8m0 {
                            continue;
                        }
                        for (size_m, size_k, group_size) in
                            [(1, 128, 128), (5, 640, 128), (4, 96, 32), (9, 256, 64)]
                        {
                            all.push(Self {
                                dtype,
                                size_m,
                                size_k,
                                group_size,
                                quantizer,
                                use_ue8m0,
                                scale_layout,
                            });
                        }
                    }
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(GroupQuant::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<GroupQuant>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        case.add_input("x", activations(rng, self.dtype, self.size_m, self.size_k)?);
        Ok(())
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        let quant = GroupQuant::new(case, self)?;
        match (self.scale_layout, case.output("x_s")) {
            (GroupScaleLayout::TmaAligned, Some(found)) => {
                let mut case = case.clone();
                case.add_output("x_s", self.without_padding(found)?);
                bitwise(&case, &quant)
            }
            _ => bitwise(case, &quant),
        }
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        Some((Self { size_m: 1, ..self.clone() }.into(), &["x"]))
    }
}

impl GroupQuantConfig {
    /// Scales whose padding, which upstream leaves unset, is zero.
    fn without_padding(&self, scales: &Tensor<'_>) -> Result<Tensor<'static>> {
        let cols = self.scales()?[1];
        let values = scales.elements::<f32>();
        let inside = |(i, &v): (usize, &f32)| if i % cols < self.size_m { v } else { 0.0 };
        let values = values.iter().enumerate().map(inside).collect();
        Tensor::from_vec(scales.name(), DType::F32, scales.shape().to_vec(), values)
    }
}

/// How scales become powers of two: as the config says, or by mistake.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rounding {
    Stated,
    Nearest,
    Down,
}

/// `per_token_group_fp8_quant`.
#[derive(Debug, Clone)]
struct GroupQuant {
    config: GroupQuantConfig,
    x: Vec<u16>,
    /// The values that scales are computed from; those of `x` by definition.
    scaled_by: Vec<u16>,
    operations: Fp8GroupOperations,
    rounding: Rounding,
    /// Whether scales are stored as their reciprocals.
    inverted: bool,
    /// Whether the first scale of a row is that of all of its groups.
    by_row: bool,
    /// Whether rows and groups of the scales are exchanged in memory.
    other_major: bool,
    /// Whether the first scale of four is in the highest byte of a word.
    reversed: bool,
}

impl GroupQuant {
    fn new(case: &Case<'_>, c: &GroupQuantConfig) -> Result<Self> {
        let x = case.input("x")?.elements::<u16>().into_owned();
        Ok(Self {
            config: c.clone(),
            scaled_by: x.clone(),
            x,
            operations: c.quantizer.operations(),
            rounding: Rounding::Stated,
            inverted: false,
            by_row: false,
            other_major: false,
            reversed: false,
        })
    }

    /// Codes `[M, K]` and scales `[M, groups]`.
    fn quantized(&self) -> Result<(Elements, Vec<f32>)> {
        let c = &self.config;
        let group = if self.by_row { c.size_k } else { c.group_size };
        let by = |values: &[u16], ue8m0: bool| {
            let rows = FloatView2::from_rows("x", c.dtype, c.size_k, values)?;
            let made = per_group_fp8_by(rows, group, self.operations, ue8m0)?;
            Ok::<_, crate::Error>(made.into_vecs())
        };
        let stated = self.rounding == Rounding::Stated;
        let (codes, scales) = by(&self.scaled_by, c.use_ue8m0 && stated)?;
        let (codes, scales): (Vec<E4m3fn>, Vec<f32>) = if stated && self.scaled_by == self.x {
            (codes, scales)
        } else {
            let scales: Vec<f32> = scales.iter().map(|&s| self.rounding.apply(s)).collect();
            let code = |(i, &bits): (usize, &u16)| {
                E4m3fn::from_f32_rne_saturating(widen(c.dtype, bits) / scales[i / group])
            };
            (self.x.iter().enumerate().map(code).collect(), scales)
        };
        let per = c.size_k / group;
        let of_group = |i: usize| {
            let (m, g) = (i / c.groups(), i % c.groups());
            let scale = scales[m * per + g * per / c.groups()];
            if self.inverted { 1.0 / scale } else { scale }
        };
        let scales = (0..c.size_m * c.groups()).map(of_group).collect();
        Ok((codes.iter().map(|c| u32::from(c.to_bits())).collect(), scales))
    }

    /// The scales in memory order.
    fn stored(&self, scales: &[f32]) -> Result<Expected> {
        let c = &self.config;
        let (m, groups) = (c.size_m, c.groups());
        let shape = c.scales()?;
        let bits = |row: usize, group: usize| match self.other_major {
            false => scales[row * groups + group].to_bits(),
            true => scales[group * m + row].to_bits(),
        };
        let layout = c.padded()?;
        let (elements, form): (Elements, Form) = match &layout {
            None => {
                let by_row = c.scale_layout == GroupScaleLayout::RowMajor;
                let value = |i: usize| match by_row {
                    true => bits(i / groups, i % groups),
                    false => bits(i % m, i / m),
                };
                let elements = (0..m * groups).map(value).collect();
                let (matrix, rows) = match by_row {
                    true => ([groups, m], Rows::RowGroup),
                    false => ([m, groups], Rows::List),
                };
                (elements, Form::lines(rows, matrix, 32, None))
            }
            Some(layout) => {
                let table = (0..m * groups).map(|i| bits(i % m, i / m)).collect();
                let table = Table::new(ScalarType::FLOAT32, groups, m, TableData::B32(table))?;
                let mut packed = layout.pack(&table)?;
                if self.reversed {
                    packed.iter_mut().for_each(|word| *word = word.swap_bytes());
                }
                let packs = layout.form() == ScaleForm::PackedUe8m0;
                let (width, padded) = match packs {
                    true => (8, groups.next_multiple_of(4)),
                    false => (32, groups),
                };
                let form = Form {
                    layout: Box::new(layout.clone()),
                    matrix: [padded, shape[1]],
                    inside: [groups, m],
                    rows: Rows::RowGroup,
                    width,
                    experts: 1,
                    stacked: false,
                };
                (packed, form)
            }
        };
        let packed = c.scale_layout == GroupScaleLayout::PackedUe8m0;
        let dtype = if packed { DType::I32 } else { DType::F32 };
        Ok(Expected { name: "x_s".to_owned(), dtype, shape: shape.to_vec(), elements, form })
    }
}

impl Rounding {
    fn apply(self, scale: f32) -> f32 {
        let exponent = f64::from(scale).log2();
        match self {
            Self::Stated => scale,
            Self::Nearest => exponent.round_ties_even().exp2() as f32,
            Self::Down => exponent.floor().exp2() as f32,
        }
    }
}

impl Computation for GroupQuant {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        let (codes, scales) = self.quantized()?;
        let codes = Expected {
            name: "x_q".to_owned(),
            dtype: DType::F8E4M3,
            shape: vec![c.size_m, c.size_k],
            elements: codes,
            form: Form::lines(Rows::RowK, [c.size_k, c.size_m], 8, None),
        };
        Ok(vec![codes, self.stored(&scales)?])
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "ue8m0-nearest", "scales were rounded to the nearest power of two, not up" =>
                |c| if c.config.use_ue8m0 {
                    c.rounding = Rounding::Nearest;
                };
            "ue8m0-down", "scales were rounded down to a power of two, not up" =>
                |c| if c.config.use_ue8m0 {
                    c.rounding = Rounding::Down;
                };
            "ue8m0-rounding-other",
            "scales were rounded up to powers of two where they should not, or the reverse" =>
                |c| c.config.use_ue8m0 ^= true;
            "scale-inverted", "the reciprocals of the scales were stored" => |c| c.inverted = true;
            "scale-of-row", "one scale was computed for a whole row" => |c| c.by_row = true;
            "scales-other-major", "rows and groups of the scales are exchanged in memory" =>
                |c| c.other_major = true;
            "scales-word-reversed", "the four scales of a word are in reverse order" =>
                |c| c.reversed = true;
            "absmax-without-sign", "the largest value was taken for the largest magnitude" =>
                |c| c.scaled_by.iter_mut().filter(|v| **v >> 15 == 1).for_each(|v| *v = 0);
            "other-epsilon", "the least magnitude was 1e-10 where it is 1e-4, or the reverse" =>
                |c| c.operations.least = if c.operations.least < 1e-5 { 1e-4 } else { 1e-10 };
            "codes-by-reciprocal", "values were multiplied by the rounded reciprocal of their scale" =>
                |c| c.operations.code = CodeBy::ScaleReciprocal;
            "codes-by-quotient", "values were divided by their scale" =>
                |c| c.operations.code = CodeBy::Quotient;
            "scale-by-reciprocal", "a group's maximum was multiplied by the rounded 1 / 448" =>
                |c| c.operations.scale = ScaleBy::Reciprocal;
            "scale-by-quotient", "a group's maximum was divided by 448" =>
                |c| c.operations.scale = ScaleBy::Quotient;
        }
    }
}
