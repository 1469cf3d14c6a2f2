//! The layout in the list of layouts.

use super::{E2m1Layout, E2m1Part};
use crate::Result;
use crate::layouts::positions::{Named, Part, Positions, Request, Value};
use crate::num::dims::Shape;

pub(in crate::layouts) const ALL: &[Named] =
    &[Named { name: super::name!(), title: super::VIEW, options: &[], one: all_positions }];

fn all_positions(r: &Request) -> Result<Positions> {
    let layout = E2m1Layout::new(Shape::new(r.size_k, r.size_n))?;
    let mut values = Vec::new();
    let (mut byte, mut bit) = (0, 0);
    while byte < layout.packed_len() {
        let place = layout.locate(byte, bit);
        let (part, row) = match place.part {
            E2m1Part::Code { k } => (Part::Code, k),
            E2m1Part::Scale { group } => (Part::Scale, group),
            E2m1Part::Bias => (Part::Bias, 0),
        };
        values.push(Value {
            element: byte,
            bit,
            width: place.bits,
            part: if place.column < r.size_n { part } else { Part::Padding },
            expert: 0,
            row,
            col: place.column,
            fragment: None,
        });
        bit += place.bits;
        (byte, bit) = (byte + (bit / 8) as usize, bit % 8);
    }
    let packed_shape = [layout.blocks(), layout.block_bytes()];
    Ok(Positions { packed_shape, element_bits: 8, shape: [r.size_k, r.size_n], values })
}
