//! A campaign as a JUnit report: one test case for all that passed, one for each finding.

use marlinspike_proptests::campaign::Summary;

/// The report's XML.
pub(super) fn report(summary: &Summary, files: &[String]) -> String {
    let suite = escaped(&format!("marlinspike fuzz {} {}", summary.op, summary.filter));
    let tests = 1 + summary.findings.len();
    let failures = summary.findings.len();
    let mut xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n<testsuite name=\"{suite}\" \
         tests=\"{tests}\" failures=\"{failures}\" time=\"{:.3}\">\n",
        summary.seconds
    );
    let passed = format!("{} cases pass, seed {:#x}", summary.passed, summary.seed);
    xml += &format!("<testcase classname=\"{}\" name=\"{passed}\"/>\n", summary.op);
    for (finding, file) in summary.findings.iter().zip(files) {
        let cause = finding.cause.as_ref().map_or("", |cause| cause.text.as_str());
        xml += &format!(
            "<testcase classname=\"{}\" name=\"{}\"><failure message=\"{}\">{}\ncase {}, kept in \
             {}</failure></testcase>\n",
            summary.op,
            escaped(&finding.signature),
            escaped(cause),
            escaped(&finding.minimal.join(" ")),
            finding.index,
            escaped(file),
        );
    }
    xml + "</testsuite>\n</testsuites>\n"
}

/// Text within XML: reserved characters as entities, without characters that XML forbids.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() && c != '\n' && c != '\t' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_characters_become_entities() {
        assert_eq!(escaped("a<b & \"c\"\u{1b}[0m"), "a&lt;b &amp; &quot;c&quot; [0m");
    }
}
