//! Routing outputs of every golden case pass, and their errors come close to the bounds.

use marlinspike::case::Case;
use marlinspike::check::{Verdict, check_case};
use marlinspike_golden::Manifest;

const ROUTING: [&str; 6] = [
    "topk_ids",
    "topk_weights",
    "token_expert_indices",
    "sorted_token_ids",
    "expert_ids",
    "num_tokens_post_padded",
];

#[test]
fn routing_of_every_golden_case_passes() {
    let (mut passed, mut max_ratio) = (0, 0f64);
    for path in Manifest::load().and_then(|m| m.all_case_paths()).expect("the golden cases") {
        let bytes = std::fs::read(&path).expect("a golden file");
        let case = Case::parse(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let report = check_case(&case).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        for o in report.outputs.iter().filter(|o| ROUTING.contains(&o.name.as_str())) {
            assert_eq!(o.verdict, Verdict::Pass, "{}: {o:#?}", path.display());
            passed += 1;
            if o.name == "topk_weights" {
                let ratio = o.max_error_over_bound.expect("an error over bound");
                println!(
                    "{}: bits {:?} ulp {:?} ratio {ratio}",
                    path.display(),
                    o.equal_bits,
                    o.max_ulp
                );
                max_ratio = max_ratio.max(ratio);
                assert!(o.max_ulp.is_some_and(|u| u < 16.0), "{o:?}");
            }
        }
    }
    assert!(passed >= 60, "only {passed} outputs were judged");
    // A bound much larger than the real errors would prove little.
    assert!(max_ratio > 0.1, "the largest error is {max_ratio} of its bound");
}
