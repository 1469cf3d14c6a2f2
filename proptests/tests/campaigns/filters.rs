//! Campaigns can be restricted to any legal combination of config values.

use marlinspike::case::Op;
use marlinspike::vectors::{self, Rng};
use marlinspike_proptests::campaign::{Campaign, Filter, axes};

/// Rows of every operation with declared axes, and how many of their keys a filter names.
const ROWS: u64 = 24;
const KEYS: usize = 6;

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "nothing depends on the processor")]
fn every_legal_combination_has_configurations() {
    for op in [Op::Linear, Op::Moe, Op::ScaledMm, Op::Fp8Moe, Op::Int8Moe] {
        let declared = vectors::axes(op).unwrap().unwrap_or_else(|| panic!("{op}: no axes"));
        let sizes: Vec<usize> = declared.axes().iter().map(|axis| axis.values.len()).collect();
        for nth in 0..ROWS {
            let mut rng = Rng::new(nth);
            let mut partial = vec![None; sizes.len()];
            let mut order: Vec<usize> = (0..sizes.len()).collect();
            rng.shuffle(&mut order);
            for axis in order {
                let mut values: Vec<usize> = (0..sizes[axis]).collect();
                rng.shuffle(&mut values);
                partial[axis] = values.into_iter().find(|&value| {
                    let mut with = partial.clone();
                    with[axis] = Some(value);
                    declared.complete(&with).is_some()
                });
            }
            let config = declared.config(&declared.complete(&partial).unwrap());
            let mut keys: Vec<(String, String)> = axes(&config).into_iter().collect();
            // Lists are not written in a filter.
            keys.retain(|(_, value)| !value.contains([',', '|']));
            rng.shuffle(&mut keys);
            keys.truncate(KEYS);
            let keys: Vec<String> =
                keys.iter().map(|(key, value)| format!("{key}={value}")).collect();
            let filter = Filter::parse(&keys.join(",")).unwrap();
            let campaign = Campaign::new(op, 1, filter.clone())
                .unwrap_or_else(|e| panic!("{op} {filter}, as {config:?}: {e}"));
            assert!(campaign.lattice().iter().all(|config| filter.takes(config)), "{filter}");
        }
    }
}
