//! What the tests of products of e4m3fn rows share, whatever their weight.

use crate::common::{Law, Random};
use marlinspike::moe::align::{Absent, Align};
use marlinspike::num::array::rows_of;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule, Stack};
use marlinspike::weight::{Table, TableData, Weight};
use marlinspike_accel::{
    Buffer, Device,
    ops::align::{DeviceBlocks, Runs, align_on_device},
};

/// Bits of outputs before the product.
pub(crate) const NOT_WRITTEN: u16 = 0xabcd;

/// Codes of a row or column: moderate ones, any without NaN, subnormal ones, zeros, or any.
pub(crate) fn codes(random: &mut Random, line: usize, len: usize) -> Vec<u8> {
    let code = |random: &mut Random| {
        let code = random.next() as u8;
        match line % 7 {
            1 if code & 0x7f == 0x7f => code ^ 1,
            1 => code,
            2 => code & 0x87,
            3 => code & 0x80,
            4 => code,
            _ => code & 0xbf,
        }
    };
    (0..len).map(|_| code(random)).collect()
}

/// `weight` with a bias that cancels the f16 outputs of one row of `plain`, its outputs without one: what is left shows the
/// f32 total's last bits, which 16 bits of a larger number hide.
pub(crate) fn cancelled(weight: Weight<'static>, plain: &[u16]) -> Weight<'static> {
    let size_n = weight.shape().size_n;
    let is_normal = |bits: &u16| (0x0400..0x7c00).contains(&(bits & 0x7fff));
    let mut rows = plain.chunks_exact(size_n);
    let row = rows.find(|row| row.iter().filter(|bits| is_normal(bits)).count() > 400);
    let bias = row.expect("a row of normal numbers").iter().map(|bits| bits ^ 0x8000).collect();
    let bias = Table::new(ScalarType::FLOAT16, 1, size_n, TableData::B16(bias)).unwrap();
    Weight { bias: Some(bias), ..weight }
}

/// Rows that go to random experts, or none.
pub(crate) struct Rows {
    size_k: usize,
    expert_of: Vec<Option<usize>>,
    /// Of each entry.
    codes: Vec<u8>,
    pub(crate) blocks: DeviceBlocks,
    place_of: Vec<i32>,
}

impl Rows {
    /// `entries` rows of `size_k` codes, aligned in blocks of `block_size`.
    pub(crate) fn new(
        device: &Device,
        random: &mut Random,
        experts: usize,
        (entries, size_k): (usize, usize),
        block_size: u32,
    ) -> Self {
        let ids: Vec<i32> = (0..entries).map(|_| random.below(experts + 1) as i32 - 1).collect();
        Self::of_ids(device, random, (&ids, experts), size_k, block_size)
    }

    /// Rows of `size_k` codes that go to the `experts` of `ids`, or to none, aligned in blocks of `block_size`.
    pub(crate) fn of_ids(
        device: &Device,
        random: &mut Random,
        (ids, experts): (&[i32], usize),
        size_k: usize,
        block_size: u32,
    ) -> Self {
        let entries = ids.len();
        let absent = Absent::Ignore;
        let align = Align { block_size: 1, num_experts: experts, expert_map: None, absent };
        let runs = Runs::new(device, &align).unwrap();
        let mut blocks = runs.room(device, entries, block_size as usize).unwrap();
        align_on_device(device, &runs, &device.upload(ids).unwrap(), &mut blocks).unwrap();
        let place_of = device.download(blocks.place_of()).unwrap();
        let codes = (0..entries).flat_map(|m| codes(random, m, size_k)).collect();
        let expert_of = ids.iter().map(|&id| usize::try_from(id).ok()).collect();
        Self { size_k, expert_of, codes, blocks, place_of }
    }

    /// The reference's outputs of each entry. `scales`: of the rows, as the schedule takes them.
    pub(crate) fn wanted(
        &self,
        schedule: &Schedule,
        weights: &[Weight<'static>],
        (scales, router): (&[f32], &[f32]),
    ) -> Vec<u16> {
        let wide: Vec<u32> = self.codes.iter().map(|&code| code.into()).collect();
        let expert_of = &self.expert_of;
        let stack = Stack { weights, expert_of, orders: None, places: None };
        let extras =
            Extras { activation_scales: Some(scales), router_weights: Some(router), order: None };
        let wide = rows_of("x", &wide, self.size_k).unwrap();
        let wanted = schedule.execute_stack(wide, stack, extras).unwrap();
        wanted.into_iter().map(|bits| bits as u16).collect()
    }

    pub(crate) fn entries(&self) -> usize {
        self.expert_of.len()
    }

    /// Entries with their places.
    pub(crate) fn placed(&self) -> impl Iterator<Item = (usize, usize)> {
        let placed = |(m, &place): (usize, &i32)| Some((m, usize::try_from(place).ok()?));
        self.place_of.iter().enumerate().filter_map(placed)
    }

    /// The codes in the order of the blocks. Rows of padding hold NaN.
    pub(crate) fn x(&self, device: &Device) -> Buffer<u8> {
        let size_k = self.size_k;
        let mut x = vec![0x7f; self.blocks.places() * size_k];
        for (m, place) in self.placed() {
            let row = &self.codes[m * size_k..][..size_k];
            x[place * size_k..][..size_k].copy_from_slice(row);
        }
        device.upload(&x).unwrap()
    }

    /// A value of each entry in the order of the blocks, `padding` elsewhere.
    pub(crate) fn by_place(&self, values: &[f32], padding: f32) -> Vec<f32> {
        let mut there = vec![padding; self.blocks.places()];
        self.placed().for_each(|(m, place)| there[place] = values[m]);
        there
    }

    /// The outputs `y` of the places against those of the entries.
    pub(crate) fn compare(&self, law: &mut Law, context: &str, y: &[u16], wanted: &[u16]) {
        let (found, expected) = self.of_placed(y, wanted);
        law.equal(context, &found, &expected);
    }

    /// Whether the outputs `y` of the places are those of the entries.
    pub(crate) fn are(&self, y: &[u16], wanted: &[u16]) -> bool {
        let (found, expected) = self.of_placed(y, wanted);
        found == expected
    }

    fn of_placed(&self, y: &[u16], wanted: &[u16]) -> (Vec<u16>, Vec<u16>) {
        let size_n = wanted.len() / self.place_of.len();
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        for (m, place) in self.placed() {
            found.extend_from_slice(&y[place * size_n..][..size_n]);
            expected.extend_from_slice(&wanted[m * size_n..][..size_n]);
        }
        (found, expected)
    }
}
