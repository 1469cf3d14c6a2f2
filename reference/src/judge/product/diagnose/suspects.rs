//! Known mistakes with a whole matrix: codes, zero points, scales, bias, router weights or global
//! scales that are read differently from the format.

use std::borrow::Cow;

use super::Suspect;
use super::scene::{Routers, Scene, Setup};
use crate::formats;
use crate::formats::integers::Interleave;
use crate::formats::mistake::MistakeName;
use crate::layouts::marlin::{ScaleLayout, ScalePermutation};
use crate::num::interval::round_once;
use crate::num::scalar::ScalarType;
use crate::products::schedule::{Step, StepOp};
use crate::products::{Recipe, Rows};
use crate::weight::{Codes, Table, TableData, Weight};

/// Every suspect that makes sense for the product.
pub(super) fn suspects<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let mut all = routers(scene);
    all.extend(globals(scene));
    all.extend(biases(scene));
    all.extend(zeros(scene));
    all.extend(scales(scene));
    all.extend(codes(scene));
    all
}

/// The part's right product with another matrix.
fn with<'s>(
    scene: &'s Scene<'s>,
    part: usize,
    change: impl FnOnce(&mut Weight<'s>) -> Option<()>,
) -> Option<Setup<'s>> {
    let mut weight = scene.stage.parts[part].weight.clone();
    change(&mut weight)?;
    let right = scene.right(part);
    Some(Setup { weight: Cow::Owned(weight), ..right })
}

fn routers<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let extras = scene.stage.extras.router_weights;
    let mut all = Vec::new();
    if extras.is_some() {
        all.push(Suspect::new(
            "router-weight-missing",
            "router weights were not applied",
            |part| Some(Setup { routers: Routers::Missing, ..scene.right(part) }),
        ));
        all.push(Suspect::new(
            "router-weight-twice",
            "router weights were applied twice",
            |part| {
                let twice = |recipe: &mut Recipe| {
                    let router = [StepOp::RouterWeight, StepOp::RouterWeightGlobal];
                    let at = recipe.steps.iter().position(|s| router.contains(&s.op));
                    let at = at.unwrap_or(recipe.steps.len() - 1);
                    let ty = recipe.steps[at].ty;
                    recipe.steps.insert(at + 1, Step { op: StepOp::RouterWeight, ty });
                };
                Some(Setup { recipe: Some(twice), ..scene.right(part) })
            },
        ));
    } else if let Some(weights) = scene.stage.hints.router_weights {
        let text = "router weights multiply this product too, though the config applies them to the \
                    other one: they are applied twice, on input and on output";
        all.push(Suspect::new("router-weight-on-both", text, move |part| {
            Some(Setup { routers: Routers::These(weights.to_vec()), ..scene.right(part) })
        }));
        all.push(Suspect::new("router-weight-on-both", text, move |part| {
            let routers = Routers::These(weights.to_vec());
            Some(Setup { recipe: Some(unfold_global), routers, ..scene.right(part) })
        }));
        all.push(Suspect::new("router-weight-on-both", text, move |part| {
            let (rows, dtype) = (&scene.stage.rows, scene.stage.dtype);
            let times = |row: usize| {
                let weight = f64::from(weights[row]);
                rows.row(row).iter().map(move |x| round_once(dtype, x * weight))
            };
            let values = (0..rows.rows().min(weights.len())).flat_map(times).collect();
            let rows = Rows::new(rows.size_k(), values).ok()?;
            Some(Setup { rows: Some(rows), ..scene.right(part) })
        }));
    }
    all
}

