//! `activated` and `y` of the golden layers: which chain upstream's operators follow, and verdicts.

use marlinspike::case::{Case, CaseConfig, MoeConfig};
use marlinspike::moe::Chain;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::sum::sum;
use marlinspike_golden::Manifest;

fn files() -> Vec<std::path::PathBuf> {
    let golden = Manifest::load().expect("the golden manifest");
    let mut files: Vec<_> = golden.cases().iter().map(|c| golden.path(&c.path)).collect();
    if let Some(folder) = std::env::var_os("MARLINSPIKE_EXTRA_CASES") {
        let entries = std::fs::read_dir(folder).expect("the folder of extra cases");
        files.extend(entries.map(|e| e.expect("an entry").path()));
    }
    files
}

fn layers(mut visit: impl FnMut(&str, &MoeConfig, &Case<'_>)) {
    for path in files() {
        let bytes = std::fs::read(&path).expect("a golden file");
        let case = Case::parse(&bytes).expect("a case");
        if let CaseConfig::Moe(c) = &case.config {
            visit(&path.file_stem().expect("a name").to_string_lossy(), c, &case);
        }
    }
}

fn halves(case: &Case<'_>, name: &str) -> Vec<u16> {
    case.output(name).expect(name).elements().into_owned()
}

fn share(a: &[u16], b: &[u16]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).filter(|(a, b)| a == b).count() as f64 / a.len() as f64
}

#[test]
fn chains() {
    layers(|name, c, case| {
        let d = Definition::new(c.activation);
        let (gate_up, found) = (halves(case, "gate_up"), halves(case, "activated"));
        let of =
            |chain| d.apply(&gate_up, c.quant.dtype, c.intermediate_size, chain).expect("rows");
        let down = halves(case, "down");
        let y = halves(case, "y");
        let sums = |chain| sum(&down, c.quant.dtype, c.top_k, c.hidden_size, chain).expect("rows");
        println!(
            "{name} {} upstream {:.6} canonical {:.6} | y k={} upstream {:.6} canonical {:.6}",
            c.activation,
            share(&of(Chain::Upstream), &found),
            share(&of(Chain::Canonical), &found),
            c.top_k,
            share(&sums(Chain::Upstream), &y),
            share(&sums(Chain::Canonical), &y),
        );
        if let Ok(r) = marlinspike::check::check_case(case) {
            for o in r.outputs.iter().filter(|o| ["activated", "y"].contains(&o.name.as_str())) {
                println!(
                    "   {} {:?} ratio {:?} ulp {:?} {:?} {:?}",
                    o.name, o.verdict, o.max_error_over_bound, o.max_ulp, o.note, o.diagnosis
                );
            }
        }
    });
}
