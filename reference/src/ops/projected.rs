//! Conversion of stacks of 4-bit experts into a kernel's layout.

use super::computation::{Expected, Form, codes};
use super::interleaving::Interleaving;
use crate::Result;
use crate::judge::compare::{Elements, Rows};
use crate::layouts::Layout;
use crate::layouts::block_scale::BlockScaleLayout;
pub(super) use crate::layouts::{
    Alphas, ExpertBackend, ExpertLayout, Forgotten, Projection, activation_scales,
};
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Groups, Table, Weight};

/// One projection of a stack during its conversion into a kernel's layout.
#[derive(Debug, Clone)]
pub(super) struct Projected {
    /// Names of the outputs.
    pub(super) weights: String,
    pub(super) scales: String,
    pub(super) layout: ExpertLayout,
    pub(super) given: Vec<Weight<'static>>,
    pub(super) interleaving: Interleaving,
    /// Shapes of the outputs.
    pub(super) shapes: [Vec<usize>; 2],
}

impl Projected {
    fn outputs(&self) -> Result<[Expected; 2]> {
        let packed = self.layout.pack(&self.given)?;
        let (weights, scales) = (self.layout.weights(), self.layout.scales());
        let inner = self.layout.shape();
        let padded = weights.shape();
        let [scale_rows, scale_cols] = scales.packed_shape();
        let elements = match self.interleaving {
            Interleaving::Once => packed.scales.iter_bits().collect(),
            other => {
                let mut all = Elements::new();
                for e in 0..packed.experts {
                    let rows = e * scale_rows..(e + 1) * scale_rows;
                    let table = scales.unpack(&packed.scales.slice_rows(rows)?)?;
                    // In the kernel's order of rows, before the interleaving.
                    let order: Vec<usize> = weights.rows().sources();
                    let [groups, size_n] = scales.shape();
                    let plain = BlockScaleLayout::new(groups, size_n, scales.tile(), scales.ty())?;
                    all.extend(other.pack(&plain, &table.gather_columns(&order)?)?);
                }
                all
            }
        };
        let dtype = if scales.ty() == ScalarType::BFLOAT16 { DType::BF16 } else { DType::F8E4M3 };
        let experts = self.given.len();
        let form = |layout: Box<dyn Layout>, matrix, inside, rows, width| Form {
            layout,
            matrix,
            inside,
            rows,
            width,
            experts,
            stacked: true,
        };
        Ok([
            Expected {
                name: self.weights.clone(),
                dtype: DType::U8,
                shape: self.shapes[0].clone(),
                elements: packed.weights.iter().map(|&b| b.into()).collect(),
                form: form(
                    Box::new(weights.clone()),
                    [padded.size_k, padded.size_n],
                    [inner.size_k, inner.size_n],
                    Rows::K,
                    4,
                ),
            },
            Expected {
                name: self.scales.clone(),
                dtype,
                shape: self.shapes[1].clone(),
                elements,
                form: form(
                    Box::new(scales.clone()),
                    [scale_cols, scale_rows],
                    [inner.size_k / self.layout.group_size(), inner.size_n],
                    Rows::Group,
                    scales.ty().storage_bits(),
                ),
            },
        ])
    }

    pub(super) fn forget(&mut self, step: Forgotten) {
        if let Ok(layout) = self.layout.without(step) {
            self.layout = layout;
        }
    }

    pub(super) fn map_codes(&mut self, change: impl Fn(u32) -> u32) {
        for weight in &mut self.given {
            let words: Vec<u32> = weight.codes.words().iter().map(|&w| change(w)).collect();
            let (bits, shape) = (weight.codes.bits(), weight.codes.shape());
            if let Ok(codes) = crate::weight::Codes::from_words(bits, shape, words) {
                weight.codes = codes;
            }
        }
    }
}

/// A stack's matrices: codes of 4 bits `[E, N, K / 2]` bytes or words, scales `[E, N, groups]`.
pub(super) fn stack(
    weights: &Tensor<'_>,
    scales: &Tensor<'_>,
    layout: &ExpertLayout,
    (ty, scale, group): (ScalarType, ScalarType, usize),
) -> Result<Vec<Weight<'static>>> {
    let experts = weights.shape().first().copied().unwrap_or(0);
    let one = |e: usize| {
        let (codes_of, scales_of) = (weights.index0(e)?, scales.index0(e)?);
        Ok(Weight {
            name: codes_of.name().to_owned(),
            ty,
            codes: codes(&codes_of, 4, layout.shape())?,
            scales: Table::from_tensor(&scales_of, scale)?.transposed(),
            zeros: None,
            groups: Groups::Uniform(GroupSize::Of(group)),
            global_scale: None,
            bias: None,
        })
    };
    (0..experts).map(one).collect()
}

pub(super) fn swap_nibbles(word: u32) -> u32 {
    (word & 0x0f0f_0f0f) << 4 | word >> 4 & 0x0f0f_0f0f
}

/// Both projections of a stack of experts.
#[derive(Debug, Clone)]
pub(super) struct Experts {
    pub(super) projections: Vec<Projected>,
}

impl Experts {
    pub(super) fn each(&mut self, change: impl Fn(&mut Projected)) {
        self.projections.iter_mut().for_each(change);
    }

    pub(super) fn outputs(&self) -> Result<Vec<Expected>> {
        let both: Vec<_> =
            self.projections.iter().map(Projected::outputs).collect::<Result<_>>()?;
        Ok(both.into_iter().flatten().collect())
    }
}
