//! One output against its expectation: count, first mismatch, picture, diagnosis.

use super::mistake::{Comparison, search};
use super::picture::Picture;
pub use super::subject::Mismatch;
pub(crate) use super::subject::{Candidate, Elements, Lines, Plain, Rows, Subject, elements};
use super::{Diagnosis, OutputReport, Verdict, plain, structure};

impl Subject<'_> {
    /// Compares the output and, on a mismatch, searches for an explanation.
    pub(crate) fn judge(self) -> OutputReport {
        let found = elements(self.found);
        let per_element = (self.element_bits() / self.width) as usize;
        let total = self.expected.len() * per_element;
        let mut report = OutputReport::unchecked(&self.name, total, "");
        report.note = None;
        report.verdict = Verdict::Pass;
        report.equal_bits = Some(1.0);
        if found == self.expected {
            return report;
        }
        let packed = self.layout.packed_shape();
        let mut picture = Picture::new(self.rows.label(), self.experts, packed);
        picture.col_label = self.rows.column_label();
        let mut with_mismatch = 0;
        let mut last = None;
        for (element, bit) in self.differences(&found) {
            let (expert, place) = self.place(element, bit);
            report.mismatches += 1;
            report.first_mismatch.get_or_insert_with(|| self.mismatch(&found, element, bit));
            picture.add(expert, self.shape, place.row, place.col, element);
            with_mismatch += usize::from(last.replace(expert) != Some(expert));
        }
        picture.planes_left_out = with_mismatch - picture.planes.len();
        report.verdict = Verdict::Fail;
        report.equal_bits = Some((total - report.mismatches) as f64 / total as f64);
        report.diagnosis = self.diagnose(&found, report.mismatches);
        report.picture = Some(picture);
        report
    }

    /// The known mistake that explains the output; otherwise a rearrangement of columns, rows or
    /// experts; otherwise the region that contains the mismatches.
    fn diagnose(&self, found: &[u32], mismatches: usize) -> Option<Diagnosis> {
        let best = search(self.candidates.iter(), |candidate| {
            let made = (candidate.make)(()).filter(|m| m.len() == found.len())?;
            // A variant that does not change this output explains nothing.
            (made != self.expected).then(|| self.compared(&made, found))
        });
        match best {
            Some(b) if b.unexplained == 0 => Some(b),
            best => structure::diagnose(self, found, mismatches)
                .or(best)
                .or_else(|| {
                    let fact = plain::bits(self, found, mismatches)?;
                    let place = structure::confined(self, found).filter(|p| p.id == "confined");
                    let text = match place {
                        Some(place) => format!("{}; {}", fact.text, place.text),
                        None => fact.text,
                    };
                    Some(Diagnosis { text, ..fact })
                })
                .or_else(|| structure::confined(self, found)),
        }
    }

    /// Compares every value of a predicted output with the found one.
    fn compared(&self, made: &[u32], found: &[u32]) -> Comparison {
        compared([self.width, self.element_bits()], [&self.expected, made, found])
    }
}

/// Compares values of `width` bits, of which an element has `bits`: the expected ones, the predicted ones,
/// and the found ones.
pub(crate) fn compared([width, bits]: [u32; 2], values: [&[u32]; 3]) -> Comparison {
    let [expected, made, found] = values;
    let mask = u32::MAX >> (32 - width);
    let total = found.len() * (bits / width) as usize;
    let mut all = Comparison { total, ..Comparison::default() };
    for ((&e, &m), &f) in expected.iter().zip(made).zip(found) {
        if e == m && e == f {
            continue;
        }
        for bit in (0..bits).step_by(width as usize) {
            let of = |x: u32| x >> bit & mask;
            all.exact(of(e), of(m), of(f), width);
        }
    }
    all
}
