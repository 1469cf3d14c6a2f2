//! Damaged FP8 products never pass by default: they fail, or no bound is narrow enough to tell. The
//! table of docs/src/internals/numerics.md, by K, damage and kind of product.

use std::fmt::Write as _;
use std::path::PathBuf;

use marlinspike::case::Case;
use marlinspike::check::{Declared, OutputReport, Verdict, check_case_as};
use marlinspike::container::write_container;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::Rng;
use marlinspike_golden::Tier;
use rayon::prelude::*;

use crate::data::{Data, operands, values};
use crate::simulated::scales;
use crate::unit::Unit;

const BF16: ScalarType = ScalarType::BFLOAT16;
const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const ROWS: usize = 4;
const COLUMNS: usize = 64;
/// k of a group of scales and of a promotion.
const GROUP: usize = 128;

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Channels,
    Blocks,
    W4a8,
}

const KINDS: [(Kind, &str); 3] =
    [(Kind::Channels, "channels"), (Kind::Blocks, "blocks"), (Kind::W4a8, "W4A8")];

#[derive(Clone, Copy, PartialEq)]
enum Damage {
    None,
    Times(f64),
    OneColumn,
    Swapped,
    TailDropped,
    TailOfNextRow,
    OneBlock,
}

const DAMAGES: [(Damage, &str); 8] = [
    (Damage::None, "none"),
    (Damage::Times(1.05), "x 1.05"),
    (Damage::Times(1.005), "x 1.005"),
    (Damage::OneColumn, "one column x 1.25"),
    (Damage::Swapped, "two columns swapped"),
    (Damage::TailDropped, "last 16 k dropped"),
    (Damage::TailOfNextRow, "last 16 k of the next row"),
    (Damage::OneBlock, "one block of k x 1.25"),
];

/// The operands of a product: e4m3 activations, and a weight whose code at (n, k) is multiplied by the
/// scale of its group and column.
struct Product {
    kind: Kind,
    size_k: usize,
    a: Vec<u32>,
    /// `[M, groups]`; one group but for blocks.
    a_scales: Vec<f32>,
    /// `[N, K]`: e4m3 codes, or integers from -8 to 7.
    w: Vec<u32>,
    /// `[N, groups]`.
    w_scales: Vec<f32>,
}

/// Rounds an f32 scale to bf16, as checkpoints store it.
fn half(x: f32) -> f32 {
    BF16.to_f64(BF16.encode_rne(x.into())) as f32
}

impl Product {
    fn new(kind: Kind, size_k: usize) -> Self {
        let mut random = Rng::new(size_k as u64 + 7);
        let [a, mut w] = operands(&mut random, Data::Normal, [ROWS, COLUMNS, size_k]);
        let groups = size_k.div_ceil(GROUP);
        let (a_scales, w_scales) = match kind {
            Kind::Channels => (scales(&mut random, ROWS), scales(&mut random, COLUMNS)),
            Kind::Blocks => {
                // One block spans all columns.
                let of_blocks = scales(&mut random, groups);
                (scales(&mut random, ROWS * groups), of_blocks.repeat(COLUMNS))
            }
            Kind::W4a8 => {
                w = (0..COLUMNS * size_k).map(|_| random.between(0, 15)).collect();
                let groups = size_k / w4a8_group(size_k);
                let scales = scales(&mut random, COLUMNS * groups);
                let scales = scales.into_iter().map(half).collect();
                (self::scales(&mut random, ROWS), scales)
            }
        };
        Self { kind, size_k, a, a_scales, w, w_scales }
    }

    /// Every output by a kernel on Hopper that promotes every 128 k, with `damage`.
    fn outputs(&self, damage: Damage) -> Vec<u32> {
        let (k, tail) = (self.size_k, self.size_k - 16);
        let a = values(&self.a);
        let weights = self.prepared();
        let mut all = Vec::new();
        for (m, n) in (0..ROWS * COLUMNS).map(|i| (i / COLUMNS, i % COLUMNS)) {
            let column = match (damage, n) {
                (Damage::Swapped, 8 | 9) => 17 - n,
                _ => n,
            };
            let activation = |j: usize| match damage {
                Damage::TailDropped if j >= tail => 0.0,
                Damage::TailOfNextRow if j >= tail => a[(m + 1) % ROWS * k + j],
                _ => a[m * k + j],
            };
            let terms: Vec<(f64, f64)> =
                (0..k).map(|j| (activation(j), weights.codes[column * k + j])).collect();
            let mut sum = 0f32;
            for (g, part) in terms.chunks(GROUP).enumerate() {
                let mut part = Unit::Wgmma.chain(part) as f32;
                if damage == Damage::OneBlock && g == 1 && n < 32 {
                    part *= 1.25;
                }
                sum = match self.kind {
                    Kind::Blocks => {
                        let groups = k.div_ceil(GROUP);
                        let scale = self.a_scales[m * groups + g] * self.w_scales[g];
                        part.mul_add(scale, sum)
                    }
                    _ => sum + part,
                };
            }
            let y = match self.kind {
                Kind::Blocks => sum,
                _ => sum * weights.columns[column] * self.a_scales[m],
            };
            let y = match (damage, n) {
                (Damage::Times(factor), _) => f64::from(y) * factor,
                (Damage::OneColumn, 5) => f64::from(y) * 1.25,
                _ => y.into(),
            };
            all.push(BF16.encode_rne(y));
        }
        all
    }

