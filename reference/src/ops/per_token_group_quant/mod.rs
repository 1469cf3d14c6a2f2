//! Quantization of activations to e4m3fn with a scale for each group of k of a row.

mod computation;

use serde_json::{Value, json};

use computation::GroupQuant;

use crate::Result;
use crate::judge::{Declared, OutputReport, Verdict};
use crate::layouts::Layout as _;
use crate::layouts::deepgemm::{MnMajorScales, ScaleForm};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Defined, bitwise, ids};
use crate::ops::draw::{Rng, activations};
use crate::ops::quant::keys::divisible;
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule, finite, stored};
use crate::ops::tensors::{E4M3, F32, FLAGS, HALF, HALF_TYPES, I32, input, is, name_of, output};
use crate::ops::{CaseConfig, Operation};
use crate::quantize::Fp8GroupRule;

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

/// The least magnitude of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeastScale {
    /// That of the `quantizer`.
    Quantizer,
    /// 1 / 512, so that no scale is below 1 / (448 · 512) before it is rounded up: vLLM's
    /// `min_scaling_factor`.
    MinScalingFactor,
}

impl LeastScale {
    /// Every rule with its name.
    pub const NAMED: &'static [(&'static str, Self)] =
        &[("quantizer", Self::Quantizer), ("1/(448*512)", Self::MinScalingFactor)];
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
    /// The least scale; `None` accepts either rule.
    pub least_scale: Option<LeastScale>,
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
        &[
            "dtype",
            "size_m",
            "size_k",
            "group_size",
            "quantizer",
            "use_ue8m0",
            "scale_layout",
            "least_scale",
        ]
    }

    fn key_meanings() -> &'static [(&'static str, &'static str)] {
        &[("least_scale", "the least scale of a group; without it, either rule is accepted")]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let use_ue8m0 = r.flag("use_ue8m0", false)?;
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.count("size_m")?,
            size_k: r.size("size_k")?,
            group_size: r.optional_size("group_size")?.unwrap_or(128),
            quantizer: r.optional_name("quantizer", Fp8GroupRule::NAMED)?.unwrap_or_default(),
            use_ue8m0,
            scale_layout: r
                .optional_name("scale_layout", GroupScaleLayout::NAMED)?
                .unwrap_or_default(),
            least_scale: r.optional_name("least_scale", LeastScale::NAMED)?,
        };
        divisible("size_k", config.size_k, config.group_size, "whole groups")?;
        if config.scale_layout == GroupScaleLayout::PackedUe8m0 && !use_ue8m0 {
            return Err(r.refuse("use_ue8m0", false, "true, for scale_layout packed_ue8m0"));
        }
        Ok(config)
    }

    fn json(&self) -> Value {
        let mut v = json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_k": self.size_k,
            "group_size": self.group_size,
            "quantizer": name_of(Fp8GroupRule::NAMED, &self.quantizer),
            "use_ue8m0": self.use_ue8m0,
            "scale_layout": name_of(GroupScaleLayout::NAMED, &self.scale_layout),
        });
        if let Some(least) = &self.least_scale {
            v["least_scale"] = name_of(LeastScale::NAMED, least).into();
        }
        v
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
                                least_scale: Some(LeastScale::Quantizer),
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
        if let (GroupScaleLayout::TmaAligned, Some(found)) = (self.scale_layout, case.output("x_s"))
        {
            let mut case = case.clone();
            case.add_output("x_s", self.without_padding(found)?);
            return self.judge_least(&case, quant);
        }
        self.judge_least(case, quant)
    }

    fn fixes_every_bit(&self) -> bool {
        self.least_scale.is_some()
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        Some((Self { size_m: 1, ..self.clone() }.into(), &["x"]))
    }
}

impl GroupQuantConfig {
    /// Judges by the stated least scale, or by the one that all outputs follow.
    fn judge_least(&self, case: &Case<'_>, quant: GroupQuant) -> Result<Vec<OutputReport>> {
        let reports = bitwise(case, &quant)?;
        let is_right = |all: &[OutputReport]| all.iter().all(|r| r.verdict == Verdict::Pass);
        if self.least_scale.is_some() || is_right(&reports) {
            return Ok(reports);
        }
        let mut others = bitwise(case, &quant.at_least(LeastScale::MinScalingFactor))?;
        if !is_right(&others) {
            return Ok(reports);
        }
        let note = "scales are at least 1 / (448 * 512), vLLM's min_scaling_factor";
        others.iter_mut().for_each(|report| report.add_note(note));
        Ok(others)
    }

    /// Scales whose padding, which upstream leaves unset, is zero.
    fn without_padding(&self, scales: &Tensor<'_>) -> Result<Tensor<'static>> {
        let cols = self.scales()?[1];
        let values = scales.elements::<f32>();
        let inside = |(i, &v): (usize, &f32)| if i % cols < self.size_m { v } else { 0.0 };
        let values = values.iter().enumerate().map(inside).collect();
        Tensor::from_vec(scales.name(), DType::F32, scales.shape().to_vec(), values)
    }
}
