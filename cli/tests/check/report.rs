//! `marlinspike check --report`: the page is complete, needs no other file, and agrees with the
//! table.

use crate::support;

use std::path::Path;

use crate::support::*;

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn the_report_is_whole_and_needs_no_other_file() {
    let folder = folder();
    let cases = folder.path().join("cases");
    std::fs::create_dir(&cases).unwrap();
    flipped().write(&cases, "<b>&amp;flipped");
    swapped_columns().write(&cases, "swapped");
    let mut unknown = CaseFile::golden(LINEAR);
    unknown.rename("out.marlin_scales", "out.<script>alert");
    unknown.write(&cases, "unknown");
    let report = folder.path().join("report.html");
    std::fs::write(&report, "an older report").unwrap();
    let output = command().arg("check").arg(&cases).arg("--report").arg(&report).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let page = std::fs::read_to_string(&report).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
    for outside in ["http:", "https:", "src=", "@import", "url(", "<link", "<script"] {
        assert!(!page.contains(outside), "{outside}");
    }
    let (a, b) = (grouped_column(17), grouped_column(42));
    let place = marlin_position(3, 250, 3);
    for part in [
        &format!("{a} and {b} are swapped"),
        "4 of 4 wrong values explained",
        &format!("(k, n) = ({}, {})", place.k, place.n),
        "&lt;b&gt;&amp;amp;flipped",
        "out.&lt;script&gt;alert",
        "prefers-color-scheme: dark",
        "class=\"mark\"",
    ] {
        assert!(page.contains(part), "{part}");
    }
    // Two failed outputs, each with its plane and its buffer.
    assert_eq!(page.matches("<section").count(), 2);
    assert_eq!(page.matches("<figure>").count(), 4);
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    let mut left = names(folder.path());
    left.sort();
    assert_eq!(left, ["cases", "report.html"]);
}

#[test]
fn a_report_that_cannot_be_written_is_an_error() {
    let folder = folder();
    let case = golden(PASSING);
    let taken = folder.path().join("taken");
    std::fs::create_dir(&taken).unwrap();
    for target in [folder.path().join("missing/report.html"), taken] {
        let output =
            command().arg("check").arg(&case).arg("--report").arg(&target).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", target.display());
        let message = format!("error: {}: cannot be written", target.display());
        assert!(stderr(&output).contains(&message), "{}", stderr(&output));
        assert!(stderr(&output).contains("help: "), "{}", stderr(&output));
        // The verdicts are still printed.
        assert!(stdout(&output).contains("pass"), "{}", stdout(&output));
    }
    assert_eq!(names(folder.path()), ["taken"]);
    assert!(names(&folder.path().join("taken")).is_empty());
}

/// The index lists every case that does not pass, and every link resolves; an output links to the
/// failed output that the kernel reads to compute it.
#[test]
fn the_index_leads_to_every_card() {
    let folder = folder();
    let cases = folder.path().join("cases");
    std::fs::create_dir(&cases).unwrap();
    let mut case = swapped_columns();
    let mut y = case.halves("out.y");
    y[5] ^= 0x4000;
    case.set_halves("out.y", &y);
    case.write(&cases, "b-both");
    CaseFile::golden(PASSING).write(&cases, "a-passing");
    let mut truncated = CaseFile::golden(LINEAR);
    truncated.bytes.truncate(5000);
    truncated.write(&cases, "c-truncated");
    let report = folder.path().join("report.html");
    command().arg("check").arg(&cases).arg("--report").arg(&report).output().unwrap();
    let page = std::fs::read_to_string(&report).unwrap();
    let index = page.split("<nav").nth(1).unwrap().split("</nav>").next().unwrap();
    for part in [">b-both<", ">marlin_scales<", ">y<", ">c-truncated<", ">All outputs<"] {
        assert!(index.contains(part), "{part}: {index}");
    }
    // Failures come first; passing outputs are only in the table.
    assert!(index.find("b-both").unwrap() < index.find("c-truncated").unwrap());
    assert!(!index.contains("a-passing"));
    let links: Vec<_> =
        page.split("href=\"#").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(links.len() >= 9, "{links:?}");
    for link in links {
        assert_eq!(page.matches(&format!(" id=\"{link}\"")).count(), 1, "{link}");
    }
    let cards: Vec<_> = page.split("<section").skip(1).collect();
    assert_eq!(cards.len(), 2);
    assert!(cards[0].contains("<h4>marlin_scales") && !cards[0].contains("fix it first"));
    assert!(
        cards[1].contains("<h4>y") && cards[1].contains(">marlin_scales</a> also fails, and this")
    );
}

/// A wrong product is drawn: its errors by row and column, and the k that explains them.
#[test]
fn a_wrong_product_is_drawn() {
    let folder = folder();
    let mut case = CaseFile::golden(LINEAR);
    // The output was computed with another code at k = 8 * 5 + 3, n = 17 than the case now has.
    let mut words = case.words("in.qweight");
    words[5 * case.shape("in.qweight")[1] + 17] ^= 0x6000;
    case.set_words("in.qweight", &words);
    let path = case.write(folder.path(), "product");
    let report = folder.path().join("report.html");
    let arguments = [Path::new("check"), &path, Path::new("--report"), &report];
    let output = command().args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let text = unwrapped(stdout(&output));
    for part in ["bit-equal", "max ulp", "error/bound", "k 43, n 17: code", "in column n 17"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let page = std::fs::read_to_string(&report).unwrap();
    for part in
        ["<b>error over bound</b>: 17 rows by 192", "<b>explanation</b>: k 43 of", ">row 16<"]
    {
        assert!(page.contains(part), "{part}");
    }
    // The bad cells are in column 17, of 96 cells of two columns each, or of one cell per column.
    assert!(page.contains("class=\"e5\" x=\""));
    let (_, lines) = check_json(&[&path]);
    let y = support::output(&lines[0], "y");
    assert_eq!(y["diagnosis_id"], "wrong-code");
    assert!(
        y["max_error_over_bound"].as_f64().unwrap() > 1.0 && y["max_ulp"].as_f64().unwrap() > 1.0
    );
}

/// A report to the standard output follows the table, also in a file to which the shell appends. The
/// links of `/dev` stay.
#[cfg(target_os = "linux")]
#[test]
fn a_report_can_go_to_standard_output() {
    let folder = folder();
    let out = folder.path().join("out");
    for path in ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
        std::fs::write(&out, "before\n").unwrap();
        let file = std::fs::OpenOptions::new().append(true).open(&out).unwrap();
        let mut check = command();
        check.arg("check").arg(golden(PASSING)).args(["--report", path]).stdout(file);
        assert!(check.status().unwrap().success());
        let text = std::fs::read_to_string(&out).unwrap();
        let page = text.find("<!DOCTYPE html>").expect("the page");
        assert!(
            text.starts_with("before\n") && text[..page].contains("1 of 1 case passes"),
            "{text}"
        );
        assert!(text.ends_with("</html>\n"));
    }
    assert!(std::fs::symlink_metadata("/dev/stdout").unwrap().is_symlink());
    assert_eq!(names(folder.path()), ["out"]);
}
