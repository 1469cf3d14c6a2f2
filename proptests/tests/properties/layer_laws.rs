//! The reference satisfies the laws of layers on the whole lattice, and every mutant breaks one of
//! them.

use marlinspike::vectors::Rng;
use marlinspike_golden::Tier;
use marlinspike_proptests::bank::on_all_cores;
use marlinspike_proptests::ops::layer::laws::LAWS;
use marlinspike_proptests::ops::{LayerInput, MoeLayer, moe_lattice};
use marlinspike_proptests::{Config, Reference, laws, mutants, run};

/// Inputs per mistake.
const INPUTS: usize = 24;

/// Each configuration of the lattice once, which has every legal combination of three values, with the
/// laws in turn; `covering` has every law with every value.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn laws_hold_over_the_whole_lattice() {
    let lattice = moe_lattice().unwrap();
    assert!(lattice.len() > 300, "{}", lattice.len());
    // Without the tiers, `covering` alone tries the pairs.
    let step = Tier::current().pick(12, 1, 1);
    let start = Tier::current().seed(0x1a77_1ce0);
    let points: Vec<_> = lattice.iter().enumerate().step_by(step).enumerate().collect();
    let tried = on_all_cores(&points, |&(nth, (point, config))| {
        let seed = start.wrapping_add(point as u64);
        let input = LayerInput::draw_rank(config, seed, 1 + point % 3)
            .unwrap_or_else(|e| panic!("point {point} seed {seed:#x}: {e}"));
        let all = laws::<MoeLayer>();
        let at = (nth + nth / all.len()) % all.len();
        if let Err(failure) = (all[at].check)(&Reference, &input) {
            panic!("point {point} seed {seed:#x}: {}\n{failure:#?}", all[at].name);
        }
        at
    });
    println!("{} configurations", tried.len());
}

/// Random choices, with a seed that reproduces a failure.
#[test]
fn the_reference_passes_the_kit() {
    let config = Config { cases: 4, seed: 0x1a7e, regressions: None };
    let report = run::<MoeLayer, _>(&Reference, &config);
    print!("{report}");
    assert!(report.passed(), "{report}");
    assert!(report.laws.len() == LAWS.len() + 3);
}

/// Some law rejects each mistake (in a plain `cargo test`, each fifth one) within a few inputs that it changes.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn every_wrong_layer_is_rejected() {
    let lattice = moe_lattice().unwrap();
    let all = mutants::layers().len();
    assert!(all >= 28, "{all}");
    // A plain `cargo test` takes every fifth.
    let numbers: Vec<usize> = (0..all).step_by(Tier::current().pick(5, 1, 1)).collect();
    let passed = on_all_cores(&numbers, |&at| {
        // Functions of one thread.
        let mutant = mutants::layers().swap_remove(at);
        let points: Vec<_> = lattice.iter().filter(|c| (mutant.shows)(c)).collect();
        assert!(!points.is_empty(), "{}", mutant.name);
        let mut rng = Rng::for_case(0xbad, at as u64);
        let rejected = (0..INPUTS).find_map(|tried| {
            let (config, seed) = (rng.pick(&points), rng.next_u64());
            let input = LayerInput::draw(config, seed, 1 + tried % 5).expect("of the lattice");
            LAWS.iter().find_map(|law| {
                let failure = (law.check)(&*mutant.forward, &input).err()?;
                Some((tried, law.name, failure))
            })
        });
        match rejected {
            Some((tried, law, failure)) => {
                println!("{}: input {tried}, {law}: {}", mutant.name, failure.what);
                assert!(!failure.input.is_empty() && !failure.minimal.is_empty());
                None
            }
            None => Some(mutant.name),
        }
    });
    let passed: Vec<_> = passed.into_iter().flatten().collect();
    assert!(passed.is_empty(), "not rejected: {passed:#?}");
}
