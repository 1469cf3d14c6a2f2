//! The definition of `per_token_group_fp8_quant`, and its known mistakes.

use super::{GroupQuantConfig, GroupScaleLayout, LeastScale};
use crate::Result;
use crate::judge::compare::{Elements, Rows};
use crate::layouts::deepgemm::ScaleForm;
use crate::moe::widen;
use crate::num::array::FloatView2;
use crate::num::element::E4m3fn;
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Expected, Form, Mistake, known};
use crate::quantize::{CodeBy, Fp8GroupOperations, ScaleBy, ceil_to_ue8m0, per_group_fp8_by};
use crate::weight::{Table, TableData};

/// How scales become powers of two: as the config says, or by mistake.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rounding {
    Stated,
    Nearest,
    Down,
    /// Up, and only then at least 1 / (448 · 512).
    LeastAfter,
}

/// `per_token_group_fp8_quant`.
#[derive(Debug, Clone)]
pub(super) struct GroupQuant {
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
    /// Whether codes saturate at 240.
    early: bool,
    /// Scales of groups that a case states, by which its codes are to be judged.
    found_scales: Option<Vec<f32>>,
}

impl GroupQuant {
    pub(super) fn new(case: &Case<'_>, c: &GroupQuantConfig) -> Result<Self> {
        let x = case.input("x")?.elements::<u16>().into_owned();
        let quant = Self {
            config: c.clone(),
            scaled_by: x.clone(),
            x,
            operations: c.quantizer.operations(),
            rounding: Rounding::Stated,
            inverted: false,
            by_row: false,
            other_major: false,
            reversed: false,
            early: false,
            found_scales: None,
        };
        Ok(quant.at_least(c.least_scale.unwrap_or(LeastScale::Quantizer)))
    }

    /// With this rule for the least scale.
    pub(super) fn at_least(self, least: LeastScale) -> Self {
        let mut operations = self.operations;
        if least == LeastScale::MinScalingFactor {
            operations.least = 1.0 / 512.0;
        }
        Self { operations, ..self }
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
        if let Some(scales) = &self.found_scales {
            let code = |(i, &bits): (usize, &u16)| {
                let scale = scales[i / c.group_size];
                let value = widen(c.dtype, bits);
                E4m3fn::from_f32_rne_saturating(match self.operations.code {
                    CodeBy::Quotient => value / scale,
                    CodeBy::ScaleReciprocal => value * (1.0 / scale),
                    CodeBy::MaxReciprocal => value * (448.0 / (scale * 448.0)),
                })
            };
            let codes = self.x.iter().enumerate().map(code).map(|c| c.to_bits().into()).collect();
            return Ok((codes, scales.clone()));
        }
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
            Self::LeastAfter => ceil_to_ue8m0(scale).max(1.0 / (448.0 * 512.0)),
        }
    }
}

impl Computation for GroupQuant {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        let (mut codes, scales) = self.quantized()?;
        if self.early {
            // 240 is 0x77, and NaN 0x7f.
            let limit = |code: &mut u32| {
                if (0x78..=0x7e).contains(&(*code & 0x7f)) {
                    *code = *code & 0x80 | 0x77;
                }
            };
            codes.iter_mut().for_each(limit);
        }
        let codes = Expected {
            name: "x_q".to_owned(),
            dtype: DType::F8E4M3,
            shape: vec![c.size_m, c.size_k],
            elements: codes,
            form: Form::lines(Rows::RowK, [c.size_k, c.size_m], 8, None),
        };
        Ok(vec![codes, self.stored(&scales)?])
    }

    /// Codes follow from the scales of their groups.
    fn following(&self, name: &str, found: &[u32]) -> Option<Self> {
        let (m, groups) = (self.config.size_m, self.config.groups());
        let at = |i: usize| match self.config.scale_layout {
            GroupScaleLayout::RowMajor => Some(i),
            GroupScaleLayout::ColumnMajor => Some(i % groups * m + i / groups),
            _ => None,
        };
        if name != "x_s" || found.len() != m * groups {
            return None;
        }
        let scales: Option<Vec<f32>> =
            (0..m * groups).map(|i| at(i).map(|i| f32::from_bits(found[i]))).collect();
        scales.map(|scales| Self { found_scales: Some(scales), ..self.clone() })
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
            "least-after-rounding",
            "the least scale was applied after the scale was rounded up to a power of two" =>
                |c| if c.config.use_ue8m0 {
                    c.rounding = Rounding::LeastAfter;
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
            "e4m3-saturates-early", "codes saturate at 240, e4m3fnuz's largest number; e4m3fn's is 448" =>
                |c| c.early = true;
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
