//! What the page asks, as JSON or bytes, and the answers as JSON.

use marlinspike::case::{Case, Limits};
use marlinspike::check::{CaseReport, Declared, check_case_within};
use marlinspike::layouts::ALL;
use marlinspike::layouts::positions::{Request, Value, positions as values};
use marlinspike_report::{Entry, cards};
use serde_json::{Value as Json, json};

/// Largest case file in bytes: WebAssembly has 4 GiB, of which a case may need 256 times its file.
pub const MAX_FILE: usize = 12 << 20;

/// The largest number of multiply-adds of a case, so that the page answers within a minute.
pub const MAX_WORK: u64 = 2_000_000_000;

/// The verdict on a case file: `{"verdict", "name", "op", "outputs", "html"}`, or `{"error"}`.
///
/// `html` holds the cards of the outputs that do not pass and a table of all outputs.
pub fn check(label: &str, bytes: &[u8]) -> String {
    match judge(bytes) {
        Ok(report) => {
            let html = cards(&Entry::new(label, label, Ok(&report)).in_explorer());
            let outputs =
                report.outputs.iter().map(|o| json!({"name": o.name, "verdict": o.verdict}));
            let outputs: Vec<_> = outputs.collect();
            json!({
                "verdict": report.verdict,
                "name": report.name,
                "op": report.op,
                "outputs": outputs,
                "html": html,
            })
            .to_string()
        }
        Err(error) => json!({"error": error}).to_string(),
    }
}

fn judge(bytes: &[u8]) -> Result<CaseReport, String> {
    if bytes.len() > MAX_FILE {
        let (found, most) = (bytes.len(), MAX_FILE);
        return Err(format!(
            "the file has {found} bytes; this page takes {most} or fewer. Use `marlinspike check`"
        ));
    }
    let limits = Limits { work: MAX_WORK };
    let case = Case::parse(bytes).map_err(|e| e.to_string())?;
    check_case_within(&case, &Declared::default(), &limits).map_err(|e| e.to_string())
}

/// The layouts: `[{"name", "title", "options"}]`.
pub fn layouts() -> String {
    let all = ALL.iter().copied().flatten();
    let all = all.map(|l| json!({"name": l.name, "title": l.title, "options": l.options}));
    Json::Array(all.collect()).to_string()
}

/// The values of a layout: `{"packed_shape", "element_bits", "shape", "parts", "values"}`, or
/// `{"error"}`.
///
/// A value is `[element, bit, width, part, expert, row, col]`, for a Marlin weight followed by
/// `[tile_k, tile_n, lane, mma_n, register, position in the register]`; `part` indexes `parts`.
pub fn positions(request: &str) -> String {
    let answer = serde_json::from_str::<Request>(request).map_err(|e| e.to_string());
    match answer.and_then(|request| values(&request).map_err(|e| e.to_string())) {
        Err(error) => json!({"error": error}).to_string(),
        Ok(all) => {
            let mut parts = Vec::new();
            let values: Vec<_> = all.values.iter().map(|v| row(v, &mut parts)).collect();
            json!({
                "packed_shape": all.packed_shape,
                "element_bits": all.element_bits,
                "shape": all.shape,
                "parts": parts,
                "values": values,
            })
            .to_string()
        }
    }
}

fn row(v: &Value, parts: &mut Vec<marlinspike::layouts::positions::Part>) -> Vec<usize> {
    let part = parts.iter().position(|p| *p == v.part).unwrap_or_else(|| {
        parts.push(v.part);
        parts.len() - 1
    });
    let mut row = vec![v.element, v.bit as usize, v.width as usize, part, v.expert, v.row, v.col];
    if let Some(f) = v.fragment {
        let rest = [f.lane, f.mma_n, f.register, f.part];
        row.extend([f.tile_k, f.tile_n]);
        row.extend(rest.map(|x| x as usize));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Json {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn every_listed_layout_has_values() {
        let all = parse(&layouts());
        assert!(all.as_array().unwrap().len() >= 11);
        for layout in all.as_array().unwrap() {
            let request = json!({"layout": layout["name"], "size_k": 256, "size_n": 128});
            let answer = parse(&positions(&request.to_string()));
            assert!(
                !answer["values"].as_array().unwrap().is_empty(),
                "{layout}: {}",
                answer["error"]
            );
        }
    }

    #[test]
    fn bad_requests_are_errors() {
        for request in ["", "{", "[1]", r#"{"layout": 3}"#, r#"{"sizes": 1}"#, r#"{"layout": "x"}"#]
        {
            assert!(parse(&positions(request))["error"].is_string(), "{request}");
        }
        assert!(parse(&check("x", b"no case"))["error"].is_string());
        let long = parse(&check("x", &vec![0; MAX_FILE + 1]));
        assert!(long["error"].as_str().unwrap().contains("marlinspike check"));
    }
}
