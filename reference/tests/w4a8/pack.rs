//! Packing directly from a `Weight`'s words gives the bytes of the definition, whose columns are
//! made here from the same values.

use marlinspike::Error;
use marlinspike::layouts::kleidi::{Columns, NR, RhsLayout, operator_scales};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

/// K and group: whole and partial chunks, one group and several, a group that is the whole K.
const DEPTHS: [(usize, i64); 9] =
    [(8, -1), (24, -1), (32, -1), (40, -1), (96, -1), (64, 32), (64, 64), (256, 128), (320, 160)];

struct Case {
    shape: Shape,
    group: GroupSize,
    /// `[N, K]`, −8 to 7.
    codes: Vec<i8>,
    /// bf16 bits `[N, groups]`.
    scales: Vec<u16>,
    bias: Vec<f32>,
}

impl Case {
    fn new(size_k: usize, group: i64, size_n: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let group = GroupSize::from_config(group).unwrap();
        let shape = Shape::new(size_k, size_n);
        // Some columns at an end of the range: the largest sums.
        let ends: Vec<usize> = (0..size_n).map(|_| rng.below(4)).collect();
        let code = |rng: &mut Rng, n: usize| match ends[n] {
            0 => -8,
            1 => 7,
            _ => rng.below(16) as i8 - 8,
        };
        let mut codes = Vec::new();
        for n in 0..size_n {
            codes.extend((0..size_k).map(|_| code(&mut rng, n)));
        }
        let count = size_n * group.groups(shape.k()).unwrap();
        let scales = (0..count).map(|_| 0x3c00 + rng.below(0x200) as u16).collect();
        let bias = (0..size_n).map(|n| n as f32 - 2.5).collect();
        Self { shape, group, codes, scales, bias }
    }

    fn channel_wise(&self) -> bool {
        self.scales.len() == self.shape.size_n
    }

    fn columns(&self, with_bias: bool) -> Columns {
        let bias = with_bias.then_some(&self.bias[..]);
        if self.channel_wise() {
            let widen = |&bits: &u16| f32::from_bits(u32::from(bits) << 16);
            let scales: Vec<f32> = self.scales.iter().map(widen).collect();
            return Columns::channel_wise(self.shape, self.codes.clone(), &scales, bias).unwrap();
        }
        let g = self.group.rows(self.shape.k());
        Columns::group_wise(self.shape, g, self.codes.clone(), self.scales.clone(), bias).unwrap()
    }

    fn weight(&self, with_bias: bool) -> Weight<'static> {
        let Shape { size_k, size_n } = self.shape;
        let code = |k: usize, n: usize| (self.codes[n * size_k + k] + 8) as u8;
        let groups = self.scales.len() / size_n;
        let at = |i: usize| self.scales[i % size_n * groups + i / size_n];
        let scales = TableData::B16((0..self.scales.len()).map(at).collect());
        let bias = TableData::B32(self.bias.iter().map(|b| b.to_bits()).collect());
        let bias = Table::new(ScalarType::FLOAT32, 1, size_n, bias).unwrap();
        Weight {
            name: "w".to_owned(),
            ty: ScalarType::UINT4B8,
            codes: Codes::from_fn(4, self.shape, code).unwrap(),
            scales: Table::new(ScalarType::BFLOAT16, groups, size_n, scales).unwrap(),
            zeros: None,
            groups: Groups::Uniform(self.group),
            global_scale: None,
            bias: with_bias.then_some(bias),
        }
    }
}

#[test]
fn the_bytes_are_the_definitions() {
    for (size_k, group) in DEPTHS {
        for (size_n, nr) in [1, 3, 4, 8, 9, 20, 32].into_iter().flat_map(|n| NR.map(|r| (n, r))) {
            let case = Case::new(size_k, group, size_n, size_k as u64 * 31 + size_n as u64);
            let layout = RhsLayout::new(case.shape, case.group, nr).unwrap();
            for with_bias in [false, true] {
                let mut weight = case.weight(with_bias);
                weight.scales = operator_scales(&weight, false).unwrap();
                let found = layout.pack_weight(&weight).unwrap();
                let expected = layout.pack(&case.columns(with_bias)).unwrap();
                let differs = expected.compare(&found).unwrap();
                assert_eq!(differs, None, "{} group {group} nr {nr}", case.shape);
                assert_eq!(expected.bytes(), found.bytes());
            }
        }
    }
}