fn globals<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let stage = scene.stage;
    let globals: Vec<Option<f32>> = stage.parts.iter().map(|p| p.weight.global_scale).collect();
    if globals.iter().any(Option::is_none) {
        return Vec::new();
    }
    let replace = move |part: usize, value: f32| {
        with(scene, part, |w| (w.global_scale != Some(value)).then(|| w.global_scale = Some(value)))
    };
    let mut all = vec![
        Suspect::new("global-scale-missing", "the global scale was not applied", move |part| {
            replace(part, 1.0)
        }),
        Suspect::new(
            "global-scale-inverted",
            "the global scale was applied the wrong way: multiplied where it divides, or divided \
             where it multiplies",
            move |part| replace(part, 1.0 / scene.stage.parts[part].weight.global_scale?),
        ),
        Suspect::new("global-scale-twice", "the global scale was applied twice", move |part| {
            replace(part, scene.stage.parts[part].weight.global_scale?.powi(2))
        }),
    ];
    // Experts may share a value; each value is tried once.
    let mut seen = Vec::new();
    for (part, global) in stage.parts.iter().zip(globals.into_iter().flatten()) {
        if stage.parts.len() > 1 && !seen.contains(&global) {
            seen.push(global);
            let text = format!("the global scale is that of expert {}", part.global);
            all.push(Suspect::new("global-scale-of-another-expert", text, move |part| {
                replace(part, global)
            }));
        }
    }
    // A kernel's sum is either the value itself or the value times 2^power.
    let ways: [fn(&mut Recipe); 3] = [
        round_early,
        |recipe| {
            recipe.power = 0;
            round_early(recipe);
        },
        |recipe| {
            recipe.power = -recipe.power;
            round_early(recipe);
        },
    ];
    for change in ways {
        let (id, text) = if scene.found.iter().any(|x| x.is_infinite()) {
            (
                "overflow-before-global-scale",
                "the sum was rounded to the output's type before the global scale was applied, and \
                 becomes infinite there",
            )
        } else {
            (
                "global-scale-after-rounding",
                "the sum was rounded to the output's type before the global scale was applied",
            )
        };
        all.push(Suspect::new(id, text, move |part| {
            Some(Setup { recipe: Some(change), ..scene.right(part) })
        }));
    }
    let biased = stage.parts.iter().any(|p| p.weight.bias.is_some());
    if biased && stage.extras.router_weights.is_some() {
        for MistakeName { id, text } in formats::BLOCK_FORMATS.iter().filter_map(|f| f.bias_scaled)
        {
            all.push(Suspect::new(id, text, move |part| {
                Some(Setup { recipe: Some(fold_global), ..scene.right(part) })
            }));
        }
    }
    all
}

/// Moves the multiplication by the global scale from before the bias into the router weight.
fn fold_global(recipe: &mut Recipe) {
    recipe.steps.retain(|s| s.op != StepOp::GlobalScale);
    for step in &mut recipe.steps {
        if step.op == StepOp::RouterWeight {
            step.op = StepOp::RouterWeightGlobal;
        }
    }
}

/// Moves the global scale out of the router weight, to its position without router weights.
fn unfold_global(recipe: &mut Recipe) {
    let folded = recipe.steps.iter_mut().find(|s| s.op == StepOp::RouterWeightGlobal);
    if let Some(step) = folded {
        step.op = StepOp::RouterWeight;
        recipe.steps.insert(0, Step { op: StepOp::GlobalScale, ty: ScalarType::FLOAT32 });
    }
}

/// Rounds the sum before the multiplication by the global scale.
fn round_early(recipe: &mut Recipe) {
    let round = Step { op: StepOp::Round, ty: recipe.dtype };
    if let Some(at) = recipe.steps.iter().position(|s| s.op == StepOp::GlobalScale) {
        recipe.steps.insert(at, round);
    }
}

fn biases<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    if scene.stage.parts.iter().any(|p| p.weight.bias.is_none()) {
        return Vec::new();
    }
    let twice = |recipe: &mut Recipe| {
        let steps = &mut recipe.steps;
        let at = steps.iter().position(|s| s.op == StepOp::Bias);
        if let Some(at) = at {
            steps.insert(at, steps[at]);
        }
    };
    let mut all = vec![
        Suspect::new("bias-missing", "the bias was not added", move |part| {
            with(scene, part, |w| w.bias.take().map(drop))
        }),
        Suspect::new("bias-twice", "the bias was added twice", move |part| {
            Some(Setup { recipe: Some(twice), ..scene.right(part) })
        }),
    ];
    let orders = [
        ("bias-not-permuted", "the bias was not brought into Marlin's order of columns", None),
        (
            "bias-other-permutation",
            "the bias was permuted as grouped scales are, instead of as single ones",
            Some(ScalePermutation::Grouped),
        ),
    ];
    for (id, text, packed) in orders {
        all.push(Suspect::new(id, text, move |part| {
            with(scene, part, |w| {
                let bias = w.bias.as_ref()?;
                w.bias = Some(misread(bias, packed, ScalePermutation::Single)?);
                Some(())
            })
        }));
    }
    for (e, other) in scene.stage.parts.iter().enumerate().filter(|_| scene.stage.parts.len() > 1) {
        let text = format!("the bias is that of expert {}", other.global);
        all.push(Suspect::new("bias-of-another-expert", text, move |part| {
            let bias = scene.stage.parts[e].weight.bias.clone();
            with(scene, part, |w| (part != e).then(|| w.bias = bias))
        }));
    }
    all
}

