//! Every law with every value of every axis: the reference satisfies each law on the rows of a
//! covering array whose last axis is the laws.

use marlinspike::case::{CaseConfig, Op};
use marlinspike_golden::Tier;
use marlinspike_proptests::bank::on_all_cores;
use marlinspike_proptests::coverage;
use marlinspike_proptests::ops::{self, CaseInput, DenseInput, DenseProduct, MoeLayer};
use marlinspike_proptests::{Operation, Reference, laws};

/// Tries the law of each row on an input of its config. `draw` is given the config, a seed and a number
/// of rows; `None` where the config has no such input.
fn hold<O: Operation>(op: Op, draw: impl Fn(CaseConfig, u64, usize) -> Option<O::Input> + Sync) {
    let axes = coverage::axes(op).unwrap().unwrap_or_else(|| panic!("{op} declares no axes"));
    let count = laws::<O>().len();
    let rows = coverage::rows(&axes, &coverage::laws(op), Tier::current().pick(2, 2, 3));
    let seed = Tier::current().seed(0x1a77_1ce0);
    let rows: Vec<_> = rows.iter().enumerate().collect();
    let tried = on_all_cores(&rows, |&(nth, row)| {
        let config = axes.config(&row.values);
        let seed = seed.wrapping_add(nth as u64);
        let what = format!("row {nth} {:?}, seed {seed:#x}", axes.labels(&row.values));
        let input = draw(config, seed, 1 + nth % 3).unwrap_or_else(|| panic!("{what}: no input"));
        let law = &laws::<O>()[row.law];
        if let Err(failure) = (law.check)(&Reference, &input) {
            panic!("{what}: {}\n{failure:#?}", law.name);
        }
        row.law
    });
    let mut of_law = vec![0; count];
    tried.iter().for_each(|&law| of_law[law] += 1);
    println!("{op}: {} rows, {of_law:?} of each law", rows.len());
    assert!(of_law.iter().all(|&tried| tried > 0), "{of_law:?}");
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn laws_of_layers() {
    hold::<MoeLayer>(Op::Moe, |config, seed, size_m| match config {
        CaseConfig::Moe(c) => Some(ops::LayerInput::draw_rank(&c, seed, size_m).unwrap()),
        _ => None,
    });
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn laws_of_products() {
    hold::<DenseProduct>(Op::Linear, |config, seed, size_m| match config {
        CaseConfig::Linear(c) => DenseInput::draw(&c, seed, size_m),
        _ => None,
    });
}

macro_rules! cases {
    ($($name:ident $op:ident),+ $(,)?) => { $(
        #[test]
        #[cfg_attr(
            target_arch = "aarch64",
            ignore = "minutes under emulation; --include-ignored runs it"
        )]
        fn $name() {
            hold::<ops::$op>(Op::$op, |config, seed, _| {
                Some(CaseInput::draw(config, seed).unwrap())
            });
        }
    )+ };
}

cases! {
    laws_of_fp8_products ScaledMm, laws_of_fp8_layers Fp8Moe, laws_of_int8_layers Int8Moe,
}

/// The names in the table are those of the laws that are tested.
#[test]
fn the_table_names_the_laws() {
    fn names<O: Operation>() -> Vec<&'static str> {
        laws::<O>().iter().map(|law| law.name).collect()
    }
    assert_eq!(coverage::laws(Op::Moe), names::<MoeLayer>());
    assert_eq!(coverage::laws(Op::Linear), names::<DenseProduct>());
    assert_eq!(coverage::laws(Op::ScaledMm), names::<ops::ScaledMm>());
    assert_eq!(coverage::laws(Op::Fp8Moe), names::<ops::Fp8Moe>());
    assert_eq!(coverage::laws(Op::Int8Moe), names::<ops::Int8Moe>());
    assert_eq!(coverage::laws(Op::Router), names::<ops::TopkRouter>());
    assert_eq!(coverage::laws(Op::Align), names::<ops::AlignBlocks>());
    assert_eq!(coverage::laws(Op::Preprocess), names::<ops::Preprocess>());
}
