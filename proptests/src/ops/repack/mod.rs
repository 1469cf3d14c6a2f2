//! Packed weights.

mod mutants;

pub(super) use mutants::mutants;

use marlinspike::Result;
use marlinspike::formats::transpose_words;
use marlinspike::layouts::Layout;
use marlinspike::layouts::marlin::{Activations, WeightLayout};
use marlinspike::num::array::{into_vec, rows_of};
use marlinspike::num::dims::Shape;
use marlinspike::vectors::Rng;
use marlinspike::weight::Codes;
use proptest::prelude::*;

use crate::laws::{broken, call, compare};
use crate::ops::{fill, one_of};
use crate::{Failure, Law, Operation, Subject};

const SIZES_K: &[usize] = &[32, 64, 128, 256];
const SIZES_N: &[usize] = &[64, 128, 192, 320];

/// Width class of the activations.
fn activations(is_a_8bit: bool) -> Activations {
    if is_a_8bit { Activations::Bits8 } else { Activations::Bits16 }
}

/// The place of (element, bit) of a stack of packed weights.
fn place(layout: &WeightLayout, element: usize, bit: u32) -> String {
    let len = layout.packed_len();
    format!("expert {} {}", element / len, layout.locate(element % len, bit))
}

/// `gptq_marlin_repack` and, with more than one expert, `gptq_marlin_moe_repack`.
#[derive(Debug)]
pub struct Repack;

/// Arguments of [`Repack`].
#[derive(Clone)]
pub struct RepackInput {
    /// `[experts, size_k / pack, size_n]`, packed along K.
    pub qweight: Vec<u32>,
    /// act-order: `[experts, size_k]`; row k of the packed matrix is row `perm[k]`.
    pub perm: Option<Vec<u32>>,
    /// Number of matrices.
    pub experts: usize,
    /// Rows.
    pub size_k: usize,
    /// Columns.
    pub size_n: usize,
    /// 4 or 8.
    pub num_bits: u32,
    /// Whether activations have 8 bits.
    pub is_a_8bit: bool,
}

impl std::fmt::Debug for RepackInput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; perm {:?}", Repack::describe(self), self.perm)
    }
}

impl RepackInput {
    /// Words of one expert.
    pub fn words(&self) -> usize {
        self.size_k * self.size_n * self.num_bits as usize / 32
    }

    /// Expert `e` on its own.
    pub fn expert(&self, e: usize) -> Self {
        let words = self.words();
        Self {
            qweight: self.qweight[e * words..][..words].to_vec(),
            perm: self.perm.as_ref().map(|p| p[e * self.size_k..][..self.size_k].to_vec()),
            experts: 1,
            ..self.clone()
        }
    }

    fn shape(&self) -> Shape {
        Shape::new(self.size_k, self.size_n)
    }

    /// The layout of each expert's output.
    ///
    /// # Errors
    /// Returns an error for sizes that do not fill tiles.
    pub fn layout(&self) -> Result<WeightLayout> {
        WeightLayout::new(self.shape(), self.num_bits, activations(self.is_a_8bit))
    }

    /// The codes of expert `e`.
    ///
    /// # Errors
    /// Returns an error if `qweight` has another length.
    pub fn codes(&self, e: usize) -> Result<Codes<'_>> {
        let words = self.words();
        Codes::from_words(self.num_bits, self.shape(), &self.qweight[e * words..][..words])
    }
}

impl Operation for Repack {
    const NAME: &'static str = "gptq_marlin_repack";
    type Input = RepackInput;
    type Element = u32;

    fn inputs() -> BoxedStrategy<RepackInput> {
        let sizes = (one_of(SIZES_K), one_of(SIZES_N), 1usize..4);
        let kinds = (one_of(&[4u32, 8]), any::<bool>(), proptest::option::of(any::<u64>()));
        (sizes, kinds, fill())
            .prop_map(|((size_k, size_n, experts), (num_bits, is_a_8bit, order), fill)| {
                let words = experts * size_k * size_n * num_bits as usize / 32;
                let perm = order.map(|seed| {
                    let mut rng = Rng::new(seed);
                    let one = |_| {
                        let mut perm: Vec<u32> = (0..size_k as u32).collect();
                        rng.shuffle(&mut perm);
                        perm
                    };
                    (0..experts).flat_map(one).collect()
                });
                let qweight = fill.words(words);
                RepackInput { qweight, perm, experts, size_k, size_n, num_bits, is_a_8bit }
            })
            .boxed()
    }