    /// The values that enter the unit, and the scales of columns.
    fn prepared(&self) -> Prepared {
        if self.kind != Kind::W4a8 {
            let columns = self.w_scales.clone();
            return Prepared { codes: values(&self.w), columns };
        }
        // vLLM: the column's scale is its largest over 448, times 8; the groups' scales over it are
        // rounded to e4m3, and so is a code times its group's scale.
        let groups = self.size_k / w4a8_group(self.size_k);
        let mut prepared = Prepared { codes: Vec::new(), columns: Vec::new() };
        for n in 0..COLUMNS {
            let of = &self.w_scales[n * groups..][..groups];
            let largest = of.iter().copied().fold(0f32, f32::max);
            let column = largest / 448.0;
            let group = |s: f32| E4M3.to_f64(E4M3.encode_rne((s / column).min(448.0).into())) / 8.0;
            let of: Vec<f64> = of.iter().map(|&s| group(s)).collect();
            for j in 0..self.size_k {
                let code = f64::from(self.w[n * self.size_k + j]) - 8.0;
                let value = code * of[j / w4a8_group(self.size_k)];
                prepared.codes.push(E4M3.to_f64(E4M3.encode_rne(value)));
            }
            prepared.columns.push(column * 8.0);
        }
        prepared
    }

    fn case(&self, y: &[u32]) -> Vec<u8> {
        let k = self.size_k;
        let bytes = |codes: &[u32]| codes.iter().map(|&c| c as u8).collect::<Vec<u8>>();
        let floats = |name: &str, shape: Vec<usize>, values: &[f32]| {
            Tensor::from_vec(name, DType::F32, shape, values.to_vec()).expect("scales")
        };
        let e4m3 = |name: &str, rows: usize, codes: &[u32]| {
            Tensor::new(name, DType::F8E4M3, vec![rows, k], bytes(codes)).expect("codes")
        };
        let groups = k.div_ceil(GROUP);
        let halves: Vec<u16> = y.iter().map(|&b| b as u16).collect();
        let shape = vec![ROWS, COLUMNS];
        let mut tensors = vec![
            e4m3("in.a", ROWS, &self.a),
            Tensor::from_vec("out.y", DType::BF16, shape, halves).expect("y"),
        ];
        let sizes =
            format!("\"dtype\":\"bfloat16\",\"size_m\":{ROWS},\"size_n\":{COLUMNS},\"size_k\":{k}");
        let (op, more) = match self.kind {
            Kind::Channels => {
                tensors.push(e4m3("in.weight", COLUMNS, &self.w));
                tensors.push(floats("in.a_scales", vec![ROWS, 1], &self.a_scales));
                tensors.push(floats("in.weight_scale", vec![COLUMNS, 1], &self.w_scales));
                let more = "\"per_act_token_quant\":true,\"per_out_ch_quant\":true".to_owned();
                ("cutlass_scaled_mm", more)
            }
            Kind::Blocks => {
                tensors.push(e4m3("in.weight", COLUMNS, &self.w));
                tensors.push(floats("in.a_scales", vec![ROWS, groups], &self.a_scales));
                let of_blocks = &self.w_scales[..groups];
                tensors.push(floats("in.weight_scale", vec![1, groups], of_blocks));
                ("cutlass_scaled_mm", format!("\"weight_block_size\":[{GROUP},{GROUP}]"))
            }
            Kind::W4a8 => {
                let word = |w: &[u32]| {
                    // Codes plus 8, the first in the lowest bits.
                    w.iter().enumerate().fold(0u32, |word, (i, &c)| word | c << (4 * i)) as i32
                };
                let words: Vec<i32> = self.w.chunks(8).map(word).collect();
                let size = w4a8_group(k);
                let scales = self.w_scales.iter().map(|&s| BF16.encode_rne(s.into()) as u16);
                let packed = vec![COLUMNS, k / 8];
                tensors.push(
                    Tensor::from_vec("in.weight_packed", DType::I32, packed, words).expect("words"),
                );
                let shape = vec![COLUMNS, k / size];
                let scales =
                    Tensor::from_vec("in.weight_scale", DType::BF16, shape, scales.collect());
                tensors.push(scales.expect("scales"));
                tensors.push(floats("in.a_scales", vec![ROWS, 1], &self.a_scales));
                ("cutlass_w4a8_mm", format!("\"group_size\":{size}"))
            }
        };
        let metadata = [
            ("format", "marlinspike-case".to_owned()),
            ("version", "1".to_owned()),
            ("op", op.to_owned()),
            ("name", "damaged".to_owned()),
            ("config", format!("{{{sizes},{more}}}")),
        ];
        let metadata = metadata.map(|(key, value)| (key.to_owned(), value)).into();
        write_container(&tensors, &metadata, Vec::new()).expect("a case file")
    }

