//! scratch
use marlinspike::case::{Case, CaseConfig, ScheduleChoice};
use marlinspike::check::check_case;
use marlinspike_golden::Manifest;

#[test]
fn explore() {
    let golden = Manifest::load().expect("the golden manifest");
    for entry in golden.cases() {
        if !entry.path.contains("linear-")
            || entry.path.contains("dyn")
            || entry.path.contains("-py_")
        {
            continue;
        }
        let file = std::fs::read(golden.path(&entry.path)).expect("a golden file");
        let mut case = Case::parse(&file).expect("a case");
        if case.output("y").is_none() {
            continue;
        }
        if let CaseConfig::Linear(c) = &mut case.config {
            c.schedule = Some(ScheduleChoice::Canonical);
        }
        match check_case(&case) {
            Ok(r) => {
                let y = r.outputs.iter().find(|o| o.name == "y").unwrap();
                println!(
                    "{} {:?} eq {:?} ulp {:?} {:?}",
                    entry.path, y.verdict, y.equal_bits, y.max_ulp, y.diagnosis
                );
            }
            Err(e) => println!("{} ERR {e}", entry.path),
        }
    }
}
