//! Bugs of other operations: FP8, FP4, gpt-oss, Blackwell layouts, the Arm int4 path.

use marlinspike::case::Op;
use marlinspike::check::add_outputs;
use serde_json::json;

use crate::bug::{Bug, VALUES, Wrong, edit};

pub(super) fn bugs() -> Vec<Bug> {
    let mut all = vec![Bug {
        number: 21,
        name: "ties to even where the definition says away from zero",
        seen: "candle#3629, KleidiAI 1.22",
        op: Op::DynQuant,
        filter: "dtype=float32,activation_rounding=half_away,size_n=8|20,has_bias=false",
        keys: &[],
        outputs: &["lhs_packed"],
        laws: VALUES,
        causes: &["rounding-half-even"],
        wrong: Wrong::Case(|case| {
            edit::keys(case, &[("activation_rounding", json!("half_even"))])?;
            add_outputs(case)
        }),
    }];
    all.extend(known().into_iter().flatten());
    all
}

/// Mistakes that operations list themselves.
fn known() -> [Option<Bug>; 5] {
    [
        Bug::known(20, "e4m3 saturates early", "S#40581", &["e4m3-saturates-early"]),
        Bug::known(
            40,
            "the bias of w2 added on every tensor-parallel rank",
            "V adds it on rank 0 only",
            &["bias-on-every-rank"],
        ),
        Bug::known(
            41,
            "-0 of e4m3fn kept as 0x80, which is e4m3fnuz's NaN",
            "ports to AMD",
            &["minus-zero-kept"],
        ),
        Bug::known(
            42,
            "one activation scale for all rows where each row has its own",
            "ports of per-token FP8",
            &["activation-scale-of-first-row"],
        ),
        Bug::known(
            43,
            "block scales not interleaved for the tensor core",
            "ports to Blackwell",
            &["scales-not-swizzled"],
        ),
    ]
}