    fn expected(input: &RepackInput) -> Result<Vec<u32>> {
        let layout = input.layout()?;
        let mut out = Vec::new();
        for e in 0..input.experts {
            let perm = input.perm.as_ref().map(|p| &p[e * input.size_k..][..input.size_k]);
            out.extend(layout.pack(&input.codes(e)?, perm)?);
        }
        Ok(out)
    }

    fn width(input: &RepackInput) -> u32 {
        input.num_bits
    }

    fn place(input: &RepackInput, element: usize, bit: u32) -> String {
        input.layout().map_or_else(|e| e.to_string(), |l| place(&l, element, bit))
    }

    fn describe(i: &RepackInput) -> String {
        format!(
            "experts {} size_k {} size_n {} num_bits {} is_a_8bit {}{}",
            i.experts,
            i.size_k,
            i.size_n,
            i.num_bits,
            i.is_a_8bit,
            if i.perm.is_some() { " with perm" } else { "" }
        )
    }

    fn own_laws() -> Vec<Law<Self>> {
        vec![
            Law { name: "unpacking gives the codes back", check: unpacks },
            Law { name: "pack with perm = pack of gathered rows", check: gathers },
            Law { name: "experts are independent", check: independent },
            Law { name: "one code changes one value", check: local },
        ]
    }
}

fn unpacks(s: &dyn Subject<Repack>, input: &RepackInput) -> Result<(), Failure> {
    let refused = |e: marlinspike::Error| broken::<Repack>(input, e.to_string());
    let found = call(s, input, 0)?;
    let layout = input.layout().map_err(refused)?;
    for (e, packed) in found.chunks_exact(layout.packed_len()).enumerate() {
        let perm = input.perm.as_ref().map(|p| &p[e * input.size_k..][..input.size_k]);
        let packed = rows_of("packed", packed, layout.packed_shape()[1]).map_err(refused)?;
        let back = layout.unpack(packed, perm).map_err(refused)?;
        let codes = input.codes(e).map_err(refused)?;
        for k in 0..input.size_k {
            for n in 0..input.size_n {
                let (expected, found) = (codes.get(k, n), back.get(k, n));
                if expected != found {
                    let what = format!(
                        "expert {e}, checkpoint row k {k}, n {n}: unpacked {found:#x}, was \
                         {expected:#x}"
                    );
                    return Err(broken::<Repack>(input, what));
                }
            }
        }
    }
    Ok(())
}

/// Compares the subject with itself on rows gathered in advance, without a permutation.
fn gathers(s: &dyn Subject<Repack>, input: &RepackInput) -> Result<(), Failure> {
    let refused = |e: marlinspike::Error| broken::<Repack>(input, e.to_string());
    let Some(perm) = &input.perm else { return Ok(()) };
    let mut qweight = Vec::with_capacity(input.qweight.len());
    for (e, perm) in perm.chunks_exact(input.size_k).enumerate() {
        let codes = input.codes(e).and_then(|c| c.gather_rows(perm)).map_err(refused)?;
        qweight.extend(codes.into_words());
    }
    let gathered = RepackInput { qweight, perm: None, ..input.clone() };
    let (with, without) = (call(s, input, 0)?, call(s, &gathered, 0)?);
    compare::<Repack>(input, &without, &with, "gathering beforehand gives another result")
}

fn independent(s: &dyn Subject<Repack>, input: &RepackInput) -> Result<(), Failure> {
    let whole = call(s, input, 0)?;
    let mut alone = Vec::with_capacity(whole.len());
    for e in 0..input.experts {
        alone.extend(call(s, &input.expert(e), 0)?);
    }
    compare::<Repack>(input, &alone, &whole, "an expert alone gives another result")
}

fn local(s: &dyn Subject<Repack>, input: &RepackInput) -> Result<(), Failure> {
    let before = call(s, input, 0)?;
    let mut changed = input.clone();
    let at = input.qweight.len() / 3;
    changed.qweight[at] ^= 1;
    let after = call(s, &changed, 0)?;
    let bits: u32 = before.iter().zip(&after).map(|(a, b)| (a ^ b).count_ones()).sum();
    if bits == 1 {
        return Ok(());
    }
    let what = format!("one flipped bit of qweight word {at} flipped {bits} bits of the output");
    Err(broken::<Repack>(input, what))
}

