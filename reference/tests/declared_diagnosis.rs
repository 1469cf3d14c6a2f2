//! Layers that declare every bit, made wrong in ways that no schedule explains: the check names the
//! cause all the same.

use marlinspike::case::{Case, Op};
use marlinspike::check::{Verdict, check_case};
use marlinspike::tensor::Tensor;
use marlinspike::vectors::Generator;

/// Generated layers of 16-bit activations whose rows all have an expert.
fn layers(count: usize) -> Vec<Case<'static>> {
    let generator = Generator::new(Op::Moe, 0x5eed).expect("a generator");
    let full = |case: &Case<'_>| {
        let numbers = |name: &str| {
            let bits = case.output(name).expect("a stage").elements::<u16>();
            let distinct: std::collections::BTreeSet<u16> = bits.iter().copied().collect();
            distinct.len() * 2 > bits.len().min(2048)
        };
        let quant = case.config.quant().expect("a layer");
        quant.input_dtype.is_none()
            && ["gate_up", "activated", "down", "y"].into_iter().all(numbers)
    };
    let cases = (0..).map(|i| generator.case(i * 7).expect("a case"));
    cases.filter(full).take(count).collect()
}

/// The id of the diagnosis of `name`, where its rows of `cols` values went through `make`.
fn diagnosis(case: &Case<'static>, name: &str, make: impl Fn(&mut [u16], usize)) -> String {
    let mut case = case.clone();
    let stage = case.output(name).expect("a stage");
    let (dtype, shape) = (stage.dtype(), stage.shape().to_vec());
    let mut values = stage.elements::<u16>().into_owned();
    make(&mut values, shape[1]);
    case.add_output(name, Tensor::from_vec(name, dtype, shape, values).expect("a tensor"));
    let report = check_case(&case).expect("a report");
    let output = report.outputs.into_iter().find(|o| o.name == name).expect("the output");
    assert_eq!(output.verdict, Verdict::Fail, "{} {name}", case.name);
    let diagnosis = output.diagnosis.unwrap_or_else(|| panic!("{} {name}: undiagnosed", case.name));
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
    for case in layers(4) {
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
