//! The cards of a case: one for each output that does not pass.

use std::fmt::{self, Write as _};

use marlinspike::check::{CaseReport, OutputReport, Verdict};

use crate::figures::figures;
use crate::numbered::{Numbered, badge, output_id};
use crate::{escape, explorer, flow, passes_with_remark, text};

/// The outputs of a case that have a card, causes first, each with its index in the report.
pub(crate) fn outputs(report: &CaseReport) -> Vec<(usize, &OutputReport)> {
    let needs_card = |o: &OutputReport| o.verdict != Verdict::Pass || passes_with_remark(o);
    let index = |o: &OutputReport| report.outputs.iter().position(|p| p.name == o.name);
    let outputs = flow::ordered(report).into_iter().filter(|o| needs_card(o));
    outputs.filter_map(|o| Some((index(o)?, o))).collect()
}

/// Writes a case: its file, its operation and its cards. A file that is not a case has its error
/// instead.
pub(crate) fn case(out: &mut String, entry: &Numbered<'_>) -> fmt::Result {
    let Numbered { index, entry: shown } = *entry;
    let label = escape(shown.label);
    let report = match &shown.result {
        Ok(report) => report,
        Err(error) => {
            let error = escape(error);
            return writeln!(
                out,
                "<div class=\"case\" id=\"c{index}\"><h3>{label}</h3><div class=\"card\">\
                 <p class=\"mono\">{error}</p></div></div>"
            );
        }
    };
    let path = escape(&shown.source);
    write!(
        out,
        "<div class=\"case\" id=\"c{index}\">\n<h3>{label}</h3>\n<p class=\"soft\">{}{}, \
         <code>{path}</code></p>\n",
        escape(&report.op),
        if report.name.is_empty() || report.name == shown.label {
            String::new()
        } else {
            format!(", <q>{}</q>", escape(&report.name))
        },
    )?;
    if let Some(fault) = shown.recorded {
        writeln!(out, "<p>Fails as recorded: <code>{}</code>.</p>", escape(fault))?;
    }
    if report.outputs.is_empty() {
        writeln!(out, "<p>{}</p>", escape(text::NO_OUTPUT))?;
    }
    for (number, output) in outputs(report) {
        card(out, entry, number, report, output)?;
    }
    let passing = report.outputs.iter().filter(|o| o.verdict == Verdict::Pass);
    let passing: Vec<_> = passing.map(|o| escape(&o.name)).collect();
    if !passing.is_empty() {
        writeln!(out, "<p class=\"soft\">Passing outputs: {}.</p>", passing.join(", "))?;
    }
    out.push_str("</div>\n");
    Ok(())
}

fn card(
    out: &mut String,
    entry: &Numbered<'_>,
    number: usize,
    report: &CaseReport,
    o: &OutputReport,
) -> fmt::Result {
    let (class, word) = badge(o.verdict);
    write!(
        out,
        "<section class=\"card\" id=\"{}\">\n<h4>{} <span class=\"badge {class}\">{word}</span></h4>\n",
        output_id(entry.index, number),
        escape(&o.name)
    )?;
    let causes = flow::causes(report, o);
    if !causes.is_empty() {
        let links = causes.iter().map(|cause| {
            let number = report.outputs.iter().position(|p| p.name == *cause).unwrap_or(number);
            format!("<a href=\"#{}\">{}</a>", output_id(entry.index, number), escape(cause))
        });
        let links: Vec<_> = links.collect();
        writeln!(out, "<p class=\"follows\">{}.</p>", text::follows(&links))?;
    }
    match &o.diagnosis {
        Some(d) => {
            let cause = escape(&text::diagnosis(d, o.mismatches));
            writeln!(out, "<div class=\"diagnosis {class}-edge\">{cause}</div>")?;
        }
        None if o.verdict == Verdict::Fail => {
            writeln!(out, "<div class=\"diagnosis {class}-edge\">{}</div>", text::NO_CAUSE)?;
        }
        None => {}
    }
    facts(out, o, entry.entry.explorer)?;
    if let Some(picture) = &o.picture {
        figures(out, picture, o)?;
    }
    out.push_str("</section>\n");
    Ok(())
}

fn facts(out: &mut String, o: &OutputReport, address: Option<&str>) -> fmt::Result {
    out.push_str("<dl>");
    let fact = |out: &mut String, term: &str, text: &str| {
        write!(out, "<dt>{term}</dt><dd>{}</dd>", escape(text))
    };
    if o.is_compared() {
        let share = text::share(o);
        let wrong = format!("{} of {}; {share} are bit-equal", o.mismatches, o.elements);
        fact(out, "wrong values", &wrong)?;
    } else {
        fact(out, "values", &o.elements.to_string())?;
    }
    if let Some(m) = &o.first_mismatch {
        let lines = text::first_wrong(&o.name, m);
        let lines: Vec<_> = lines.iter().map(|l| format!("<code>{}</code>", escape(l))).collect();
        let link = address.and_then(|address| Some((escape(address), explorer::query(o, m)?)));
        let link = link.map_or_else(String::new, |(address, query)| {
            format!("<br><a href=\"{address}#layout?{query}\">show it in the layout</a>")
        });
        write!(out, "<dt>first wrong</dt><dd>{}{link}</dd>", lines.join("<br>"))?;
    }
    if o.max_ulp.is_some() || o.max_error_over_bound.is_some() {
        let (ulp, ratio) = (text::error(o.max_ulp), text::error(o.max_error_over_bound));
        fact(out, "largest error", &format!("{ratio} of its bound, {ulp} ulp"))?;
    }
    if let Some(note) = &o.note {
        fact(out, "note", note)?;
    }
    if let Some(power) = o.power.filter(|power| !power.every_bit) {
        fact(out, "power", &power.text())?;
    }
    out.push_str("</dl>\n");
    Ok(())
}
