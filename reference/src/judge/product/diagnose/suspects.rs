//! Known mistakes with a whole matrix: scales, bias, router weights and global scales that the kernel
//! reads in another way than the format defines. [`codes`](super::codes) has codes and zero points.

use super::Suspect;
use super::codes::{codes, zeros};
use super::scene::{Routers, Scene, Setup};
use crate::formats;
use crate::formats::mistake::MistakeName;
use crate::layouts::marlin::{ScaleLayout, ScalePermutation};
use crate::num::interval::round_once;
use crate::num::scalar::ScalarType;
use crate::products::schedule::{Step, StepOp};
use crate::products::{Recipe, Rows};
use crate::weight::Table;

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
        scene.changed(part, |w| {
            (w.global_scale != Some(value)).then(|| w.global_scale = Some(value))
        })
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
            scene.changed(part, |w| w.bias.take().map(drop))
        }),
        Suspect::new("bias-twice", "the bias was added twice", move |part| {
            Some(Setup { recipe: Some(twice), ..scene.right(part) })
        }),
    ];
    let orders = [
        ("bias-not-permuted", "the bias was not permuted to Marlin's order of columns", None),
        (
            "bias-other-permutation",
            "the bias was permuted as grouped scales are, instead of as single ones",
            Some(ScalePermutation::Grouped),
        ),
    ];
    for (id, text, packed) in orders.into_iter().filter(|_| !scene.stage.hints.is_unpermuted) {
        all.push(Suspect::new(id, text, move |part| {
            scene.changed(part, |w| {
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
            scene.changed(part, |w| (part != e).then(|| w.bias = bias))
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
        ("scales-not-permuted", "the scales were not permuted to Marlin's order of columns", None),
    ];
    let mut all: Vec<Suspect<'s>> = orders
        .into_iter()
        .filter(|_| !scene.stage.hints.is_unpermuted)
        .map(|(id, text, packed)| {
            Suspect::new(id, text, move |part| {
                scene.changed(part, |w| {
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
            scene.changed(part, |w| (part != e).then(|| w.scales = scales.clone()))
        }));
    }
    all
}
