//! Common bugs of kernels that are not in the bank.

use marlinspike::case::CaseConfig;
use marlinspike::check::OutputReport;

use crate::product_model::{AWQ, Model, planted, put};
use crate::tools::{case, changed, report};
use crate::{Run, run};

const GROUPED: &str = "linear-f16_awq_u4_g64";
const BIASED: &str = "linear-f16_u4b8_g128_act0";
const SCALED: &str = "linear-f16_nvfp4";
const LAYER: &str = "moe-nvfp4_f16";
const EXPERTS: &str = "moe-bf16_u8b128_g32_act1";

pub(crate) fn runs() -> Vec<Run> {
    let mut runs = sums();
    runs.extend(parameters());
    runs.extend(layers());
    runs
}

/// Every term of a group, multiplied by `factor`.
fn group(m: &mut Model, g: usize, factor: f64) -> Vec<f64> {
    let (w, n) = (&mut m.matrices[0], m.n);
    for (i, q) in w.q.iter_mut().enumerate().filter(|(i, _)| w.group[i / n] == g) {
        let z = w.z[g * n + i % n];
        *q = (*q - z) * factor + z;
    }
    m.compute()
}

/// Activations of a range of k, multiplied by a factor.
fn range(m: &mut Model, k: std::ops::Range<usize>, factor: f64) -> Vec<f64> {
    let size_k = m.k;
    let inside = m.x.iter_mut().enumerate().filter(|(i, _)| k.contains(&(i % size_k)));
    inside.for_each(|(_, x)| *x *= factor);
    m.compute()
}

fn sums() -> Vec<Run> {
    let product = |change: fn(&mut Model) -> Vec<f64>| planted(GROUPED, "y", change);
    vec![
        run("a", "a group missing", &["group-dropped"], product(|m| group(m, 2, 0.0))),
        run("b", "a group added twice", &["group-twice"], product(|m| group(m, 1, 2.0))),
        run("c", "a k16 tile missing", &["k-range-dropped"], product(|m| range(m, 48..64, 0.0))),
        run(
            "d",
            "the last chunk of k added twice",
            &["k-range-twice"],
            planted(SCALED, "y", |m| range(m, 160..256, 2.0)),
        ),
        run("e", "the last k missing", &["k-dropped"], product(|m| range(m, 255..256, 0.0))),
        run(
            "f",
            "columns in the wrong order",
            &["columns-moved"],
            product(|m| {
                let y = m.compute();
                (0..y.len()).map(|i| y[i - i % m.n + crate::tools::grouped(i % m.n)]).collect()
            }),
        ),
        run(
            "g",
            "a row of the output not written",
            &["zeros"],
            product(|m| {
                let mut y = m.compute();
                y[2 * m.n..3 * m.n].fill(0.0);
                y
            }),
        ),
        run(
            "h",
            "all values doubled",
            &["constant-factor"],
            product(|m| m.compute().iter().map(|y| y * 2.0).collect()),
        ),
    ]
}

