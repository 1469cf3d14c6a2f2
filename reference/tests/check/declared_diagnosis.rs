//! Layers that declare every bit, with faults that no schedule explains: the check still names the
//! cause.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{Diagnosis, OutputReport, Verdict, check_case};
use marlinspike::moe::{Chain, sum};
use marlinspike::num::array::{FloatView2, FloatView3};
use marlinspike::num::tensor::Tensor;
use marlinspike::vectors::Generator;
use marlinspike_golden::Tier;

/// Generated layers with 16-bit activations, in which every row has an expert.
fn layers(count: usize) -> Vec<Case<'static>> {
    let generator = Generator::new(Op::Moe, 0x5eed).expect("a generator");
    let full = |case: &Case<'_>| {
        let numbers = |name: &str| {
            let bits = case.output(name).expect("a stage").elements::<u16>();
            let distinct: std::collections::BTreeSet<u16> = bits.iter().copied().collect();
            // The columns that a test exchanges differ.
            let cols = case.output(name).and_then(|stage| stage.shape().last().copied());
            let differ =
                cols.is_some_and(|cols| bits.chunks_exact(cols).any(|row| row[3] != row[40]));
            // Those of row 1 that a test replaces by zeros are none.
            let says = cols.is_some_and(|cols| {
                bits.get(cols + 8..cols + 24).is_some_and(|some| some.iter().any(|&b| b != 0))
            });
            distinct.len() * 2 > bits.len().min(2048) && differ && says
        };
        let quant = case.config.quant().expect("a layer");
        let rows = case.output("y").map_or(0, |y| y.shape()[0]);
        quant.input_dtype.is_none()
            && !case.inputs.contains_key("expert_map")
            && rows > 1
            && ["gate_up", "activated", "down", "y"].into_iter().all(numbers)
    };
    let cases = (0..).map(|i| generator.case(i * 7).expect("a case"));
    cases.filter(full).take(count).collect()
}

/// The report on `name` after `make` of its rows of `cols` values.
fn report(
    case: &Case<'static>,
    name: &str,
    make: impl Fn(&mut [u16], usize),
) -> (OutputReport, Diagnosis) {
    let mut case = case.clone();
    let stage = case.output(name).expect("a stage");
    let (dtype, shape) = (stage.dtype(), stage.shape().to_vec());
    let mut values = stage.elements::<u16>().into_owned();
    make(&mut values, shape[1]);
    case.add_output(name, Tensor::from_vec(name, dtype, shape, values).expect("a tensor"));
    let report = check_case(&case).expect("a report");
    let output = report.outputs.into_iter().find(|o| o.name == name).expect("the output");
    assert_eq!(output.verdict, Verdict::Fail, "{} {name}", case.name);
    let diagnosis = output.diagnosis.clone();
    let diagnosis = diagnosis.unwrap_or_else(|| panic!("{} {name}: undiagnosed", case.name));
    (output, diagnosis)
}

/// The id of the diagnosis, which explains nearly all.
fn diagnosis(case: &Case<'static>, name: &str, make: impl Fn(&mut [u16], usize)) -> String {
    let (output, diagnosis) = report(case, name, make);
    assert!(diagnosis.unexplained * 10 <= output.mismatches, "{} {name}: {diagnosis:?}", case.name);
    diagnosis.id
}

fn swap_columns(values: &mut [u16], cols: usize) {
    values.chunks_exact_mut(cols).for_each(|row| row.swap(3, 40));
}

#[test]
#[cfg_attr(
    target_arch = "aarch64",
    ignore = "long under emulation; nothing depends on the processor"
)]
fn every_stage_is_diagnosed() {
    for case in layers(Tier::current().pick(1, 4, 4)) {
        for name in ["gate_up", "activated", "down", "y"] {
            assert_eq!(
                diagnosis(&case, name, swap_columns),
                "columns-moved",
                "{} {name}",
                case.name
            );
            let unwritten = |v: &mut [u16], cols: usize| v[cols + 8..cols + 24].fill(0);
            assert_eq!(diagnosis(&case, name, unwritten), "zeros", "{} {name}", case.name);
        }
        let halves = |v: &mut [u16], cols: usize| {
            v.chunks_exact_mut(cols).for_each(|row| row.rotate_left(cols / 2));
        };
        let id = diagnosis(&case, "gate_up", halves);
        assert!(["gate-up-swapped", "halves-exchanged"].contains(&&*id), "{}: {id}", case.name);
    }
}

/// Roundings other than the declared ones, all within their bounds, do not hide other faults.
#[test]
#[cfg_attr(
    target_arch = "aarch64",
    ignore = "long under emulation; nothing depends on the processor"
)]
fn a_pattern_among_other_roundings_is_seen() {
    let mut hidden = 0;
    for case in layers(8) {
        let CaseConfig::Moe(c) = &case.config else { panic!("{}: no layer", case.name) };
        let stage = |name: &str| case.output(name).expect("a stage").elements::<u16>();
        let (ty, size_i, h) = (c.quant.dtype, c.intermediate_size, c.hidden_size);
        let activation = c.definition();
        let (gate_up, down) = (stage("gate_up"), stage("down"));
        let gate_up = FloatView2::from_rows("gate_up", ty, activation.width_in(size_i), &gate_up);
        let shape = [down.len() / c.top_k / h, c.top_k, h];
        let down = FloatView3::from_bits("down", ty, shape, &down).expect("rows");
        let upstream = [
            ("activated", size_i, activation.apply(gate_up.expect("rows"), Chain::Upstream)),
            ("y", h, sum::sum(down, Chain::Upstream)),
        ];
        for (name, cols, upstream) in upstream {
            // Upstream has no operator for some activations.
            let Ok(upstream) = upstream else { continue };
            let upstream = upstream.into_bits();
            // Row 0 may be zeros.
            let unwritten = cols + 8..cols + 24;
            let right = stage(name);
            let others = (0..upstream.len())
                .filter(|i| !unwritten.contains(i) && upstream[*i] != right[*i])
                .count();
            let zeros = unwritten.clone().filter(|&i| right[i] != 0).count();
            let (output, found) = report(&case, name, |values, _| {
                values.copy_from_slice(&upstream);
                values[unwritten.clone()].fill(0);
            });
            // A zero may be within the bound of a small value.
            let explained = others..=others + zeros / 2;
            assert_eq!(found.id, "zeros", "{} {name}", case.name);
            assert!(explained.contains(&found.unexplained), "{} {name}: {found:?}", case.name);
            assert_eq!(output.mismatches, others + zeros, "{} {name}", case.name);
            hidden += usize::from(others > 0);
        }
    }
    assert!(hidden >= 3, "{hidden} outputs with other roundings say little");
}
