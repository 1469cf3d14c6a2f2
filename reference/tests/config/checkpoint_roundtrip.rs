//! Packing and unpacking are inverses over the whole lattice, and each stored element is where the
//! format's definition puts it.

use marlinspike::formats::awq::AwqTensors;
use marlinspike::formats::compressed_tensors::{ByteTensors, PackedTensors};
use marlinspike::formats::fp8::{Fp8Scales, Fp8Tensors};
use marlinspike::formats::global_scale::GlobalStorage;
use marlinspike::formats::global_scale::{GlobalScale, Shards};
use marlinspike::formats::gptq::{GptqTensors, ZeroPoints};
use marlinspike::formats::integers::IntStorage;
use marlinspike::formats::mxfp4::Mxfp4Tensors;
use marlinspike::formats::mxfp8::Mxfp8Tensors;
use marlinspike::formats::nvfp4::Nvfp4Tensors;
use marlinspike::formats::transpose_words;
use marlinspike::num::array::into_vec;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType as T;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use ndarray::Array2;
use proptest::prelude::*;

/// A stream of bits from a seed.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }
}

/// The parts of a weight of the lattice.
#[derive(Debug, Clone)]
struct Recipe {
    ty: T,
    shape: Shape,
    group_size: GroupSize,
    /// Scale rows of an act-ordered weight; `None`: uniform groups.
    act_order: Option<usize>,
    scale: T,
    bias: bool,
    seed: u64,
}

impl Recipe {
    fn weight(&self) -> Weight<'static> {
        let mut rng = Bits(self.seed);
        let Shape { size_k, size_n } = self.shape;
        let bits = self.ty.size_bits();
        let codes =
            Codes::from_fn(bits, self.shape, |_, _| rng.next() as u8 & (0xff >> (8 - bits)));
        let groups = match self.act_order {
            Some(groups) => groups,
            None => self.group_size.groups(self.shape.k()).unwrap(),
        };
        let scales = self.table(self.scale, groups, &mut rng);
        let zeros = matches!(self.ty, T::UINT4 | T::UINT8).then(|| {
            let codes = (0..groups * size_n).map(|_| rng.next() as u8 & (0xff >> (8 - bits)));
            Table::new(self.ty, groups, size_n, TableData::B8(codes.collect())).unwrap()
        });
        let group_size = self.group_size;
        let weight_groups = match self.act_order {
            None => Groups::Uniform(group_size),
            Some(groups) => {
                let g_idx = (0..size_k).map(|_| rng.below(groups) as u32).collect();
                Groups::Indexed { g_idx, group_size }
            }
        };
        let bias = self.bias.then(|| self.table(T::FLOAT16, 1, &mut rng));
        let global_scale = (self.scale == T::FLOAT8_E4M3FN).then_some(0.375);
        let (name, ty) = ("model.layer".to_owned(), self.ty);
        let codes = codes.unwrap();
        Weight { name, ty, codes, scales, zeros, groups: weight_groups, global_scale, bias }
    }

    /// Finite positive numbers of type `ty`.
    fn table(&self, ty: T, rows: usize, rng: &mut Bits) -> Table {
        let len = rows * self.shape.size_n;
        let data = match ty {
            T::FLOAT32 => TableData::B32((0..len).map(|_| rng.next() % 0x7f80_0000).collect()),
            T::FLOAT16 => TableData::B16((0..len).map(|_| (rng.next() % 0x7c00) as u16).collect()),
            T::BFLOAT16 => TableData::B16((0..len).map(|_| (rng.next() % 0x7f80) as u16).collect()),
            T::FLOAT8_E8M0FNU => {
                TableData::B8((0..len).map(|_| (rng.next() % 255) as u8).collect())
            }
            _ => TableData::B8((0..len).map(|_| (rng.next() % 0x7f) as u8).collect()),
        };
        Table::new(ty, rows, self.shape.size_n, data).unwrap()
    }
}

const INTS: &[T] = &[T::UINT4B8, T::UINT8B128, T::UINT4, T::UINT8];
const FLOATS: &[T] = &[T::FLOAT16, T::BFLOAT16, T::FLOAT32];

