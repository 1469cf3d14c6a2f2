//! Compares upstream's products, which a GPU computed, with their schedule and with the bounds.
//!
//! `cargo run --release -p marlinspike --example marlin_products -- FILE [FILTER]`, with a file that
//! `scripts/probe/marlin_products.py` wrote. For each product: the tiles of its launches, how many
//! outputs differ from the schedule's, and the largest and median error over the bounds of
//! `Class::marlin_hopper` and `Class::any_order` (of a sample of columns).

mod inputs;
mod moe;

use std::process::ExitCode;

use inputs::{Inputs, Linear};
use marlinspike::Result;
use marlinspike::moe::layer::bounds::with_integer_scales;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::{Class, Convention, Extras, Judge, Recipe};
use moe::Moe;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

/// Columns whose bounds are computed.
const SAMPLE: usize = 32;

/// 16-bit codes of a tensor.
fn halves(tensor: &TensorView<'_>) -> Vec<u32> {
    tensor.data().chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]).into()).collect()
}

/// Columns all over a matrix, of all residues.
fn sample(size_n: usize) -> Vec<usize> {
    let step = (size_n / SAMPLE).max(1);
    (0..size_n).step_by(step).map(|n| n + n / step % step).filter(|&n| n < size_n).collect()
}

/// Largest and median of errors over their bounds.
fn summary(mut ratios: Vec<f64>) -> (f64, f64) {
    ratios.sort_by(f64::total_cmp);
    (ratios.last().copied().unwrap_or(0.0), ratios.get(ratios.len() / 2).copied().unwrap_or(0.0))
}

fn linear(case: &Linear, file: &SafeTensors<'_>) -> Result<[usize; 2]> {
    let columns: Vec<usize> = (0..case.size_n).collect();
    let inputs = case.inputs(&columns)?;
    let mut total = [0, 0];
    for &m in &case.sizes_m {
        let name = format!("{}.m{m}", case.name);
        let tensor = file.tensor(&name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let found = halves(&tensor);
        let (launches, made) = inputs.product(case, m)?;
        let differ = made.iter().zip(&found).filter(|(a, b)| a != b).count();
        total[0] += found.len();
        total[1] += differ;
        let tiles: Vec<String> = launches
            .all()
            .iter()
            .map(|l| {
                let c = l.cta;
                format!("{}x{}/{}:{}+{}", c.tile_k, c.tile_n, c.warps_k, c.run, c.whole)
            })
            .collect();
        let [hopper, any] = bounds(case, &inputs, m, &found)?;
        println!(
            "{name:40} {:24} {:9} {:9} {:9.4} {:8.5} {:9.4} {:8.5}",
            tiles.join(" "),
            found.len(),
            differ,
            hopper.0,
            hopper.1,
            any.0,
            any.1
        );
    }
    Ok(total)
}

/// Errors over the bounds of the kernel's class, and of the class of any order.
fn bounds(case: &Linear, inputs: &Inputs, m: usize, found: &[u32]) -> Result<[(f64, f64); 2]> {
    let columns = sample(case.size_n);
    let part = case.inputs(&columns)?;
    let dtype = case.format.dtype();
    let groups = inputs.weight.scales.rows();
    let (ty, weight) = match case.int8 {
        false => (dtype, part.weight),
        // The largest scale is that of the whole matrix.
        true if groups > 1 => {
            let both = [part.weight, inputs.weight.clone()];
            (ScalarType::INT8, with_integer_scales(&both)?.swap_remove(0))
        }
        true => (ScalarType::INT8, part.weight),
    };
    let scales = inputs.activation_scales.as_ref().map(|s| &s[..m]);
    let extras = Extras { activation_scales: scales, ..Default::default() };
    let recipe = Recipe::new(Convention::Marlin, &weight, dtype, extras)?;
    let classes = match (case.int8, groups) {
        (false, _) => [Class::marlin_hopper(), Class::any_order()],
        (true, groups) => [(); 2].map(|()| Class::int8(case.size_k, groups)),
    };
    let codes = part.x[..m * case.size_k].iter().copied();
    let rows = marlinspike::products::Rows::decode(ty, case.size_k, codes)?;
    let order = match (&weight.groups, inputs.gathered) {
        (marlinspike::weight::Groups::Indexed { g_idx, .. }, false) => {
            Some(marlinspike::act_order::sort(g_idx).perm)
        }
        _ => None,
    };
    let mut results = [(0.0, 0.0); 2];
    for (result, class) in results.iter_mut().zip(&classes) {
        let judge =
            Judge { weight: &weight, order: order.as_deref(), recipe: &recipe, class, extras };
        let bounded = judge.bounds(&rows, None)?;
        let ratios = bounded.iter().enumerate().map(|(i, b)| {
            let (row, n) = (i / columns.len(), columns[i % columns.len()]);
            b.ratio(dtype.to_f64(found[row * case.size_n + n]))
        });
        *result = summary(ratios.collect());
    }
    Ok(results)
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(path) = args.next() else {
        eprintln!("usage: marlin_products FILE [FILTER]");
        return ExitCode::from(2);
    };
    let filter = args.next().unwrap_or_default();
    let bytes = std::fs::read(&path).expect("the file");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("safetensors");
    let text = header.metadata().as_ref().and_then(|m| m.get("cases")).expect("cases");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    println!(
        "{:40} {:24} {:>9} {:>9} {:>9} {:>8} {:>9} {:>8}",
        "product", "tiles", "outputs", "differ", "hopper", "median", "any", "median"
    );
    if let Ok(layers) = serde_json::from_str::<Vec<Moe>>(text) {
        for layer in layers.iter().filter(|c| c.name.contains(&filter)) {
            if let Err(e) = layer.check(&file) {
                println!("{}: {e}", layer.name);
            }
        }
        return ExitCode::SUCCESS;
    }
    let cases: Vec<Linear> = serde_json::from_str(text).expect("cases");
    let mut total = [0, 0];
    for case in cases.iter().filter(|c| c.name.contains(&filter)) {
        match linear(case, &file) {
            Ok(counts) => (0..2).for_each(|i| total[i] += counts[i]),
            Err(e) => println!("{}: {e}", case.name),
        }
    }
    println!("outputs {}, differing {}", total[0], total[1]);
    if total[1] == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
