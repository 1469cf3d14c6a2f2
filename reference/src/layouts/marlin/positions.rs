//! The rows of Marlin's tensors in the list of layouts.

use super::{Activations, ScaleLayout, ScalePermutation, WeightLayout, ZeroPointLayout};
use crate::layouts::positions::{Named, Part, Positions, Request, values};
use crate::num::dims::{GroupSize, LogicalK, Shape};
use crate::num::scalar::ScalarType;
use crate::{Error, Result, act_order};

pub(in crate::layouts) const ALL: &[Named] = &[
    Named {
        name: "marlin_qweight",
        title: "Marlin: packed weight",
        options: &["bits", "activation_bits", "act_order"],
        one: |r| {
            let shape = Shape { size_k: r.size_k, size_n: r.size_n };
            let layout = WeightLayout::new(shape, r.bits, activations(r)?)?;
            let mut all = values(&layout, 32, [r.size_k, r.size_n], Part::Code)?;
            if r.act_order {
                let order = act_order::sort(&r.g_idx()?);
                all.values.iter_mut().for_each(|v| v.row = order.perm[v.row] as usize);
            }
            Ok(all)
        },
    },
    Named {
        name: "marlin_scales",
        title: "Marlin: scales of 16 bits",
        options: &["activation_bits"],
        one: |r| scales(r, |layout, _| (layout, 16)),
    },
    Named {
        name: "marlin_scales_8bit",
        title: "Marlin: scales of 8 bits (e8m0, e4m3)",
        options: &["activation_bits"],
        one: |r| scales(r, |layout, activations| (layout.of_bytes(activations), 8)),
    },
    Named {
        name: "marlin_zeros",
        title: "Marlin: zero points",
        options: &["bits", "activation_bits"],
        one: |r| {
            let groups = r.groups()?;
            let layout = ZeroPointLayout::new(groups, r.size_n, r.bits, activations(r)?)?;
            values(&layout, 32, [groups, r.size_n], Part::ZeroPoint)
        },
    },
    Named {
        name: "marlin_bias",
        title: "Marlin: bias",
        options: &[],
        one: |r| {
            let layout = ScaleLayout::bias(r.size_n, ScalarType::BFLOAT16)?;
            values(&layout, 16, [1, r.size_n], Part::Bias)
        },
    },
];

fn activations(r: &Request) -> Result<Activations> {
    match r.activation_bits {
        16 => Ok(Activations::Bits16),
        8 => Ok(Activations::Bits8),
        bits => Err(Error::size("activation_bits", bits, "16 or 8")),
    }
}

fn scales(
    r: &Request,
    change: fn(ScaleLayout, Activations) -> (ScaleLayout, u32),
) -> Result<Positions> {
    let (groups, size) = (r.groups()?, GroupSize::from_config(r.group_size)?);
    let activations = activations(r)?;
    let order = ScalePermutation::choose(size, LogicalK(r.size_k), activations);
    let layout = ScaleLayout::new(groups, r.size_n, order, ScalarType::BFLOAT16)?;
    let (layout, bits) = change(layout, activations);
    values(&layout, bits, [groups, r.size_n], Part::Scale)
}
