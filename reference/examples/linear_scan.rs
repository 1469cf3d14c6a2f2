use marlinspike::case::Case;
use marlinspike::check::{Declared, check_case_as};
use marlinspike::gemm::{Class, Convention};
fn main() {
    let class = std::env::args().nth(1).unwrap();
    for path in std::env::args().skip(2) {
        let bytes = std::fs::read(&path).unwrap();
        let case = Case::parse(&bytes).unwrap();
        let d = Declared { convention: Convention::Marlin, class: if class == "any" { Class::any_order() } else { Class::marlin_hopper() } };
        let t = std::time::Instant::now();
        match check_case_as(&case, &d) {
            Ok(r) => for o in r.outputs.iter().filter(|o| ["y", "gate_up", "down", "activated"].contains(&o.name.as_str())) {
                println!("{:40} {:8} {:?} equal {:.4} ulp {:.2} ratio {:.4} mism {} of {} {:?} {:?} {:?}", r.name, o.name, o.verdict, o.equal_bits.unwrap_or(0.), o.max_ulp.unwrap_or(0.), o.max_error_over_bound.unwrap_or(0.), o.mismatches, o.elements, t.elapsed(), o.first_mismatch.as_ref().map(|m| &m.index), o.diagnosis);
            },
            Err(e) => println!("{path}: {e}"),
        }
    }
}
