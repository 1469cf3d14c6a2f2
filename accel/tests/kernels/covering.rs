//! Every law with every value of every axis that the kernels take: the rows of the covering arrays of
//! layers and products, on the GPU.

use crate::common;
use crate::subject::Cuda;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use marlinspike::case::{CaseConfig, Op};
use marlinspike_accel::Device;
use marlinspike_golden::Tier;
use marlinspike_proptests::coverage::{self, cuda_objection};
use marlinspike_proptests::ops::{DenseInput, DenseProduct, LayerInput, MoeLayer};
use marlinspike_proptests::{Operation, Subject, laws};

/// Draws of one row: some values of scales have no kernel, though the types have one.
const DRAWS: u64 = 64;

/// Tries the law of each row. A row that the table says has no kernel must be refused; of any other some
/// draw is taken.
fn hold<O: Operation>(
    test: &str,
    op: Op,
    draw: impl Fn(&CaseConfig, u64, usize) -> Option<O::Input> + Sync,
) where
    Cuda: Subject<O>,
{
    let Some(_gpu) = common::device_or_skip(test) else { return };
    let axes = coverage::axes(op).unwrap().unwrap();
    let on_cuda = coverage::axes_on_cuda(op, axes.clone());
    let laws_of = coverage::laws(op);
    // What the kernels take, in an array of its own; and of the CPU's array what they must refuse.
    let mut rows = coverage::rows(&on_cuda, &laws_of, 2);
    let is_refused = |row: &coverage::Row| cuda_objection(&axes.config(&row.values)).is_some();
    rows.extend(coverage::rows(&axes, &laws_of, 2).into_iter().filter(is_refused));
    let seed = Tier::current().seed(0x6c61_7773);
    let (next, outputs) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (held, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        let cuda = Cuda(Device::open().unwrap());
        loop {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            let Some(row) = rows.get(nth) else { return };
            let config = axes.config(&row.values);
            let seed = seed.wrapping_add((nth as u64) << 16);
            let what = format!("row {nth} {:?}, seed {seed:#x}", axes.labels(&row.values));
            let size_m = [1, 3, 8, 9, 17, 33, 70][nth % 7];
            let inputs = (0..DRAWS).filter_map(|turn| draw(&config, seed + turn, size_m));
            let mut taken = inputs.filter(|input| Subject::<O>::takes(&cuda, input));
            if let Some(reason) = cuda_objection(&config) {
                let input = draw(&config, seed, size_m);
                let is_taken = input.is_some_and(|input| Subject::<O>::takes(&cuda, &input));
                assert!(!is_taken, "{what}: taken, although {reason}");
                refused.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let input = taken.next().unwrap_or_else(|| panic!("{what}: no draw has a kernel"));
            let law = &laws::<O>()[row.law];
            if let Err(failure) = (law.check)(&cuda, &input) {
                panic!("{what}: {}\n{failure:#?}", law.name);
            }
            held.fetch_add(1, Ordering::Relaxed);
            outputs.fetch_add(O::len(&input).unwrap(), Ordering::Relaxed);
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |n| n.get()).min(8) {
            scope.spawn(work);
        }
    });
    common::say(&format!(
        "LAW {op}, every law with every value: {} rows held, {} outputs ({} rows have no kernel), seed {seed:#x}",
        held.into_inner(),
        outputs.into_inner(),
        refused.into_inner()
    ));
}

#[test]
fn every_law_of_layers_with_every_value() {
    hold::<MoeLayer>("every_law_of_layers_with_every_value", Op::Moe, |config, seed, size_m| {
        match config {
            CaseConfig::Moe(c) => LayerInput::draw_rank(c, seed, size_m).ok(),
            _ => None,
        }
    });
}

#[test]
fn every_law_of_products_with_every_value() {
    let test = "every_law_of_products_with_every_value";
    hold::<DenseProduct>(test, Op::Linear, |config, seed, size_m| match config {
        CaseConfig::Linear(c) => DenseInput::draw(c, seed, size_m),
        _ => None,
    });
}