    fn report(&self, y: &[u32]) -> OutputReport {
        let bytes = self.case(y);
        let case = Case::parse(&bytes).expect("a case");
        let report = check_case_as(&case, &Declared::default()).expect("inputs that can be used");
        report.outputs.into_iter().find(|o| o.name == "y").expect("y")
    }
}

struct Prepared {
    codes: Vec<f64>,
    columns: Vec<f32>,
}

/// 128, as upstream's kernel has, where it divides K.
const fn w4a8_group(size_k: usize) -> usize {
    if size_k.is_multiple_of(GROUP) { GROUP } else { 16 }
}

/// A cell of the table: the verdict on one product with one damage.
fn cell(size_k: usize, kind: Kind, (damage, text): (Damage, &str)) -> &'static str {
    if kind == Kind::Blocks && !size_k.is_multiple_of(GROUP) {
        return "no such product";
    }
    let product = Product::new(kind, size_k);
    let report = product.report(&product.outputs(damage));
    match (report.verdict, damage) {
        (Verdict::Pass, Damage::None) => "passes",
        (Verdict::Fail, _) if damage != Damage::None => "rejected",
        (Verdict::Unchecked, _) if damage != Damage::None => "unchecked",
        _ => panic!("{text}, K {size_k}: {report:?}"),
    }
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn damaged_products_never_pass() {
    let writes = std::env::var_os("MARLINSPIKE_WRITE_DOCS").is_some();
    let all = [512, 1040, 2048, 4096, 7168, 16384];
    let count = if writes { all.len() } else { Tier::current().pick(2, 3, all.len()) };
    let rows: Vec<(usize, (Damage, &str))> =
        all[..count].iter().flat_map(|&k| DAMAGES.map(|damage| (k, damage))).collect();
    let cells: Vec<(usize, Kind, (Damage, &str))> = rows
        .iter()
        .flat_map(|&(k, damage)| KINDS.map(|(kind, _)| (k, kind, damage)))
        // The longest first.
        .rev()
        .collect();
    let words: Vec<&str> = cells.par_iter().with_max_len(1).map(|c| cell(c.0, c.1, c.2)).collect();
    let mut words = words.into_iter().rev();
    let line = |&(k, (_, text)): &(usize, (Damage, &str))| {
        let mut line = format!("| {k} | {text} |");
        for _ in KINDS {
            write!(line, " {} |", words.next().expect("a cell")).expect("memory");
        }
        line
    };
    let rows: Vec<String> = rows.iter().map(line).collect();
    let page = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/src/internals/numerics.md");
    if writes {
        let (begin, end) = ("<!-- damages -->\n", "<!-- end of damages -->");
        let text = std::fs::read_to_string(&page).expect("the page");
        let before = text.split(begin).next().expect("the page");
        let after = text.split(end).nth(1).expect("the end of the table");
        let names = KINDS.map(|(_, name)| name).join(" | ");
        let head = format!("| K | damage | {names} |\n{}|\n", "| --- ".repeat(2 + KINDS.len()));
        let text = format!("{before}{begin}{head}{}\n{end}{after}", rows.join("\n"));
        std::fs::write(&page, text).expect("the page");
    }
    let text = std::fs::read_to_string(page).expect("the page");
    for line in &rows {
        assert!(text.contains(line.as_str()), "run with MARLINSPIKE_WRITE_DOCS=1: {line}");
    }
}
