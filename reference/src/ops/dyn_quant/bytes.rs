//! Packed buffers value by value.

use std::collections::BTreeSet;

use super::DynQuantConfig;
use crate::judge::compare::Mismatch;
use crate::judge::mistake::{Comparison, KnownMistake, search};
use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::num::tensor::Tensor;
use crate::w4a8::Values;
use crate::w4a8::packed::{Columns, LhsLayout, LhsPart, RhsLayout, RhsPart, padded_k};

/// The expected packed buffers of a case, and the weights they are built from.
pub(super) struct Sources<'c> {
    pub(super) config: &'c DynQuantConfig,
    pub(super) x: Option<Values>,
    pub(super) lhs_layout: LhsLayout,
    pub(super) rhs_layout: RhsLayout,
    /// The weights of the inputs.
    pub(super) columns: Columns,
}

/// A known mistake in an output.
pub(super) type Candidate<'c, T> = KnownMistake<'c, (), T>;

/// A value of a packed buffer.
pub(crate) struct Value {
    start: usize,
    bit: u32,
    bits: u32,
    /// What kind of value it is.
    part: &'static str,
    k: Option<usize>,
    group: Option<usize>,
    /// Column of weights.
    n: Option<usize>,
    /// Description of the value for reports.
    text: String,
}

/// A layout whose bytes belong to values of several kinds.
pub(crate) trait Places {
    /// Number of values.
    fn values(&self) -> usize;
    /// The value at a bit.
    fn value(&self, byte: usize, bit: u32) -> Value;
}

impl Places for LhsLayout {
    fn values(&self) -> usize {
        self.blocks() * self.mr() * (padded_k(self.size_k()) + 2)
    }

    fn value(&self, byte: usize, _bit: u32) -> Value {
        let place = self.locate(byte);
        let (part, k) = match place.part {
            _ if place.row >= self.size_m() => ("rows past M", None),
            LhsPart::Code { k } if k >= self.size_k() => ("padding of K", Some(k)),
            LhsPart::Code { k } => ("codes", Some(k)),
            LhsPart::ZeroPoint => ("zero points", None),
            LhsPart::Reciprocal => ("reciprocal scales", None),
        };
        let (start, bits) = (place.start, 8 * place.bytes as u32);
        Value { start, bit: 0, bits, part, k, group: None, n: None, text: place.to_string() }
    }
}

impl Places for RhsLayout {
    fn values(&self) -> usize {
        let padded = self.groups() * self.padded_group();
        self.blocks() * self.nr() * (padded + self.groups() + 2)
    }

    fn value(&self, byte: usize, bit: u32) -> Value {
        let place = self.locate(byte, bit);
        let (part, k, group) = match place.part {
            _ if place.column >= self.shape().size_n => ("columns past N", None, None),
            RhsPart::Code { k } if k >= self.shape().size_k => ("padding of K", Some(k), None),
            RhsPart::Code { k } => ("codes", Some(k), None),
            RhsPart::Scale { group } => ("scales", None, Some(group)),
            RhsPart::Sum => ("sums", None, None),
            RhsPart::Bias => ("biases", None, None),
        };
        Value {
            start: place.start,
            bit: place.bit,
            bits: place.bits,
            part,
            k,
            group,
            n: Some(place.column),
            text: place.to_string(),
        }
    }
}

/// The bits of a value.
fn bits_of(bytes: &[u8], value: &Value) -> u32 {
    let width = value.bits.div_ceil(8) as usize;
    let mut word = [0; 4];
    word[..width].copy_from_slice(&bytes[value.start..][..width]);
    u32::from_le_bytes(word) >> value.bit & (u32::MAX >> (32 - value.bits))
}

/// The values that differ, in storage order.
fn differences<'a>(
    places: &'a impl Places,
    expected: &'a [u8],
    found: &'a [u8],
) -> impl Iterator<Item = Value> + 'a {
    let mut last = None;
    let differing = expected.iter().zip(found).enumerate().filter(|(_, (e, f))| e != f);
    differing
        .flat_map(|(byte, (e, f))| {
            [0u32, 4].into_iter().filter(move |b| (e ^ f) >> b & 15 != 0).map(move |b| (byte, b))
        })
        .map(|(byte, bit)| places.value(byte, bit))
        // A value of several bytes is counted once.
        .filter(move |v| last.replace((v.start, v.bit)) != Some((v.start, v.bit)))
}

/// Judges a packed buffer bit for bit.
pub(crate) fn judge(
    name: &str,
    places: &impl Places,
    expected: &[u8],
    found: &Tensor<'_>,
    candidates: &[Candidate<'_, Vec<u8>>],
) -> OutputReport {
    let bytes = found.bytes();
    let total = places.values();
    let mut report = OutputReport::unchecked(name, total, "");
    report.note = None;
    if bytes.len() != expected.len() {
        report.verdict = Verdict::Fail;
        report.mismatches = total;
        report.equal_bits = Some(0.0);
        report.note = Some(format!("{} bytes, expected {}", bytes.len(), expected.len()));
        return report;
    }
    let (mut mismatches, mut first) = (0, None);
    let mut parts = BTreeSet::new();
    for value in differences(places, expected, bytes) {
        mismatches += 1;
        parts.insert(value.part);
        first.get_or_insert(value);
    }
    let Some(first) = first else {
        report.verdict = Verdict::Pass;
        report.equal_bits = Some(1.0);
        return report;
    };
    report.verdict = Verdict::Fail;
    report.mismatches = mismatches;
    report.equal_bits = Some((total - mismatches) as f64 / total as f64);
    report.note = Some(format!("first mismatch: {}", first.text));
    let hex = |bytes| format!("{:#0w$x}", bits_of(bytes, &first), w = first.bits as usize / 4 + 2);
    report.first_mismatch = Some(Mismatch {
        index: vec![first.start],
        bit: first.bit,
        width: first.bits,
        expert: None,
        k: first.k,
        group: first.group,
        n: first.n,
        fragment: None,
        expected: hex(expected),
        found: hex(bytes),
    });
    let known = search(candidates.iter(), |candidate| {
        let made = (candidate.make)(()).filter(|m| m.len() == bytes.len() && m != expected)?;
        Some(compared(places, [expected, &made, bytes]))
    });
    report.diagnosis = known.or_else(|| {
        let parts: Vec<_> = parts.into_iter().collect();
        (parts.len() == 1).then(|| {
            let text = match mismatches {
                1 => format!("the only mismatch is in the {}", parts[0]),
                _ => format!("all {mismatches} mismatches are in the {}", parts[0]),
            };
            Diagnosis::place("confined", text, mismatches)
        })
    });
    report
}

/// Compares the values of a predicted buffer with the found one. The buffers are the right, the
/// predicted and the found one.
fn compared(places: &impl Places, [expected, made, found]: [&[u8]; 3]) -> Comparison {
    let mut all = Comparison { total: places.values(), ..Comparison::default() };
    for value in differences(places, expected, found) {
        let [e, m, f] = [expected, made, found].map(|bytes| bits_of(bytes, &value));
        all.exact(e, m, f, value.bits);
    }
    // Right values that the prediction changes.
    for value in differences(places, expected, made) {
        let [e, m, f] = [expected, made, found].map(|bytes| bits_of(bytes, &value));
        if e == f {
            all.exact(e, m, f, value.bits);
        }
    }
    all
}
