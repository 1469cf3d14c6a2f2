//! The laws of layers hold of the reference everywhere in the lattice, and every known mistake
//! breaks one of them.

use marlinspike_proptests::laws::layer::LAWS;
use marlinspike_proptests::ops::{LayerInput, MoeLayer, moe_lattice};
use marlinspike_proptests::{Config, Reference, SubjectError, mutants, run};

fn reference(input: &LayerInput) -> Result<Vec<u16>, SubjectError> {
    let stages = input.local().and_then(|local| local.stages(input));
    stages.map(|s| s.y).map_err(|e| SubjectError(e.to_string()))
}

/// Each configuration once, with two laws in turn: over the lattice, each law meets every format
/// and every axis many times.
#[test]
fn laws_hold_over_the_whole_lattice() {
    let lattice = moe_lattice().unwrap();
    assert!(lattice.len() > 300, "{}", lattice.len());
    let mut tried = vec![0; LAWS.len()];
    for (point, config) in lattice.iter().enumerate() {
        let seed = 0x1a77_1ce0 + point as u64;
        let input = LayerInput::draw(config, seed, 1 + point % 3)
            .unwrap_or_else(|e| panic!("point {point} seed {seed:#x}: {e}"));
        for at in [point % LAWS.len(), (point / LAWS.len() + 5) % LAWS.len()] {
            let law = &LAWS[at];
            if let Err(failure) = (law.check)(&reference, &input) {
                panic!("point {point} seed {seed:#x}: {}\n{failure:#?}", law.name);
            }
            tried[at] += 1;
        }
    }
    println!("{} configurations, {tried:?} tries", lattice.len());
    assert!(tried.iter().all(|&n| n >= lattice.len() / LAWS.len()), "{tried:?}");
}

/// Random choices through the kit, with a seed that shows a failure again.
#[test]
fn the_reference_passes_the_kit() {
    let config = Config { cases: 12, seed: 0x1a7e, regressions: None };
    let report = run::<MoeLayer, _>(&Reference, &config);
    print!("{report}");
    assert!(report.passed(), "{report}");
    assert!(report.laws.len() == LAWS.len() + 3);
}

#[test]
fn every_wrong_layer_is_rejected() {
    let mutants = mutants::layers();
    assert!(mutants.len() >= 30, "{}", mutants.len());
    for mutant in &mutants {
        let rejected = [1, 2, 3].into_iter().find_map(|seed| {
            let report = (mutant.run)(&Config { cases: 40, seed, regressions: None });
            report.failure().cloned()
        });
        let failure = rejected.unwrap_or_else(|| panic!("{} passed", mutant.name));
        println!("{}: {}", mutant.name, failure.what);
        assert!(!failure.input.is_empty() && !failure.what.is_empty());
    }
}