/// K a multiple of 32, N of 8, groups that divide K, or act-order with any number of groups.
fn recipe(
    types: &'static [T],
    scales: &'static [T],
    group: Option<usize>,
) -> BoxedStrategy<Recipe> {
    let size = (1usize..9, 1usize..10).prop_map(|(k, n)| Shape::new(32 * k, 8 * n));
    let groups = (0usize..5, proptest::option::of(1usize..9));
    (size, groups, 0..types.len(), 0..scales.len(), any::<bool>(), any::<u64>())
        .prop_map(move |(shape, (pick, act_order), ty, scale, bias, seed)| {
            let group_size = match (group, pick) {
                (Some(g), _) => GroupSize::Of(g),
                (None, 0) => GroupSize::Channel,
                (None, 1) => GroupSize::Of(shape.size_k),
                (None, 2) => GroupSize::Of(8),
                (None, _) => GroupSize::Of(32),
            };
            let act_order = act_order.filter(|_| group_size != GroupSize::Channel);
            let act_order = act_order.filter(|_| group.is_none());
            let (ty, scale) = (types[ty], scales[scale]);
            Recipe { ty, shape, group_size, act_order, scale, bias, seed }
        })
        .boxed()
}

/// Equality, except that a file cannot distinguish an ascending index from none.
fn assert_same(found: &Weight<'_>, expected: &Weight<'_>) {
    assert_eq!(found.codes, expected.codes);
    assert_eq!(found.scales, expected.scales);
    assert_eq!(found.zeros, expected.zeros);
    assert_eq!((found.ty, &found.name), (expected.ty, &expected.name));
    assert_eq!((found.global_scale, &found.bias), (expected.global_scale, &expected.bias));
    assert_eq!(found.groups.group_size(), expected.groups.group_size());
    for k in 0..expected.shape().size_k {
        assert_eq!(found.groups.group_of(k), expected.groups.group_of(k));
    }
}

fn i32s(t: &Tensor<'_>) -> Vec<i32> {
    t.elements::<i32>().to_vec()
}

/// Field `i` of `bits` of a word.
fn field(word: i32, i: usize, bits: u32) -> u8 {
    (word as u32 >> (i as u32 * bits)) as u8 & (0xff >> (8 - bits))
}

