//! Products of e4m3fn activations and weights on a GPU against the reference's execution of CUTLASS's promoted schedule
//! and DeepGEMM's of blocks. Only devices of capability 9.0 have the instructions.

pub(crate) mod experts;
mod products;
mod quantize;

use crate::common::Random;
use crate::fp8_rows::{NOT_WRITTEN, codes};
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Fp8BlockKernel, Fp8Kernel, Schedule};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use marlinspike_accel::{
    Device,
    ops::fp8_gemm::{Fp8Plan, Fp8Scales, Fp8Sums, Fp8Weight, RowsFp8, fp8_gemm, fp8_gemm_planned},
    ops::fp8_scale_step,
};

/// What the kernel computes.
type Kind = (Fp8Scales, Fp8Sums);

const CHANNELS: Kind = (Fp8Scales::Channels, Fp8Sums::Promoted);
const UNPROMOTED: Kind = (Fp8Scales::Channels, Fp8Sums::Unpromoted);
const BLOCKS: Kind = (Fp8Scales::Blocks, Fp8Sums::Promoted);
const KINDS: [Kind; 3] = [CHANNELS, UNPROMOTED, BLOCKS];

/// The kernel's schedule.
fn schedule((of, sums): Kind, dtype: ScalarType) -> Schedule {
    let is_promoted = sums == Fp8Sums::Promoted;
    let schedule = match of {
        Fp8Scales::Channels => Schedule::w8a8_fp8(Fp8Kernel::Cutlass, dtype, is_promoted),
        Fp8Scales::Blocks => Schedule::w8a8_fp8_blocks(Fp8BlockKernel::DeepGemm, dtype),
    };
    schedule.unwrap()
}

/// Scales of usual size; one in thirty is tiny, huge, infinite, NaN, negative or zero.
fn scale(random: &mut Random) -> f32 {
    let usual = (random.normal().abs() * 0.02 + 1e-3) as f32;
    match random.below(180) {
        0 => f32::from_bits(random.next() % 0x0080_0000),
        1 => usual * 1e36,
        2 => f32::INFINITY,
        3 => f32::NAN,
        4 => -usual,
        5 => 0.0,
        _ => usual,
    }
}

fn weight(
    random: &mut Random,
    of: Fp8Scales,
    dtype: ScalarType,
    shape: Shape,
    with_bias: bool,
) -> Weight<'static> {
    let Shape { size_k, size_n } = shape;
    let columns: Vec<Vec<u8>> = (0..size_n).map(|n| codes(random, n / 2, size_k)).collect();
    let codes = Codes::from_fn(8, shape, |k, n| columns[n][k]).unwrap();
    let (groups, group_size) = match of {
        Fp8Scales::Channels => (1, GroupSize::Channel),
        Fp8Scales::Blocks => (size_k / 128, GroupSize::Of(128)),
    };
    let width = if of == Fp8Scales::Blocks { 128 } else { 1 };
    let mut scales = Vec::new();
    for _ in 0..groups {
        let blocks: Vec<u32> =
            (0..size_n.div_ceil(width)).map(|_| scale(random).to_bits()).collect();
        scales.extend((0..size_n).map(|n| blocks[n / width]));
    }
    let bias = with_bias.then(|| {
        Table::new(dtype, 1, size_n, TableData::B16(random.halves(dtype, size_n, 1.0))).unwrap()
    });
    Weight {
        name: "weight".into(),
        ty: ScalarType::FLOAT8_E4M3FN,
        codes,
        scales: Table::new(ScalarType::FLOAT32, groups, size_n, TableData::B32(scales)).unwrap(),
        zeros: None,
        groups: Groups::Uniform(group_size),
        global_scale: None,
        bias,
    }
}

/// A product, with the reference's outputs.
struct Case {
    kind: Kind,
    weight: Weight<'static>,
    dtype: ScalarType,
    codes: Vec<u8>,
    /// As the kernel takes them.
    scales: Vec<f32>,
    /// The same as `[M, groups]`.
    of_rows: Vec<f32>,
    wanted: Vec<u16>,
}

impl Case {
    fn new(
        random: &mut Random,
        kind: Kind,
        dtype: ScalarType,
        shape: Shape,
        size_m: usize,
        with_bias: bool,
    ) -> Self {
        let weight = weight(random, kind.0, dtype, shape, with_bias);
        Self::with_weight(random, kind, dtype, weight, size_m)
    }

    fn with_weight(
        random: &mut Random,
        kind: Kind,
        dtype: ScalarType,
        weight: Weight<'static>,
        size_m: usize,
    ) -> Self {
        let shape = weight.shape();
        let x: Vec<u8> = (0..size_m).flat_map(|m| codes(random, m, shape.size_k)).collect();
        let groups = weight.scales.rows();
        // [M, groups], as the reference takes them.
        let of_rows: Vec<f32> = (0..size_m * groups).map(|_| scale(random)).collect();
        let scales = match kind.0 {
            Fp8Scales::Channels => of_rows.clone(),
            Fp8Scales::Blocks => {
                let step = fp8_scale_step(size_m);
                let at = |i: usize| (i % step < size_m).then(|| i % step * groups + i / step);
                // What pads the rows of scales must not matter.
                let value = |i: usize| at(i).map_or(f32::NAN, |at| of_rows[at]);
                (0..groups * step).map(value).collect()
            }
        };
        let mut case = Self { kind, weight, dtype, codes: x, scales, of_rows, wanted: Vec::new() };
        case.wanted = case.by(&schedule(kind, dtype));
        case
    }

    /// The outputs by a schedule.
    fn by(&self, schedule: &Schedule) -> Vec<u16> {
        let wide: Vec<u32> = self.codes.iter().map(|&code| code.into()).collect();
        let extras = Extras { activation_scales: Some(&self.of_rows), ..Extras::default() };
        let rows = rows_of("x", &wide, self.weight.shape().size_k).unwrap();
        let made = schedule.execute(rows, &self.weight, extras).unwrap();
        made.into_iter().map(|bits| bits as u16).collect()
    }

    fn found(&self, device: &Device, plan: Option<Fp8Plan>) -> Vec<u16> {
        let weight =
            Fp8Weight::new(device, std::slice::from_ref(&self.weight), self.dtype).unwrap();
        let weight = weight.summed(self.kind.1).unwrap();
        let codes = device.upload(&self.codes).unwrap();
        let scales = device.upload(&self.scales).unwrap();
        let mut y = device.upload(&vec![NOT_WRITTEN; self.wanted.len()]).unwrap();
        let x = RowsFp8 { codes: &codes, scales: &scales };
        match plan {
            Some(plan) => fp8_gemm_planned(device, x, &weight, &mut y, plan),
            None => fp8_gemm(device, x, &weight, &mut y),
        }
        .unwrap();
        device.download(&y).unwrap()
    }
}

/// A weight whose products are finite.
fn moderate_weight(
    random: &mut Random,
    of: Fp8Scales,
    dtype: ScalarType,
    shape: Shape,
    with_bias: bool,
) -> Weight<'static> {
    let mut weight = weight(random, of, dtype, shape, with_bias);
    let ty = ScalarType::FLOAT32;
    weight.scales = weight.scales.map(ty, |bits| match f32::from_bits(bits) {
        scale if scale.abs() < 0.2 => bits,
        _ => 0.01f32.to_bits(),
    });
    let words = weight.codes.words().iter().map(|word| word & 0xbfbf_bfbf).collect::<Vec<_>>();
    weight.codes = Codes::from_words(8, shape, words).unwrap();
    weight
}
