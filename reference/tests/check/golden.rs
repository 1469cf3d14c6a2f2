//! Every golden case: layout outputs are equal bit for bit.

use marlinspike::case::Case;
use marlinspike::check::{Verdict, check_case};
use marlinspike_golden::Manifest;

#[test]
fn layouts_of_every_golden_case_are_equal() {
    let golden = Manifest::load().expect("the golden manifest");
    let mut checked = 0;
    for entry in golden.cases() {
        let bytes = std::fs::read(golden.path(&entry.path)).expect(&entry.path);
        let case = Case::parse(&bytes).unwrap_or_else(|e| panic!("{}: {e}", entry.path));
        let report = check_case(&case).unwrap_or_else(|e| panic!("{}: {e}", entry.path));
        for output in &report.outputs {
            let fault = output.diagnosis.as_ref().map(|d| d.id.as_str());
            let known = entry.known_fault.is_some() && fault == entry.known_fault.as_deref();
            assert!(output.verdict != Verdict::Fail || known, "{}: {output:#?}", entry.path);
            checked += usize::from(output.verdict == Verdict::Pass);
        }
    }
    assert!(checked >= 100, "only {checked} outputs were checked");
}