proptest! {
    #[test]
    fn gptq_there_and_back(r in recipe(INTS, FLOATS, None), v2 in any::<bool>()) {
        let weight = r.weight();
        let zeros = if v2 { ZeroPoints::V2 } else { ZeroPoints::V1 };
        let tensors = GptqTensors::pack(&weight, zeros).unwrap();
        let Shape { size_k, size_n } = r.shape;
        let (bits, pack) = (weight.codes.bits(), weight.codes.pack());
        prop_assert_eq!(tensors.qweight.shape(), [size_k / pack, size_n]);
        let qzeros = tensors.qzeros.clone().unwrap();
        for g in 0..weight.scales.rows() {
            for n in 0..size_n {
                let stored = field(i32s(&qzeros)[g * (size_n / pack) + n / pack], n % pack, bits);
                let zero = match &weight.zeros {
                    Some(z) => z.bits(g, n) as u8,
                    None => weight.ty.bias() as u8,
                };
                let expected = if v2 { zero } else { zero.wrapping_sub(1) & (0xff >> (8 - bits)) };
                prop_assert_eq!(stored, expected);
            }
        }
        let scheme = IntStorage {
            bits,
            group_size: r.group_size,
            symmetric: !weight.needs_zeros(),
            act_order: r.act_order.is_some(),
        };
        assert_same(&tensors.clone().unpack("model.layer", &scheme, zeros).unwrap(), &weight);
        // Without `desc_act` the trivial index is there and ignored, with it recognized.
        let desc_act = IntStorage { act_order: true, ..scheme };
        assert_same(&tensors.unpack("model.layer", &desc_act, zeros).unwrap(), &weight);
    }

    #[test]
    fn awq_there_and_back(r in recipe(&[T::UINT4, T::UINT8], FLOATS, None)) {
        let r = Recipe { act_order: None, ..r };
        let weight = r.weight();
        let tensors = AwqTensors::pack(&weight).unwrap();
        let (bits, pack) = (weight.codes.bits(), weight.codes.pack());
        let order: &[usize] =
            if bits == 4 { &[0, 2, 4, 6, 1, 3, 5, 7] } else { &[0, 2, 1, 3] };
        let Shape { size_k, size_n } = r.shape;
        let words = i32s(&tensors.qweight);
        for k in 0..size_k {
            for n in 0..size_n {
                let word = words[k * (size_n / pack) + n / pack];
                let i = order.iter().position(|&c| c == n % pack).unwrap();
                prop_assert_eq!(field(word, i, bits), weight.codes.get(k, n));
            }
        }
        assert_same(&tensors.unpack("model.layer", bits, r.group_size).unwrap(), &weight);
    }

    #[test]
    fn compressed_tensors_there_and_back(r in recipe(INTS, FLOATS, None), odd_n in 0usize..8) {
        // N need fill no whole words.
        let shape = Shape::new(r.shape.size_k, r.shape.size_n + odd_n);
        let r = Recipe { shape, ..r };
        let weight = r.weight();
        let (bits, pack) = (weight.codes.bits(), weight.codes.pack());
        let scheme = IntStorage {
            bits,
            group_size: r.group_size,
            symmetric: !weight.needs_zeros(),
            act_order: r.act_order.is_some(),
        };
        let packed = PackedTensors::pack(&weight).unwrap();
        let ints = ByteTensors::pack(&weight).unwrap();
        let (words, values) = (i32s(&packed.weight_packed), ints.weight.elements::<i8>().to_vec());
        let half = 1i32 << (bits - 1);
        for n in 0..shape.size_n {
            for k in 0..shape.size_k {
                let code = weight.codes.get(k, n);
                let word = words[n * (shape.size_k / pack) + k / pack];
                prop_assert_eq!(field(word, k % pack, bits), code);
                prop_assert_eq!(i32::from(values[n * shape.size_k + k]), i32::from(code) - half);
            }
        }
        assert_same(&packed.unpack("model.layer", &scheme).unwrap(), &weight);
        assert_same(&ints.unpack("model.layer", &scheme).unwrap(), &weight);
    }

    #[test]
    fn fp8_channel_there_and_back(r in recipe(&[T::FLOAT8_E4M3FN], FLOATS, None)) {
        let r = Recipe { act_order: None, group_size: GroupSize::Channel, ..r };
        let weight = r.weight();
        let tensors = Fp8Tensors::pack(&weight, &Fp8Scales::Channel).unwrap();
        prop_assert_eq!(tensors.weight_scale.shape(), [r.shape.size_n, 1]);
        let bytes = tensors.weight.bytes();
        for n in 0..r.shape.size_n {
            for k in 0..r.shape.size_k {
                prop_assert_eq!(bytes[n * r.shape.size_k + k], weight.codes.get(k, n));
            }
        }
        assert_same(&tensors.unpack("model.layer", &Fp8Scales::Channel).unwrap(), &weight);
    }

    /// Blocks that do not divide N, against the definition: element (k, n) has the scale of block
    /// [n / bn, k / bk].
    #[test]
    fn fp8_blocks(
        n in 1usize..40, groups in 1usize..4, block_n in 1usize..17, quarter in 1usize..9,
        seed in any::<u64>(),
    ) {
        let (block_k, mut rng) = (4 * quarter, Bits(seed));
        let (k, blocks) = (groups * block_k, n.div_ceil(block_n));
        let bytes: Vec<u8> = (0..n * k).map(|_| rng.next() as u8).collect();
        let scales: Vec<f32> = (0..blocks * groups).map(|_| rng.next() as f32).collect();
        let tensors = Fp8Tensors {
            weight: Tensor::new("weight", DType::F8E4M3, vec![n, k], bytes.clone()).unwrap(),
            weight_scale: Tensor::from_vec(
                "weight_scale_inv", DType::F32, vec![blocks, groups], scales.clone(),
            ).unwrap(),
            bias: None,
        };
        let scheme = Fp8Scales::Block { block_n, block_k };
        let weight = tensors.clone().unpack("", &scheme).unwrap();
        for nn in 0..n {
            for kk in 0..k {
                let code = T::FLOAT8_E4M3FN.to_f64(bytes[nn * k + kk].into());
                let scale = scales[nn / block_n * groups + kk / block_k];
                let expected = code * f64::from(scale);
                let found = weight.dequantize(kk, nn);
                prop_assert!(found == expected || (found.is_nan() && expected.is_nan()));
            }
        }
        let again = Fp8Tensors::pack(&weight, &scheme).unwrap();
        prop_assert_eq!(again.weight.bytes(), tensors.weight.bytes());
        prop_assert_eq!(again.weight_scale, tensors.weight_scale);
    }

    #[test]
    fn mxfp8_there_and_back(r in recipe(&[T::FLOAT8_E4M3FN], &[T::FLOAT8_E8M0FNU], Some(32))) {
        let weight = r.weight();
        let tensors = Mxfp8Tensors::pack(&weight).unwrap();
        let Shape { size_k, size_n } = r.shape;
        for n in 0..size_n {
            for k in 0..size_k {
                let code = T::FLOAT8_E4M3FN.to_f64(tensors.weight.bytes()[n * size_k + k].into());
                let scale = tensors.weight_scale.bytes()[n * (size_k / 32) + k / 32];
                let expected = code * 2f64.powi(i32::from(scale) - 127);
                let found = weight.dequantize(k, n);
                prop_assert!(found == expected || (found.is_nan() && expected.is_nan()));
            }
        }
        assert_same(&tensors.unpack("model.layer").unwrap(), &weight);
    }

    #[test]
    fn mxfp4_there_and_back(r in recipe(&[T::FLOAT4_E2M1F], &[T::FLOAT8_E8M0FNU], Some(32))) {
        const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let weight = r.weight();
        let tensors = Mxfp4Tensors::pack(&weight).unwrap();
        let Shape { size_k, size_n } = r.shape;
        for n in 0..size_n {
            for k in 0..size_k {
                let byte = tensors.weight.bytes()[n * (size_k / 2) + k / 2];
                let code = if k % 2 == 0 { byte & 15 } else { byte >> 4 };
                let magnitude = E2M1[usize::from(code & 7)];
                let value = if code & 8 != 0 { -magnitude } else { magnitude };
                let scale = tensors.weight_scale.bytes()[n * (size_k / 32) + k / 32];
                prop_assert_eq!(weight.dequantize(k, n), value * 2f64.powi(i32::from(scale) - 127));
            }
        }
        let [blocks, scales, bias] = tensors.clone().into_blocks().unwrap();
        let blocks = blocks.unwrap();
        prop_assert_eq!(blocks.shape(), [size_n, size_k / 32, 16]);
        let again = Mxfp4Tensors::from_blocks(blocks, scales.unwrap(), bias).unwrap();
        prop_assert_eq!(&again, &tensors);
        assert_same(&tensors.unpack("model.layer").unwrap(), &weight);
    }

    #[test]
    fn nvfp4_there_and_back(
        r in recipe(&[T::FLOAT4_E2M1F], &[T::FLOAT8_E4M3FN], Some(16)), divisor in any::<bool>(),
    ) {
        // A multiplier whose reciprocal's reciprocal is itself.
        let mut weight = r.weight();
        weight.global_scale = Some(0.125);
        let global = if divisor { GlobalScale::Divisor } else { GlobalScale::Multiplier };
        let tensors = Nvfp4Tensors::pack(&weight, global).unwrap();
        let stored = tensors.weight_global_scale.elements::<f32>()[0];
        prop_assert_eq!(stored, if divisor { 8.0 } else { 0.125 });
        let scheme = GlobalStorage { global, shards: Shards::Equal };
        assert_same(&tensors.unpack("model.layer", scheme).unwrap(), &weight);
    }

    #[test]
    fn transposition(rows in 1usize..70, cols in 1usize..70) {
        let src: Vec<u32> = (0..rows * cols).map(|i| i as u32).collect();
        let src = Array2::from_shape_vec((rows, cols), src).unwrap();
        let dst = transpose_words(src.view());
        prop_assert_eq!(dst.dim(), (cols, rows));
        for r in 0..rows {
            for c in 0..cols {
                prop_assert_eq!(dst[[c, r]], src[[r, c]]);
            }
        }
        prop_assert_eq!(transpose_words(dst.t()), dst, "of strided words");
    }

    #[test]
    fn the_whole_matrix_is_its_elements(r in recipe(INTS, FLOATS, None)) {
        let weight = r.weight();
        let all = into_vec(weight.dequantize_all());
        for k in 0..r.shape.size_k {
            for n in 0..r.shape.size_n {
                prop_assert_eq!(all[k * r.shape.size_n + n], weight.dequantize(k, n));
            }
        }
    }
}
