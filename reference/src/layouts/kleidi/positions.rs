//! The rows of KleidiAI's operands in the list of layouts.

use super::{LhsLayout, LhsPart, RhsLayout, RhsPart};
use crate::Result;
use crate::layouts::positions::{Named, Part, Positions, Request, Value};
use crate::num::dims::{GroupSize, Shape};

pub(in crate::layouts) const ALL: &[Named] = &[
    Named {
        name: "kleidi_rhs",
        title: "KleidiAI: int4 weight",
        options: &["block"],
        one: kleidi_rhs,
    },
    Named {
        name: "kleidi_lhs",
        title: "KleidiAI: int8 activations",
        options: &["block"],
        one: kleidi_lhs,
    },
];

fn kleidi_rhs(r: &Request) -> Result<Positions> {
    let shape = Shape { size_k: r.size_k, size_n: r.size_n };
    let layout = RhsLayout::new(shape, GroupSize::from_config(r.group_size)?, r.block)?;
    let mut values = Vec::new();
    let (mut byte, mut bit) = (0, 0);
    while byte < layout.packed_len() {
        let place = layout.locate(byte, bit);
        let (part, row) = match place.part {
            RhsPart::Code { k } => (Part::Code, k),
            RhsPart::Scale { group } => (Part::Scale, group),
            RhsPart::Sum => (Part::Sum, 0),
            RhsPart::Bias => (Part::Bias, 0),
        };
        let inside = place.column < r.size_n && (part != Part::Code || row < r.size_k);
        values.push(Value {
            element: byte,
            bit,
            width: place.bits,
            part: if inside { part } else { Part::Padding },
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

fn kleidi_lhs(r: &Request) -> Result<Positions> {
    let layout = LhsLayout::new(r.size_n, r.size_k, r.block)?;
    let mut values = Vec::new();
    let mut byte = 0;
    while byte < layout.packed_len() {
        let place = layout.locate(byte);
        let (part, row) = match place.part {
            LhsPart::Code { k } => (Part::Code, k),
            LhsPart::ZeroPoint => (Part::ZeroPoint, 0),
            LhsPart::Reciprocal => (Part::Sum, 0),
        };
        let inside = place.row < r.size_n && (part != Part::Code || row < r.size_k);
        values.push(Value {
            element: byte,
            bit: 0,
            width: place.bytes as u32 * 8,
            part: if inside { part } else { Part::Padding },
            expert: 0,
            row,
            col: place.row,
            fragment: None,
        });
        byte += place.bytes;
    }
    let packed_shape = [layout.blocks(), layout.block_bytes()];
    Ok(Positions { packed_shape, element_bits: 8, shape: [r.size_k, r.size_n], values })
}
