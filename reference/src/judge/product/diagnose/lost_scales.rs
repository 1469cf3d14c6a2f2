//! Known mistakes with small block scales, which a kernel reads as zero.

use super::Suspect;
use super::scene::Scene;
use crate::layouts::marlin::e4m3_scale_factor;
use crate::num::scalar::{ScalarType, e4m3fn_to_f32};
use crate::weight::{Codes, Weight};

/// Below this number, a block scale times its power of two has no code in Marlin's format.
const SMALLEST: f32 = 1.0 / 64.0;

/// Every mistake that is possible for the product.
pub(super) fn suspects<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let scales = || scene.stage.parts.iter().map(|part| &part.weight.scales);
    let Some(ty) = scales().next().map(|s| s.ty()) else { return Vec::new() };
    match ty {
        ScalarType::FLOAT8_E8M0FNU => {
            let text = "block scales of 2^-127 (e8m0 code 0) were read as zero, as where the code is \
                        moved into the exponent of a wider float, in which exponent 0 is not a power \
                        of two";
            zeroed(scene, "e8m0-code-0-as-zero", text, |bits| bits == 0).into_iter().collect()
        }
        ScalarType::FLOAT8_E4M3FN => {
            let text = "small e4m3 block scales were lost while packing: the kernel's format has no \
                        code below 2^-6 after the power of two that scales are multiplied by";
            let all = scales().flat_map(|s| s.iter_bits().map(|bits| bits as u8));
            // Upstream multiplies by 1 or by the largest power of two that fits.
            let mut factors = vec![1.0, e4m3_scale_factor(all, ScalarType::BFLOAT16)];
            factors.dedup();
            let lost = |factor: f32| {
                zeroed(scene, "block-scales-flushed", text, move |bits| {
                    let scale = e4m3fn_to_f32(bits as u8);
                    scale > 0.0 && scale * factor < SMALLEST
                })
            };
            factors.into_iter().filter_map(lost).collect()
        }
        _ => Vec::new(),
    }
}

/// Blocks with some scales become zero; `None` if no scale is one of them.
fn zeroed<'s>(
    scene: &'s Scene<'s>,
    id: &'static str,
    text: &str,
    lost: impl Fn(u32) -> bool + Copy + Sync + 's,
) -> Option<Suspect<'s>> {
    let has = |weight: &Weight<'_>| weight.scales.iter_bits().any(lost);
    if !scene.stage.parts.iter().any(|part| has(part.weight)) {
        return None;
    }
    Some(Suspect::new(id, text, move |part| {
        scene.changed(part, |w| {
            let (codes, groups, scales) = (&w.codes, &w.groups, &w.scales);
            // Code 0 is the number 0 in the formats that have such scales.
            let code = |k: usize, n: usize| match lost(scales.bits(groups.group_of(k), n)) {
                true => 0,
                false => codes.get(k, n),
            };
            w.codes = Codes::from_fn(codes.bits(), codes.shape(), code).ok()?;
            Some(())
        })
    }))
}
