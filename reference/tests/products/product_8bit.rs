//! Products of 8-bit activations without a declared schedule: within the bound of their class.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{Declared, OutputReport, Verdict, check_case_as};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::products::Convention;
use marlinspike::vectors::Generator;

fn judged(case: &Case<'_>) -> OutputReport {
    let declared = Declared { convention: Some(Convention::Canonical), ..Declared::default() };
    let report = check_case_as(case, &declared).expect("inputs that can be used");
    report.outputs.into_iter().find(|o| o.name == "y").expect("y")
}

/// The canonical bits of int8 and FP8 activations pass, and fail with a row of another token.
#[test]
fn canonical_products_are_within_their_bound() {
    let vectors = Generator::new(Op::Linear, 8).expect("a generator");
    let (mut int8, mut fp8) = (0, 0);
    for index in 0..vectors.lattice().len() as u64 {
        if int8 >= 8 && fp8 >= 8 {
            break;
        }
        let mut case = vectors.case(index).expect("a case");
        let CaseConfig::Linear(c) = &mut case.config else { panic!("{}", case.name) };
        let count = match c.quant.input_dtype {
            Some(ScalarType::INT8) => &mut int8,
            Some(_) => &mut fp8,
            None => continue,
        };
        c.schedule = None;
        if c.size_m < 2 || case.output("y").is_none() || *count >= 8 {
            continue;
        }
        *count += 1;
        let report = judged(&case);
        assert_eq!(report.verdict, Verdict::Pass, "{}: {report:?}", case.name);
        let y = case.output("y").expect("y").clone().into_owned();
        let [rows, n] = y.dims2().expect("a matrix");
        let mut bits = y.elements::<u16>().into_owned();
        if bits[..n] == bits[n..2 * n] {
            continue;
        }
        (0..n).for_each(|i| bits.swap(i, n + i));
        let swapped = Tensor::from_vec("y", y.dtype(), vec![rows, n], bits).expect("as before");
        case.add_output("y", swapped);
        assert_eq!(judged(&case).verdict, Verdict::Fail, "{}", case.name);
    }
    assert!(int8 >= 8 && fp8 >= 8, "{int8} {fp8}");
}