/// Weights of e2m1 codes, two per byte, as in NVFP4 and MXFP4 checkpoints.
#[derive(Debug)]
pub struct Fp4Repack;

/// Arguments of [`Fp4Repack`].
#[derive(Debug, Clone)]
pub struct Fp4Input {
    /// `[size_n, size_k / 2]`, even k in the low nibble.
    pub weight: Vec<u8>,
    /// Rows.
    pub size_k: usize,
    /// Columns.
    pub size_n: usize,
}

impl Fp4Input {
    fn layout(&self) -> Result<WeightLayout> {
        WeightLayout::new(Shape::new(self.size_k, self.size_n), 4, Activations::Bits16)
    }
}

impl Operation for Fp4Repack {
    const NAME: &'static str = "fp4_marlin_repack";
    type Input = Fp4Input;
    type Element = u32;

    fn inputs() -> BoxedStrategy<Fp4Input> {
        (one_of(SIZES_K), one_of(SIZES_N), fill())
            .prop_map(|(size_k, size_n, fill)| {
                let words = fill.words(size_k * size_n / 8);
                let weight = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                Fp4Input { weight, size_k, size_n }
            })
            .boxed()
    }

    fn expected(i: &Fp4Input) -> Result<Vec<u32>> {
        let words: Vec<u32> =
            i.weight.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect();
        let words = transpose_words(rows_of("weight", &words, i.size_k / 8)?);
        i.layout()?.pack(&Codes::from_array(4, words)?, None).map(into_vec)
    }

    fn width(_: &Fp4Input) -> u32 {
        4
    }

    fn place(i: &Fp4Input, element: usize, bit: u32) -> String {
        i.layout().map_or_else(|e| e.to_string(), |l| l.locate(element, bit).to_string())
    }

    fn describe(i: &Fp4Input) -> String {
        format!("size_k {} size_n {}", i.size_k, i.size_n)
    }
}

/// Packs gate and up as the matrix w13, gate's columns first.
#[derive(Debug)]
pub struct MergeW13;

/// Arguments of [`MergeW13`].
#[derive(Debug, Clone)]
pub struct MergeInput {
    /// `[size_k / 8, size]`, 4 bits packed along K.
    pub gate: Vec<u32>,
    /// The same for up.
    pub up: Vec<u32>,
    /// Hidden size.
    pub size_k: usize,
    /// Intermediate size: columns of each half.
    pub size: usize,
}

impl MergeInput {
    /// Packs `left` and `right`, concatenated along N.
    pub(crate) fn merged(&self, left: &[u32], right: &[u32]) -> Result<Vec<u32>> {
        let rows = left.chunks_exact(self.size).zip(right.chunks_exact(self.size));
        let words: Vec<u32> = rows.flat_map(|(l, r)| [l, r].concat()).collect();
        let layout = self.layout()?;
        layout.pack(&Codes::from_words(4, layout.shape(), words)?, None).map(into_vec)
    }

    fn layout(&self) -> Result<WeightLayout> {
        WeightLayout::new(Shape::new(self.size_k, 2 * self.size), 4, Activations::Bits16)
    }
}

impl Operation for MergeW13 {
    const NAME: &'static str = "w13_marlin_qweight";
    type Input = MergeInput;
    type Element = u32;

    fn inputs() -> BoxedStrategy<MergeInput> {
        (one_of(SIZES_K), one_of(&[64, 128, 192]), fill(), any::<u64>())
            .prop_map(|(size_k, size, gate, up)| {
                let len = size_k / 8 * size;
                let up = super::Fill::Noise(up).words(len);
                MergeInput { gate: gate.words(len), up, size_k, size }
            })
            .boxed()
    }

    fn expected(input: &MergeInput) -> Result<Vec<u32>> {
        input.merged(&input.gate, &input.up)
    }

    fn width(_: &MergeInput) -> u32 {
        4
    }

    fn place(i: &MergeInput, element: usize, bit: u32) -> String {
        let half = |n| if n < i.size { "gate" } else { "up" };
        i.layout().map_or_else(
            |e| e.to_string(),
            |l| {
                let place = l.locate(element, bit);
                format!("{} {place}", half(place.col))
            },
        )
    }

    fn describe(i: &MergeInput) -> String {
        format!("hidden_size {} intermediate_size {}", i.size_k, i.size)
    }
}
