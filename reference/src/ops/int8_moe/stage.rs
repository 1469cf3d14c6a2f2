//! One product of the layer.

use super::{Int8Moe, RowScale};
use crate::Result;
use crate::judge::compare::Elements;
use crate::judge::mistake::KnownMistake;
use crate::judge::power::{Accepted, rejects_sample};
use crate::method::Activations;
use crate::num::scalar::ScalarType;
use crate::ops::bounded::BoundedProduct;
use crate::ops::computation::{Computation, Expected, Mistake};
use crate::products::{Bounded, Int8Epilogue, Int8Product};

/// Number of rows on which a missing half of k is tested.
const SAMPLE_ROWS: usize = 2;

/// Rows times w13 or w2 of their experts, with their router weights where this product has them.
#[derive(Debug, Clone)]
pub(super) struct Stage {
    pub(super) layer: Int8Moe,
    /// 0: w13, 1: w2.
    pub(super) which: usize,
    /// A row for each slot of the layer.
    pub(super) rows: Activations,
    /// The slots that are computed.
    pub(super) slots: Vec<usize>,
}

impl Stage {
    fn size_n(&self) -> usize {
        self.layer.weights[self.which].first().map_or(1, |w| w.shape().size_n)
    }

    /// The scale of a slot's row.
    fn scale(&self, slot: usize) -> f32 {
        let top_k = self.layer.config.top_k;
        match (self.layer.row_scale, self.which) {
            (RowScale::First, _) => self.rows.scale(0, 0),
            (RowScale::Slot, 0) => self.rows.scale(slot * top_k % self.rows.rows(), 0),
            _ => self.rows.scale(slot, 0),
        }
    }

    /// What `make` makes of each expert's rows, `[slots, N]`; `none` in rows without an expert.
    fn each<T: Copy>(
        &self,
        none: T,
        make: impl Fn(&Int8Product<'_>) -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        let (layer, size_n) = (&self.layer, self.size_n());
        let experts = layer.local_experts()?;
        let routed = layer.weights_product(self.which);
        let mut out = vec![none; self.slots.len() * size_n];
        for (e, weight) in layer.weights[self.which].iter().enumerate() {
            let is_mine = |(_, slot): &(usize, &usize)| experts[**slot] == Some(e);
            let (mine, slots): (Vec<usize>, Vec<usize>) =
                self.slots.iter().enumerate().filter(is_mine).unzip();
            let codes = slots.iter().flat_map(|&slot| self.rows.row(slot));
            let a: Vec<i8> = codes.map(|&code| code as u8 as i8).collect();
            let a_scales: Vec<f32> = slots.iter().map(|&slot| self.scale(slot)).collect();
            let router: Vec<f32> = slots.iter().map(|&slot| layer.topk_weights[slot]).collect();
            let made = make(&Int8Product {
                a: &a,
                a_scales: &a_scales,
                weight,
                router_weights: routed.then_some(&router),
                dtype: layer.config.dtype,
            })?;
            for (&row, values) in mine.iter().zip(made.chunks_exact(size_n)) {
                out[row * size_n..][..size_n].copy_from_slice(values);
            }
        }
        Ok(out)
    }

    /// The bits of `fused_moe_kernel` with int32 sums of `size` k.
    pub(super) fn bits_in_blocks(&self, size: usize) -> Result<Elements> {
        self.each(0, |part| Ok(part.outputs_of(&part.block_sums(size)?, Int8Epilogue::Triton)))
    }

    /// The bits of the layer's kernel.
    pub(super) fn bits(&self) -> Result<Elements> {
        self.bits_in_blocks(self.layer.block)
    }
}

impl Computation for Stage {
    fn outputs(&self) -> Result<Vec<Expected>> {
        Ok(vec![self.layer.half(self.name(), self.size_n(), self.bits()?)])
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        let of_stage = |mistake: Mistake<Int8Moe>| {
            KnownMistake::new(mistake.id, mistake.text.clone(), move |stage: Self| {
                let layer = (mistake.make)(stage.layer)?;
                Some(Self { layer, ..stage })
            })
        };
        Int8Moe::mistakes().into_iter().map(of_stage).collect()
    }
}

impl BoundedProduct for Stage {
    const CLASS: &'static str = "int32 sums of 16 k or more, added in f32 in any order, \
                                 f32 scales in any order";

    const REMEDY: &'static str =
        "declare the kernel's int32 sums: `block_size_k` in the case's config";

    fn name(&self) -> &'static str {
        ["gate_up", "down"][self.which]
    }

    fn dtype(&self) -> ScalarType {
        self.layer.config.dtype
    }

    fn size_n(&self) -> usize {
        Self::size_n(self)
    }

    fn bounds(&self) -> Result<Vec<Bounded>> {
        self.each(Bounded::ZERO, |part| part.block_bounds())
    }

    fn rejects_half_k(&self, accepted: &[Accepted]) -> Result<Option<bool>> {
        let experts = self.layer.local_experts()?;
        let mut half = self.clone();
        half.slots.retain(|&slot| experts[slot].is_some());
        half.slots.truncate(SAMPLE_ROWS);
        let size_k = half.rows.size_k;
        half.rows.codes.chunks_exact_mut(size_k).for_each(|row| row[..size_k / 2].fill(0));
        let size_n = self.size_n();
        let of_rows = half.slots.iter().flat_map(|slot| &accepted[slot * size_n..][..size_n]);
        let made = half.bounds()?;
        let made = made.iter().map(Accepted::from);
        Ok(rejects_sample(self.dtype(), made.zip(of_rows.copied())))
    }
}