/// Whole blocks of columns, packed separately, equal the same range of the whole packed bytes.
#[test]
fn runs_of_blocks_are_packed_alone() {
    let case = Case::new(128, 32, 44, 5);
    let weight = case.weight(true);
    for nr in NR {
        let whole = RhsLayout::new(case.shape, case.group, nr).unwrap();
        let bytes = whole.pack_weight(&weight).unwrap();
        let mut joined = Vec::new();
        for columns in [0..16, 16..40, 40..44] {
            let part = weight.slice_columns(columns.clone()).unwrap();
            let layout = RhsLayout::new(part.shape(), case.group, nr).unwrap();
            joined.extend_from_slice(layout.pack_weight(&part).unwrap().bytes());
        }
        assert_eq!(joined, bytes.bytes(), "nr {nr}");
    }
}

#[test]
fn scales_become_the_operators() {
    let f16 = |bits: Vec<u16>, group| {
        let case = Case::new(64, group, bits.len() * 32 / if group == 32 { 64 } else { 32 }, 1);
        let rows = case.group.groups(case.shape.k()).unwrap();
        let data = TableData::B16(bits);
        let scales = Table::new(ScalarType::FLOAT16, rows, case.shape.size_n, data).unwrap();
        Weight { scales, ..case.weight(false) }
    };
    // 1 + 2^-10, and halves of bf16's last place: 1 + 2^-8 goes down to even, 1 + 3 · 2^-8 up.
    let bits = vec![0x3c01, 0x3c04, 0x3c0c, 0x0001];
    let bf16 = [0x3f80u32, 0x3f80, 0x3f82, 0x3380];
    let f32s = [0x3f80_2000u32, 0x3f80_8000, 0x3f81_8000, 0x3380_0000];
    let read = |w: &Weight<'_>, grouped| {
        let t = operator_scales(w, grouped).unwrap();
        (t.ty(), t.iter_bits().collect::<Vec<_>>())
    };
    let grouped = f16(bits.clone(), 32);
    assert_eq!(read(&grouped, false), (ScalarType::BFLOAT16, bf16.to_vec()));
    assert_eq!(read(&grouped, true), (ScalarType::BFLOAT16, bf16.to_vec()));
    let channel = f16(bits, -1);
    assert_eq!(read(&channel, false), (ScalarType::FLOAT32, f32s.to_vec()));
    let rounded = bf16.map(|b| b << 16).to_vec();
    assert_eq!(read(&channel, true), (ScalarType::FLOAT32, rounded));
}

#[test]
fn what_the_operator_cannot_hold_is_refused() {
    let case = Case::new(64, 32, 8, 2);
    let layout = RhsLayout::new(case.shape, case.group, 8).unwrap();
    let pack = |w: &Weight<'_>| layout.pack_weight(w).unwrap_err();
    let good = case.weight(false);
    let with = |change: &dyn Fn(&mut Weight<'static>)| {
        let mut w = good.clone();
        change(&mut w);
        pack(&w)
    };
    let zeros = Table::new(ScalarType::UINT4, 2, 8, TableData::B8(vec![8; 16])).unwrap();
    let unsupported = |e: Error, part: &str| match e {
        Error::Unsupported { what, .. } => assert!(what.contains(part), "{what}"),
        other => panic!("{other:?}"),
    };
    unsupported(with(&|w| w.ty = ScalarType::UINT4), "codes of type");
    unsupported(with(&|w| w.zeros = Some(zeros.clone())), "zero points");
    unsupported(with(&|w| w.global_scale = Some(1.0)), "global scale");
    unsupported(with(&|w| w.scales = w.scales.map(ScalarType::FLOAT32, |b| b << 16)), "scales");
    let g_idx = vec![1u32; 64];
    let indexed = Groups::Indexed { g_idx, group_size: GroupSize::Of(32) };
    unsupported(with(&|w| w.groups = indexed.clone()), "g_idx");
    let other = Case::new(64, 64, 8, 2);
    let mut w = other.weight(false);
    w.scales = operator_scales(&w, false).unwrap();
    assert!(matches!(pack(&w), Error::Size { .. }));
    let narrow = Case::new(64, 32, 7, 2).weight(false);
    assert!(matches!(pack(&narrow), Error::Shape { .. }));
    // The largest f32 is an infinity as bf16.
    let huge = good.scales.map(ScalarType::FLOAT32, |_| f32::MAX.to_bits());
    let w = Weight { scales: huge, ..good.clone() };
    match operator_scales(&w, true).unwrap_err() {
        Error::Value { index, .. } => assert_eq!(index, [0, 0]),
        other => panic!("{other:?}"),
    }
}
