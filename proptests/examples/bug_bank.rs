//! Writes the table of the bug bank: `cargo run -p marlinspike-proptests --example bug_bank`.
//!
//! With numbers as arguments, prints the measurements of those bugs and writes nothing.

use std::path::Path;

use marlinspike_proptests::bank::{Row, bugs, markdown, on_all_cores, row};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<u32> =
        std::env::args().skip(1).map(|n| n.parse()).collect::<Result<_, _>>()?;
    let mut all = bugs();
    all.retain(|bug| numbers.is_empty() || numbers.contains(&bug.number));
    let rows = on_all_cores(&all, |bug| {
        let start = std::time::Instant::now();
        let row = row(bug);
        eprintln!("{:3} {:6.2} s {}", bug.number, start.elapsed().as_secs_f64(), bug.name);
        row
    });
    let rows = rows.into_iter().collect::<Result<Vec<Row>, _>>()?;
    let faulty: Vec<&Row> = rows.iter().filter(|row| !row.is_right()).collect();
    for row in &faulty {
        eprintln!("{} {}:", row.bug.number, row.bug.name);
        for seed in &row.seeds {
            eprintln!("  {:?} {:?} {:?}", seed.cases, seed.named, seed.misnamed);
        }
    }
    if !faulty.is_empty() {
        return Err(format!("{} bugs are not rejected or misnamed", faulty.len()).into());
    }
    let page = markdown(&rows);
    if numbers.is_empty() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        std::fs::write(root.join("docs/src/results/bug-bank.md"), page)?;
    } else {
        print!("{page}");
    }
    Ok(())
}
