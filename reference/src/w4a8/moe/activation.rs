//! The activation between the products.

use crate::moe::activation::{ALPHA, Activation, Columns, Definition, LIMIT};
use crate::moe::math;
use crate::num::scalar::ScalarType;
use crate::w4a8::Values;
use crate::w4a8::rows::Element;
use crate::w4a8::wide::Loop;
use crate::{Error, Result};

/// The activation between the products: upstream's operator's, or a family's. Gate is the first half
/// of a row, up the second.
///
/// The exponential is [`math::exp`]; its last bit may differ from upstream's vector functions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GatedActivation {
    /// g / (1 + e^−g) · u in f32, rounded once.
    Silu,
    /// (clamp(u, ±7) + 1) · (min(g, 7) · sigmoid(1.702 · min(g, 7))), each operation rounded to the
    /// activations' type. Gate and up are halves, although gpt-oss checkpoints interleave them.
    SwigluOai,
    /// [`Definition::canonical`] in f32, rounded once. Gate and up are halves.
    Family(Definition),
}

impl GatedActivation {
    /// Upstream's choice. `swiglustep` becomes plain SiLU, without its limits.
    pub fn of(activation: Activation) -> Option<Self> {
        match activation {
            Activation::Silu | Activation::SwigluStep => Some(Self::Silu),
            Activation::SwigluOai => Some(Self::SwigluOai),
            _ => None,
        }
    }

    /// The activation of a family. Plain SiLU is [`GatedActivation::Silu`], which has the same bits.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless gate and up are halves; as [`Definition::validate`].
    pub fn of_family(definition: Definition) -> Result<Self> {
        definition.validate()?;
        if definition.columns != Columns::Halves || definition.exchanged {
            let found = format!("columns {:?}", definition.columns);
            return Err(Error::unsupported(found, "expected gate and up as halves of w13"));
        }
        let silu = definition == Definition::new(Activation::Silu);
        Ok(if silu { Self::Silu } else { Self::Family(definition) })
    }

    /// `[M, I]` of `gate_up` `[M, 2I]`, in its type.
    ///
    /// # Errors
    /// [`Error::Shape`] unless `gate_up` is a whole number of rows.
    pub fn apply(self, gate_up: &Values, size_i: usize) -> Result<Values> {
        if size_i == 0 || !gate_up.len().is_multiple_of(2 * size_i) {
            let rule = format!("[M, {}], I 1 or more", 2 * size_i);
            return Err(Error::shape("gate_up", &[gate_up.len()], rule));
        }
        let ty = gate_up.ty();
        let rows = gate_up.to_f32();
        let activated = rows.chunks_exact(2 * size_i).flat_map(|row| {
            let (gate, up) = row.split_at(size_i);
            gate.iter().zip(up).map(move |(&g, &u)| self.one(ty, g, u))
        });
        Values::from_f32(activated.collect(), ty)
    }

    fn one(self, ty: ScalarType, g: f32, u: f32) -> f32 {
        match self {
            Self::Silu => silu(g, u),
            Self::SwigluOai if ty == ScalarType::BFLOAT16 => swiglu_oai::<u16>(g, u),
            Self::SwigluOai => swiglu_oai::<f32>(g, u),
            Self::Family(definition) => definition.canonical(g, u),
        }
    }
}

/// Activates `gate` and `up` into `out`, all of one length. The products' f32 results are rounded to
/// `E` first, as for [`GatedActivation::apply`].
pub(super) struct Activate<'a, E> {
    pub(super) kind: GatedActivation,
    pub(super) gate: &'a [f32],
    pub(super) up: &'a [f32],
    pub(super) out: &'a mut [E],
}

impl<E: Element> Loop for Activate<'_, E> {
    #[inline(always)]
    fn run(self) {
        let pairs = self.gate.iter().zip(self.up).zip(self.out);
        match self.kind {
            GatedActivation::Silu => {
                for ((&g, &u), out) in pairs {
                    *out = E::narrow(silu(E::round(g), E::round(u)));
                }
            }
            GatedActivation::SwigluOai => {
                for ((&g, &u), out) in pairs {
                    *out = E::narrow(swiglu_oai::<E>(E::round(g), E::round(u)));
                }
            }
            GatedActivation::Family(definition) => {
                for ((&g, &u), out) in pairs {
                    *out = E::narrow(definition.canonical(E::round(g), E::round(u)));
                }
            }
        }
    }
}

#[inline(always)]
fn silu(g: f32, u: f32) -> f32 {
    g / (1.0 + math::exp(-g)) * u
}

#[inline(always)]
fn swiglu_oai<E: Element>(g: f32, u: f32) -> f32 {
    // These limits keep a NaN.
    let g = if g > LIMIT { LIMIT } else { g };
    let u = u.clamp(-LIMIT, LIMIT);
    let gate = E::round(g * E::round(math::sigmoid(E::round(g * ALPHA))));
    E::round(E::round(u + 1.0) * gate)
}
