//! Texts that a terminal and the page share.

use marlinspike::check::{Diagnosis, Mismatch, OutputReport, Strength, Verdict};

/// The word for a verdict.
pub fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Fail => "FAIL",
        Verdict::Unchecked => "not checked",
    }
}

/// Share of equal values in percent: `100 %` only when all are, `0 %` only when none is.
pub fn share(output: &OutputReport) -> String {
    let Some(share) = output.equal_bits else { return "-".to_owned() };
    if output.mismatches == 0 && share >= 1.0 {
        return "100 %".to_owned();
    }
    if share <= 0.0 {
        return "0 %".to_owned();
    }
    // Rounding must not turn a value into 0 % or 100 %.
    format!("{:.4} %", (share * 100.0).clamp(0.0001, 99.9999))
}

/// The reason shown for a case without outputs.
pub const NO_OUTPUT: &str =
    "the file records no output; add what the kernel computed as tensors `out.NAME`";

/// The diagnosis of a failed output that no known mistake explains.
pub const NO_CAUSE: &str = "no known mistake explains it";

/// Lines about the first wrong value: the tensor element with both bit patterns, then the matrix
/// value and, if the output has a layout, the register that loads it.
pub fn first_wrong(output: &str, m: &Mismatch) -> Vec<String> {
    let index: Vec<_> = m.index.iter().map(usize::to_string).collect();
    let last = m.bit + m.width - 1;
    let bits = match m.bit {
        // The mismatch covers a whole element.
        0 if m.width >= 16 => String::new(),
        bit if bit == last => format!(", bit {bit}"),
        bit => format!(", bits {bit} to {last}"),
    };
    let values = format!("expected {}, found {}", m.expected, m.found);
    let mut lines = vec![format!("out.{output}[{}]{bits}: {values}", index.join(", "))];
    let mut matrix = Vec::new();
    matrix.extend(m.expert.map(|e| format!("expert {e}")));
    match (m.k, m.group, m.n) {
        (Some(k), _, Some(n)) => matrix.push(format!("(k, n) = ({k}, {n})")),
        (_, Some(g), Some(n)) => matrix.push(format!("(group, n) = ({g}, {n})")),
        // The index already states k, a group or n where it ends with it.
        (Some(k), _, None) if m.index.last() != Some(&k) => matrix.push(format!("k = {k}")),
        (None, Some(g), None) if m.index.last() != Some(&g) => matrix.push(format!("group = {g}")),
        (_, _, Some(n)) if m.index.last() != Some(&n) => matrix.push(format!("n = {n}")),
        _ => {}
    }
    if !matrix.is_empty() {
        lines.push(matrix.join(", "));
    }
    if let Some(f) = &m.fragment {
        lines.push(format!(
            "tile ({}, {}), lane {}, mma column block {}, register {}, part {}",
            f.tile_k, f.tile_n, f.lane, f.mma_n, f.register, f.part
        ));
    }
    lines
}

/// States that an output is computed from other failed outputs. `causes` are their printable names.
pub fn follows(causes: &[impl AsRef<str>]) -> String {
    let (fails, it) = if causes.len() == 1 { ("fails", "it") } else { ("fail", "them") };
    let names: Vec<_> = causes.iter().map(|cause| cause.as_ref()).collect();
    let names = names.join(", ");
    format!("{names} also {fails}, and this output is computed from {it}: fix {it} first")
}

/// An error for a table column: three digits, or scientific notation if it is large.
pub fn error(x: Option<f64>) -> String {
    match x {
        None => "-".to_owned(),
        Some(x) if x.is_infinite() => "inf".to_owned(),
        Some(x) if x >= 1e5 => format!("{x:.2e}"),
        // Rounding must not turn a failure (above 1) into a pass (1).
        Some(x) if x > 1.0 && x < 1.0005 => "1.001".to_owned(),
        Some(x) => format!("{x:.3}"),
    }
}

/// The explanation and the number of wrong values that it covers; for an output that passes, the
/// reason why it is accepted.
pub fn diagnosis(d: &Diagnosis, mismatches: usize) -> String {
    let explained = mismatches.saturating_sub(d.unexplained);
    if mismatches == 0 {
        return format!("accepted with a remark: {}", d.text);
    }
    match d.strength {
        Strength::Place => return format!("{NO_CAUSE}; {}", d.text),
        // The text itself counts the unexplained values.
        Strength::Consistent => return d.text.clone(),
        Strength::Explains => {}
    }
    format!("{explained} of {mismatches} wrong values explained: {}", d.text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(mismatches: usize, equal_bits: Option<f64>) -> OutputReport {
        let mut output = OutputReport::unchecked("y", 10, "");
        (output.verdict, output.note) = (Verdict::Fail, None);
        (output.equal_bits, output.mismatches) = (equal_bits, mismatches);
        output
    }

    #[test]
    fn only_equality_is_100_percent() {
        assert_eq!(share(&output(0, Some(1.0))), "100 %");
        assert_eq!(share(&output(1, Some(1.0 - 1e-12))), "99.9999 %");
        // The share of such a count rounds to 1 in f64.
        assert_eq!(share(&output(1, Some(1.0))), "99.9999 %");
        assert_eq!(share(&output(5, Some(0.5))), "50.0000 %");
        assert_eq!(share(&output(9, Some(1e-12))), "0.0001 %");
        assert_eq!(share(&output(10, Some(0.0))), "0 %");
        assert_eq!(share(&output(0, None)), "-");
    }

    #[test]
    fn nothing_explained_is_said_so() {
        let explains = Diagnosis::explains("i", "t");
        assert_eq!(diagnosis(&explains, 7), "7 of 7 wrong values explained: t");
        let some = Diagnosis::consistent("i", "t", 2);
        assert_eq!(
            diagnosis(&some, 7),
            "consistent with: t; 2 wrong values are not explained by it"
        );
        let place = Diagnosis::place("i", "t", 7);
        assert_eq!(diagnosis(&place, 7), "no known mistake explains it; t");
        assert_eq!(diagnosis(&explains, 0), "accepted with a remark: t");
    }

    #[test]
    fn errors_keep_their_side_of_one() {
        let of = |x: f64| error(Some(x));
        assert_eq!(
            [of(0.9996), of(1.0), of(1.0000001), of(1.5)],
            ["1.000", "1.000", "1.001", "1.500"]
        );
        assert_eq!([of(f64::INFINITY), of(2.5e7), error(None)], ["inf", "2.50e7", "-"]);
    }
}
