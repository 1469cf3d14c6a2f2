//! Outputs that the reference adds to a case's inputs, for operations that are judged stage by
//! stage: they equal those of generated cases, which another path computed.
use marlinspike::case::Op;
use marlinspike::check::{Verdict, add_outputs, check_case};
use marlinspike::vectors::Generator;

/// Drops the outputs of generated cases and computes them again.
#[test]
fn outputs_are_those_of_generated_cases() {
    for (op, count) in [(Op::Linear, 60), (Op::Moe, 12), (Op::Preprocess, 12), (Op::DynQuant, 40)] {
        let generator = Generator::new(op, 0x5eed).unwrap();
        for index in 0..count {
            let whole = generator.case(index).unwrap();
            let mut case = whole.clone();
            case.outputs.clear();
            add_outputs(&mut case).unwrap();
            assert_eq!(case.outputs, whole.outputs, "{}", whole.name);
            assert_eq!(case.inputs, whole.inputs, "{}", whole.name);
        }
    }
}

/// Cases of routing alone have no outputs; what is added passes the checks, which do not use it. Small
/// router weights may be left unchecked: their bound accepts permuted columns.
#[test]
fn added_routings_and_alignments_pass() {
    for op in [Op::Router, Op::Align] {
        let generator = Generator::new(op, 7).unwrap();
        let mut passed = 0;
        for index in 0..40 {
            let mut case = generator.case(index).unwrap();
            assert!(case.outputs.is_empty());
            if let Err(error) = add_outputs(&mut case) {
                // Eight groups of eight experts: the check refuses it too.
                assert!(error.to_string().contains("a group of one expert"), "{error}");
                continue;
            }
            let report = check_case(&case).unwrap();
            assert!(report.outputs.len() >= 3 && report.outputs.iter().all(|o| o.mismatches == 0));
            assert_ne!(report.verdict, Verdict::Fail, "{}: {report:?}", case.name);
            passed += u32::from(report.verdict == Verdict::Pass);
        }
        assert!(passed >= 10, "{op}: {passed} of 40 cases pass");
    }
}

/// 8-bit activations that another rule made are refused, not ignored.
#[test]
fn other_activations_are_refused() {
    let generator = Generator::new(Op::Linear, 3).unwrap();
    let with = |case: &marlinspike::case::Case<'_>| case.inputs.contains_key("a_scales");
    let mut case = (0..).map(|i| generator.case(i).unwrap()).find(with).unwrap();
    let scales = &case.inputs["a_scales"];
    let doubled: Vec<f32> = scales.elements::<f32>().iter().map(|s| s * 2.0 + 1.0).collect();
    let (dtype, shape) = (scales.dtype(), scales.shape().to_vec());
    let doubled = marlinspike::num::tensor::Tensor::from_vec("", dtype, shape, doubled).unwrap();
    case.add_input("a_scales", doubled);
    let error = add_outputs(&mut case).unwrap_err().to_string();
    assert!(error.contains("in.a_scales"), "{error}");
}