fn parameters() -> Vec<Run> {
    let product = |change: fn(&mut Model) -> Vec<f64>| planted(GROUPED, "y", change);
    vec![
        run(
            "i",
            "a group uses another group's scales",
            &["group-scales-of-another-group"],
            product(|m| {
                let n = m.n;
                m.matrices[0].s.copy_within(3 * n..4 * n, n);
                m.compute()
            }),
        ),
        run(
            "j",
            "one scale wrong",
            &["group-scale-off"],
            product(|m| {
                let i = 2 * m.n + 30;
                m.matrices[0].s[i] = m.round(m.matrices[0].s[i] * 1.25);
                m.compute()
            }),
        ),
        run(
            "k",
            "one code wrong",
            &["wrong-code"],
            product(|m| {
                let q = &mut m.matrices[0].q[90 * m.n + 17];
                *q = if *q < 8.0 { *q + 6.0 } else { *q - 6.0 };
                m.compute()
            }),
        ),
        run(
            "l",
            "scales of two columns swapped",
            &["scale-of-another-column"],
            product(|m| {
                let n = m.n;
                m.matrices[0].s.chunks_mut(n).for_each(|row| row.swap(11, 70));
                m.compute()
            }),
        ),
        run(
            "m",
            "zero points not subtracted",
            &["zeros-missing"],
            product(|m| {
                m.matrices[0].z.fill(0.0);
                m.compute()
            }),
        ),
        run(
            "n",
            "bias added twice, by two blocks",
            &["bias-twice"],
            planted(BIASED, "y", |m| {
                m.biases = 2;
                m.compute()
            }),
        ),
        run(
            "o",
            "codes of a word in reverse order",
            &["words-reversed"],
            planted(BIASED, "y", |m| {
                let (q, n) = (m.matrices[0].q.clone(), m.n);
                m.matrices[0].q = (0..q.len()).map(|i| q[((i / n) ^ 7) * n + i % n]).collect();
                m.compute()
            }),
        ),
        run(
            "p",
            "order of codes in a word not undone",
            &["interleave-not-undone"],
            planted(BIASED, "y", |m| {
                let (q, n) = (m.matrices[0].q.clone(), m.n);
                let from = |k: usize| k / 8 * 8 + AWQ[k % 8];
                m.matrices[0].q = (0..q.len()).map(|i| q[from(i / n) * n + i % n]).collect();
                m.compute()
            }),
        ),
        run(
            "q",
            "signed codes instead of biased ones",
            &["sign-bit"],
            changed(case(BIASED), "marlin_qweight", |v, _| {
                v.iter().map(|x| x ^ 0x8888_8888).collect()
            }),
        ),
        run(
            "r",
            "codes of a word not interleaved",
            &["word-order-plain"],
            changed(case(BIASED), "marlin_qweight", |v, _| {
                // Position p holds value 0, 2, 4, 6, 1, 3, 5, 7: value i goes to position i.
                let at = [0, 4, 1, 5, 2, 6, 3, 7];
                v.iter().map(|w| (0..8).map(|p| (w >> (4 * at[p]) & 15) << (4 * p)).sum()).collect()
            }),
        ),
    ]
}

fn layers() -> Vec<Run> {
    vec![
        run(
            "s",
            "rows of one expert swapped",
            &["rows-moved"],
            planted(LAYER, "gate_up", |m| {
                let mut y = m.compute();
                let first = m.expert[0];
                let other = (1..m.rows()).rfind(|&row| m.expert[row] == first).expect("a row");
                (0..m.n).for_each(|n| y.swap(n, other * m.n + n));
                y
            }),
        ),
        run(
            "t",
            "a row multiplied by another expert's weight",
            &["wrong-expert"],
            planted(LAYER, "gate_up", |m| {
                m.expert[4] = m.expert[4].map(|e| (e + 1) % 4);
                m.compute()
            }),
        ),
        run(
            "u",
            "a row of the wrong token",
            &["wrong-token"],
            planted(LAYER, "gate_up", |m| {
                let k = m.k;
                m.x.copy_within(10 * k..11 * k, 4 * k);
                m.compute()
            }),
        ),
        run(
            "v",
            "router weight of the wrong slot",
            &["router-weight-of-another-slot"],
            planted(EXPERTS, "down", |m| {
                m.router.as_mut().expect("weights").swap(6, 7);
                m.compute()
            }),
        ),
        run(
            "w",
            "router weight missing",
            &["router-weight-missing"],
            planted(LAYER, "down", |m| {
                m.routers = 0;
                m.compute()
            }),
        ),
        run(
            "x",
            "one expert's scales used for all experts",
            &["scales-of-another-expert"],
            planted(EXPERTS, "gate_up", |m| {
                let other = m.matrices[1].s.clone();
                m.matrices.iter_mut().for_each(|matrix| matrix.s = other.clone());
                m.compute()
            }),
        ),
        run(
            "y",
            "mean over slots instead of the sum",
            &["mean-of-slots"],
            summed(|slots| slots.iter().sum::<f64>() / slots.len() as f64),
        ),
        run("z", "the last slot missing from the sum", &["slot-dropped"], summed(|slots| slots[0])),
    ]
}

/// y as a function of the slots' terms.
fn summed(of: fn(&[f64]) -> f64) -> OutputReport {
    let mut case = case(LAYER);
    let CaseConfig::Moe(c) = &case.config else { panic!("a layer") };
    let (top_k, h, ty) = (c.top_k, c.hidden_size, c.quant.dtype);
    let down = case.output("down").expect("down").elements::<u16>().into_owned();
    let y: Vec<f64> = (0..c.size_m * h)
        .map(|i| {
            let term = |j: usize| ty.to_f64(down[(i / h * top_k + j) * h + i % h].into());
            of(&(0..top_k).map(term).collect::<Vec<f64>>())
        })
        .collect();
    put(&mut case, "y", &y);
    case.outputs
        .retain(|name, _| ["y", "down", "topk_ids", "topk_weights"].contains(&name.as_str()));
    report(&case, "y")
}
