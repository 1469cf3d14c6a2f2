//! Known mistakes with the codes and zero points of a whole matrix.

use super::Suspect;
use super::scene::Scene;
use crate::formats;
use crate::formats::integers::Interleave;
use crate::formats::mistake::MistakeName;
use crate::num::scalar::ScalarType;
use crate::weight::{Codes, Table, TableData, Weight};

/// Zero points.
pub(super) fn zeros<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let texts = [
        (
            1i32,
            "the zero points are one too high (GPTQ v2's zeros taken for v1's, which are stored \
                less one)",
        ),
        (-1, "the zero points are one too low (GPTQ v1's zeros, stored less one, taken for v2's)"),
    ];
    let mut all: Vec<Suspect<'s>> = texts
        .into_iter()
        .map(|(step, text)| {
            Suspect::new("zero-off-by-one", text, move |part| {
                scene.changed(part, |w| shift_zeros(w, step))
            })
        })
        .collect();
    if scene.stage.parts.iter().all(|p| p.weight.zeros.is_some()) {
        for (MistakeName { id, text }, map) in column_mistakes() {
            let text = format!("of the zero points, {text}");
            all.push(Suspect::new(id, text, move |part| {
                scene.changed(part, |w| {
                    let zeros = w.zeros.as_ref()?;
                    w.zeros = Some(zeros.permute_columns(&map).ok()?);
                    Some(())
                })
            }));
        }
        all.push(Suspect::new(
            "zero-off-by-one",
            "the zero points are one too high, 16 among them (GPTQ v2's zeros taken for v1's)",
            move |part| {
                scene.changed(part, |w| {
                    w.zeros = Some(w.zeros.as_ref()?.map(ScalarType::UINT8, |z| z + 1));
                    Some(())
                })
            },
        ));
        all.push(Suspect::new(
            "zeros-missing",
            "the zero points were ignored: 8 was subtracted",
            move |part| {
                scene.changed(part, |w| {
                    w.zeros = Some(w.zeros.as_ref()?.map(ScalarType::UINT8, |_| 8));
                    Some(())
                })
            },
        ));
        all.push(Suspect::new(
            "zeros-missing",
            "the zero points were not subtracted",
            move |part| {
                scene.changed(part, |w| {
                    w.zeros = Some(w.zeros.as_ref()?.map(ScalarType::UINT8, |_| 0));
                    Some(())
                })
            },
        ));
    }
    all
}

/// Adds `step` to every zero point, or to the fixed offset of the type.
fn shift_zeros(weight: &mut Weight<'_>, step: i32) -> Option<()> {
    let (ty, fixed) = match weight.ty {
        ScalarType::UINT4B8 => (ScalarType::UINT4, 8),
        ScalarType::UINT8B128 => (ScalarType::UINT8, 128),
        ScalarType::UINT4 | ScalarType::UINT8 => (weight.ty, 0),
        _ => return None,
    };
    let (rows, cols) = (weight.scales.rows(), weight.scales.cols());
    let old: Vec<i32> = match &weight.zeros {
        Some(zeros) => zeros.iter_bits().map(|z| z as i32).collect(),
        None => vec![fixed; rows * cols],
    };
    // A zero point of 0 minus one wraps around.
    let mask = if weight.codes.bits() == 4 { 15 } else { 255 };
    let moved = old.iter().map(|z| ((z + step) & mask) as u8).collect();
    weight.ty = ty;
    weight.zeros = Some(Table::new(ScalarType::UINT8, rows, cols, TableData::B8(moved)).ok()?);
    Some(())
}

/// Wrong inverses of a format's column order: column c becomes column `map[c]`.
fn column_mistakes() -> impl Iterator<Item = (MistakeName, [usize; 8])> {
    formats::interleaves().flat_map(Interleave::product_mistakes)
}

/// Codes.
pub(super) fn codes<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let mut all = Vec::new();
    let recode = move |part: usize, wrong: &dyn Fn(&Codes<'_>) -> Codes<'static>| {
        scene.changed(part, |w| {
            w.codes = wrong(&w.codes);
            Some(())
        })
    };
    // In each word, the value that place p of `pack` takes.
    let in_words = move |part: usize, from: fn(usize, usize) -> usize| {
        recode(part, &|codes| {
            let pack = codes.pack();
            codes.reordered(&(0..pack).map(|p| from(p, pack)).collect::<Vec<_>>())
        })
    };
    if scene.stage.parts.iter().all(|p| p.weight.zeros.is_some()) {
        for (MistakeName { id, text }, map) in column_mistakes() {
            let both = format!("{text}, in weights and zero points");
            let wrong = move |codes: &Codes<'_>| {
                let columns = (0..codes.shape().size_n).map(|n| n / 8 * 8 + map[n % 8]);
                codes.gather_columns(&columns.collect::<Vec<_>>())
            };
            all.push(Suspect::new(id, format!("of the weights, {text}"), move |part| {
                recode(part, &wrong)
            }));
            all.push(Suspect::new(id, both, move |part| {
                let mut setup = recode(part, &wrong)?;
                let weight = setup.weight.to_mut();
                weight.zeros = Some(weight.zeros.as_ref()?.permute_columns(&map).ok()?);
                Some(setup)
            }));
        }
    }
    let four = scene.stage.parts.iter().all(|p| p.weight.codes.bits() == 4);
    if four {
        all.push(Suspect::new(
            "nibbles-swapped",
            "the two nibbles of a byte are exchanged: even k were read from the high one",
            move |part| in_words(part, |p, _| p ^ 1),
        ));
    }
    all.push(Suspect::new(
        "words-reversed",
        "the values of a word were read from the high end",
        move |part| in_words(part, |p, pack| pack - 1 - p),
    ));
    all.push(Suspect::new(
        "interleave-not-undone",
        "the interleave of values in a packed word was not undone",
        // Even values first.
        move |part| in_words(part, |p, pack| 2 * p % pack + 2 * p / pack),
    ));
    all
}