/// A table that was packed in one order of columns, or unpermuted, and is read in another.
fn misread(
    table: &Table,
    packed: Option<ScalePermutation>,
    read: ScalePermutation,
) -> Option<Table> {
    let layout = |order| ScaleLayout::new(table.rows(), table.cols(), order, table.ty()).ok();
    let packed = match packed {
        Some(order) => layout(order)?.pack(table).ok()?,
        None => table.clone(),
    };
    layout(read)?.unpack(&packed).ok()
}

fn scales<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    use ScalePermutation::{Grouped, Single};
    let int8 = scene.stage.extras.activation_scales.is_some();
    let grouped = scene.stage.parts.iter().any(|p| p.weight.scales.rows() > 1) && !int8;
    let read = if grouped { Grouped } else { Single };
    let other = match read {
        Grouped => {
            "the scales were permuted as those of whole columns are (single), instead of in \
                    groups (grouped)"
        }
        Single => {
            "the scales were permuted as group scales are (grouped), instead of as those of \
                   whole columns (single)"
        }
    };
    let orders = [
        ("scales-other-permutation", other, Some(read.other())),
        ("scales-not-permuted", "the scales were not brought into Marlin's order of columns", None),
    ];
    let mut all: Vec<Suspect<'s>> = orders
        .into_iter()
        .map(|(id, text, packed)| {
            Suspect::new(id, text, move |part| {
                with(scene, part, |w| {
                    w.scales = misread(&w.scales, packed, read)?;
                    Some(())
                })
            })
        })
        .collect();
    for (e, other) in scene.stage.parts.iter().enumerate().filter(|_| scene.stage.parts.len() > 1) {
        let text = format!("the scales are those of expert {}", other.global);
        all.push(Suspect::new("scales-of-another-expert", text, move |part| {
            let scales = &scene.stage.parts[e].weight.scales;
            with(scene, part, |w| (part != e).then(|| w.scales = scales.clone()))
        }));
    }
    all
}

fn zeros<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
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
                with(scene, part, |w| shift_zeros(w, step))
            })
        })
        .collect();
    if scene.stage.parts.iter().all(|p| p.weight.zeros.is_some()) {
        for (mistake, map) in column_mistakes() {
            let text = format!("of the zero points, {}", mistake.text);
            all.push(Suspect::new(mistake.id, text, move |part| {
                with(scene, part, |w| {
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
                with(scene, part, |w| {
                    w.zeros = Some(w.zeros.as_ref()?.map(ScalarType::UINT8, |z| z + 1));
                    Some(())
                })
            },
        ));
        all.push(Suspect::new(
            "zeros-missing",
            "the zero points were ignored: 8 was subtracted",
            move |part| {
                with(scene, part, |w| {
                    w.zeros = Some(w.zeros.as_ref()?.map(ScalarType::UINT8, |_| 8));
                    Some(())
                })
            },
        ));
        all.push(Suspect::new(
            "zeros-missing",
            "the zero points were not subtracted",
            move |part| {
                with(scene, part, |w| {
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

fn codes<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let mut all = Vec::new();
    let recode = move |part: usize, read: &dyn Fn(&Codes<'_>, usize, usize) -> u8| {
        with(scene, part, |w| {
            let codes = &w.codes;
            let (bits, shape) = (codes.bits(), codes.shape());
            w.codes = Codes::from_fn(bits, shape, |k, n| read(codes, k, n)).ok()?;
            Some(())
        })
    };
    if scene.stage.parts.iter().all(|p| p.weight.zeros.is_some()) {
        for (MistakeName { id, text }, map) in column_mistakes() {
            let both = format!("{text}, in weights and zero points");
            let wrong = move |c: &Codes<'_>, k: usize, n: usize| c.get(k, n / 8 * 8 + map[n % 8]);
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
            move |part| recode(part, &|c, k, n| c.get(k ^ 1, n)),
        ));
    }
    all.push(Suspect::new(
        "words-reversed",
        "the values of a word were read from the high end",
        move |part| recode(part, &|c, k, n| c.get(k ^ (c.pack() - 1), n)),
    ));
    all.push(Suspect::new(
        "interleave-not-undone",
        "the interleave of values in a packed word was not undone",
        move |part| {
            recode(part, &|c, k, n| {
                let pack = c.pack();
                // Position p of a word holds value `order(p)`: even values first.
                let p = k % pack;
                let value = if p < pack / 2 { 2 * p } else { 2 * (p - pack / 2) + 1 };
                c.get(k / pack * pack + value, n)
            })
        },
    ));
    all
}
