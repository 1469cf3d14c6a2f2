//! Shared by the tests that need hardware or NVIDIA's libraries. A test that cannot run prints a
//! line that `scripts/test` counts; it never passes silently. A law that held prints the numbers of
//! cases and outputs.
#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod cubin;

use std::{
    io::Write,
    ops::Deref,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::num::array::FloatView2;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use marlinspike_accel::{
    AccelError, Device,
    nvrtc::Nvrtc,
    ops::{MarlinLayer, Workspace},
};

/// Set to 1 on a machine with a GPU: a skip is then a failure.
const REQUIRE_GPU: &str = "MARLINSPIKE_REQUIRE_GPU";

/// Writes a line past the test harness's capture, in one piece.
pub(crate) fn say(line: &str) {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(format!("\n{line}\n").as_bytes()).unwrap();
    stdout.flush().unwrap();
}

/// Reports `test` as skipped.
pub(crate) fn skip(reason: &str, test: &str) {
    let required = std::env::var(REQUIRE_GPU).is_ok_and(|value| value == "1");
    assert!(!required, "{test} skipped ({reason}) although {REQUIRE_GPU}=1");
    say(&format!("SKIPPED ({reason}): {test}"));
}

/// Tests that use the GPU share this lock; those that need all of it hold it exclusively.
static GPU: RwLock<()> = RwLock::new(());

/// A device, and the test's place on the GPU while it lives.
pub(crate) struct Gpu<Guard> {
    device: Device,
    _guard: Guard,
}

impl<Guard> Deref for Gpu<Guard> {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

/// The place of a test that shares the GPU.
pub(crate) type SharedGpu = Gpu<RwLockReadGuard<'static, ()>>;

/// The device, or a reported skip. A device that is present but fails, fails the test. To be
/// called once in a test: a second call can deadlock while another test waits for the whole GPU.
pub(crate) fn device_or_skip(test: &str) -> Option<SharedGpu> {
    open_or_skip(test, || GPU.read().unwrap_or_else(PoisonError::into_inner))
}

/// The device, while no other test of this process uses it: kernels that wait for each other, as ranks
/// on one GPU do, must all be resident at once.
pub(crate) fn whole_gpu_or_skip(test: &str) -> Option<Gpu<RwLockWriteGuard<'static, ()>>> {
    open_or_skip(test, || GPU.write().unwrap_or_else(PoisonError::into_inner))
}

fn open_or_skip<Guard>(test: &str, guard: impl FnOnce() -> Guard) -> Option<Gpu<Guard>> {
    match Device::open() {
        Ok(device) => Some(Gpu { device, _guard: guard() }),
        Err(error) if error.is_no_device() => {
            skip("no CUDA device", test);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The compiler, or a reported skip. A library that was asked for by name must load.
pub(crate) fn nvrtc_or_skip(test: &str) -> Option<Nvrtc> {
    let asked = std::env::var_os(marlinspike_accel::nvrtc::LIBRARY_VARIABLE).is_some();
    match Nvrtc::open() {
        Ok(nvrtc) => Some(nvrtc),
        Err(AccelError::NvrtcMissing { .. }) if !asked => {
            skip("no NVRTC", test);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Counts the cases of a law, and prints the count if the test passes.
pub(crate) struct Law {
    name: &'static str,
    cases: usize,
    outputs: usize,
}

impl Law {
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, cases: 0, outputs: 0 }
    }

    /// One case: every element equal, or the test fails at the first that is not.
    pub(crate) fn equal<T: PartialEq + std::fmt::Debug>(
        &mut self,
        context: &str,
        found: &[T],
        wanted: &[T],
    ) {
        assert_eq!(found.len(), wanted.len(), "{}: {context}: number of elements", self.name);
        if let Some(i) = found.iter().zip(wanted).position(|(f, w)| f != w) {
            let differing = found.iter().zip(wanted).filter(|(f, w)| f != w).count();
            panic!(
                "{}: {context}: element {i}: found {:x?}, expected {:x?} ({differing} of {} differ)",
                self.name,
                found[i],
                wanted[i],
                found.len()
            );
        }
        self.cases += 1;
        self.outputs += found.len();
    }

    pub(crate) fn held(self) {
        self.held_with("");
    }

    /// A law that ran on this many GPUs.
    pub(crate) fn held_on(self, gpus: usize) {
        self.held_with(&format!(", GPUs: {gpus}"));
    }

    fn held_with(self, more: &str) {
        assert!(self.cases > 0, "{}: no case", self.name);
        let Self { name, cases, outputs } = self;
        say(&format!("LAW {name}{more}: every bit equal in {cases} cases, {outputs} outputs"));
    }
}

/// xorshift64*: inputs that differ in every word, the same on every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.next() as usize % end
    }

    pub(crate) fn words(&mut self, len: usize) -> Vec<u32> {
        (0..len).map(|_| self.next()).collect()
    }

    pub(crate) fn permutation(&mut self, len: usize) -> Vec<u32> {
        let mut perm: Vec<u32> = (0..len as u32).collect();
        for i in (1..len).rev() {
            perm.swap(i, self.below(i + 1));
        }
        perm
    }

    /// About normal, of deviation 1.
    pub(crate) fn normal(&mut self) -> f64 {
        let uniform: f64 = (0..12).map(|_| f64::from(self.next()) / 4_294_967_296.0).sum();
        uniform - 6.0
    }

    /// Normal numbers times `scale`, as bits of a 16-bit type.
    pub(crate) fn halves(&mut self, ty: ScalarType, len: usize, scale: f64) -> Vec<u16> {
        (0..len).map(|_| ty.encode_rne(self.normal() * scale) as u16).collect()
    }

    /// Any finite numbers of a 16-bit type: uniform bits.
    pub(crate) fn any_finite(&mut self, ty: ScalarType, len: usize) -> Vec<u16> {
        let exponent = if ty == ScalarType::FLOAT16 { 0x7c00 } else { 0x7f80 };
        (0..len)
            .map(|_| {
                loop {
                    let bits = self.next() as u16;
                    if bits & exponent != exponent {
                        break bits;
                    }
                }
            })
            .collect()
    }
}

/// Both 16-bit types.
pub(crate) const HALVES: [ScalarType; 2] = [ScalarType::FLOAT16, ScalarType::BFLOAT16];

/// A weight of random codes; scales about as checkpoints have them, some of them subnormal or zero.
pub(crate) fn weight(
    random: &mut Random,
    ty: ScalarType,
    dtype: ScalarType,
    shape: Shape,
    group_size: GroupSize,
    bias: bool,
) -> Weight<'static> {
    let size_n = shape.size_n;
    let bits = if ty == ScalarType::UINT8B128 { 8 } else { 4 };
    let words = random.words(shape.len() * bits as usize / 32);
    let groups = group_size.groups(shape.k()).unwrap();
    // Kernels make weights of small scales another way: all below 1/32, all below 1/2, or neither.
    let magnitude = [0.004, 0.02, 0.3][random.below(3)];
    let mut scales = random.halves(dtype, groups * size_n, magnitude);
    for _ in 0..scales.len() / 50 {
        let at = random.below(scales.len());
        scales[at] = (random.next() % 0x0400) as u16;
    }
    let table = |rows, bits| Table::new(dtype, rows, size_n, TableData::B16(bits)).unwrap();
    let zeros = (ty == ScalarType::UINT4).then(|| {
        let codes = (0..groups * size_n).map(|_| (random.next() % 16) as u8).collect();
        Table::new(ty, groups, size_n, TableData::B8(codes)).unwrap()
    });
    let bias = bias.then(|| table(1, random.halves(dtype, size_n, 1.0)));
    Weight {
        name: "weight".into(),
        ty,
        codes: Codes::from_words(bits, shape, words).unwrap(),
        scales: table(groups, scales),
        zeros,
        groups: Groups::Uniform(group_size),
        global_scale: None,
        bias,
    }
}

/// A weight of floats: types of codes and scales, k per group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Float {
    /// e4m3, 16-bit scales, of groups or of columns.
    Fp8(GroupSize),
    /// e4m3, e8m0 scales: all up to this code.
    Mxfp8(u32),
    /// e2m1, e8m0 scales: all up to this code.
    Mxfp4(u32),
    /// e2m1, e4m3 scales and a global one.
    Nvfp4,
}

impl Float {
    /// Whether upstream has products of this weight with activations of that type.
    pub(crate) fn takes(self, dtype: ScalarType) -> bool {
        dtype == ScalarType::BFLOAT16 || !matches!(self, Self::Mxfp8(_) | Self::Mxfp4(_))
    }

    pub(crate) fn group_size(self) -> GroupSize {
        match self {
            Self::Fp8(group_size) => group_size,
            Self::Mxfp8(_) | Self::Mxfp4(_) => GroupSize::Of(32),
            Self::Nvfp4 => GroupSize::Of(16),
        }
    }
}

/// A weight of any finite floats. 16-bit scales are as [`weight`]'s; of e8m0 every sixteenth is any
/// that there may be, the others lie between 2^-12 and 2^-1; e4m3 ones are any that are not negative.
pub(crate) fn float_weight(
    random: &mut Random,
    float: Float,
    dtype: ScalarType,
    shape: Shape,
    bias: bool,
) -> Weight<'static> {
    let (ty, bits) = match float {
        Float::Fp8(_) | Float::Mxfp8(_) => (ScalarType::FLOAT8_E4M3FN, 8),
        Float::Mxfp4(_) | Float::Nvfp4 => (ScalarType::FLOAT4_E2M1F, 4),
    };
    let group_size = float.group_size();
    let mut weight = weight(random, ScalarType::UINT4B8, dtype, shape, group_size, bias);
    let mut words = random.words(shape.len() * bits as usize / 32);
    if bits == 8 {
        for word in &mut words {
            let byte = |b: u8| if b & 0x7f == 0x7f { b ^ 1 } else { b };
            *word = u32::from_le_bytes(word.to_le_bytes().map(byte));
        }
    }
    let scales = weight.scales.rows() * shape.size_n;
    let table =
        |ty, codes| Table::new(ty, scales / shape.size_n, shape.size_n, TableData::B8(codes));
    let mut code = |most: u32| match (random.next() >> 8) % 16 {
        0 => (random.next() % (most + 1)) as u8,
        _ => (115 + random.next() % 12) as u8,
    };
    match float {
        Float::Fp8(_) => {}
        Float::Mxfp8(most) | Float::Mxfp4(most) => {
            let codes = (0..scales).map(|_| code(most)).collect();
            weight.scales = table(ScalarType::FLOAT8_E8M0FNU, codes).unwrap();
        }
        Float::Nvfp4 => {
            let codes = (0..scales).map(|_| (random.next() % 0x7f) as u8).collect();
            weight.scales = table(ScalarType::FLOAT8_E4M3FN, codes).unwrap();
            weight.global_scale = Some((random.normal() * 0.01) as f32);
        }
    }
    Weight { ty, codes: Codes::from_words(bits, shape, words).unwrap(), ..weight }
}

/// The matrices of an expert layer, and its other properties.
pub(crate) struct Experts {
    pub(crate) w13: Vec<Weight<'static>>,
    pub(crate) w2: Vec<Weight<'static>>,
    pub(crate) activation: Definition,
    pub(crate) dtype: ScalarType,
}

impl Experts {
    /// Experts of H `h` and I `size_i`, whose matrices of one shape `stack` makes: w13's, then w2's.
    pub(crate) fn new(
        [h, size_i]: [usize; 2],
        activation: Definition,
        dtype: ScalarType,
        mut stack: impl FnMut(Shape) -> Vec<Weight<'static>>,
    ) -> Self {
        let w13 = stack(Shape::new(h, activation.width_in(size_i)));
        let w2 = stack(Shape::new(size_i, h));
        Self { w13, w2, activation, dtype }
    }

    /// The layer of 16-bit activations that has all of these experts and no other.
    pub(crate) fn layer(&self) -> Layer<'_> {
        Layer {
            w13: &self.w13,
            w2: &self.w2,
            orders: [None, None],
            num_experts: self.w13.len(),
            expert_map: None,
            activation: self.activation,
            dtype: self.dtype,
            input_dtype: None,
            router_weight_on_input: false,
        }
    }

    /// The map of a rank that has these as every other one of twice as many experts, in reverse order.
    pub(crate) fn every_other(&self) -> Vec<i32> {
        let local = self.w13.len() as i32;
        (0..2 * local).map(|e| if e % 2 == 0 { local - 1 - e / 2 } else { -1 }).collect()
    }
}

/// Inputs of a layer.
pub(crate) struct Tokens {
    /// `[M, H]`.
    pub(crate) x: Vec<u16>,
    pub(crate) top_k: usize,
    /// `[M, top_k]`.
    pub(crate) ids: Vec<i32>,
    /// `[M, top_k]`.
    pub(crate) weights: Vec<f32>,
}

impl Tokens {
    /// `tokens` random rows that go to `top_k` different experts each, which `id` may change: it gets
    /// the place in `[M, top_k]` and the expert there.
    pub(crate) fn new(
        random: &mut Random,
        layer: &Layer<'_>,
        (tokens, top_k): (usize, usize),
        id: impl Fn(usize, i32) -> i32,
    ) -> Self {
        let x = random.halves(layer.dtype, tokens * layer.hidden_size(), 1.0);
        let ids: Vec<i32> = (0..tokens)
            .flat_map(|_| random.permutation(layer.num_experts)[..top_k].to_vec())
            .enumerate()
            .map(|(place, expert)| id(place, expert as i32))
            .collect();
        let weights = ids.iter().map(|_| random.normal().abs() as f32).collect();
        Self { x, top_k, ids, weights }
    }

    /// y by the layer's canonical arithmetic.
    pub(crate) fn canonical(&self, layer: &Layer<'_>) -> Vec<u16> {
        let Self { x, top_k, ids, weights } = self;
        let routed = Routed::from_rows(*top_k, ids, weights).unwrap();
        let x = FloatView2::from_rows("x", layer.dtype, layer.hidden_size(), x).unwrap();
        layer.forward(x, routed, &layer.canonical().unwrap()).unwrap().y.into_bits()
    }
}

/// Sends the token at every seventeenth place to no expert.
pub(crate) const fn some_to_none(place: usize, expert: i32) -> i32 {
    if place % 17 == 4 { -1 } else { expert }
}

/// y of a layer with `top_k` experts per token, in its own workspace, which other tokens have used.
pub(crate) fn forward(
    device: &Device,
    layer: &MarlinLayer,
    x: &[u16],
    top_k: usize,
    ids: &[i32],
    weights: &[f32],
) -> Vec<u16> {
    let mut work = layer.workspace(device, ids.len() / top_k, top_k).unwrap();
    forward_in(device, layer, &mut work, x, ids, weights)
}

/// y of a layer in `work`, which other tokens have used.
pub(crate) fn forward_in(
    device: &Device,
    layer: &MarlinLayer,
    work: &mut Workspace,
    x: &[u16],
    ids: &[i32],
    weights: &[f32],
) -> Vec<u16> {
    let x_there = device.upload(x).unwrap();
    let mut y = device.upload(&vec![0xabcd; x.len()]).unwrap();
    // Other tokens first: what they leave in the workspace must not matter.
    let others: Vec<i32> = ids.iter().rev().copied().collect();
    for ids in [&others[..], ids] {
        let (ids, weights) = (device.upload(ids).unwrap(), device.upload(weights).unwrap());
        layer.forward(device, &x_there, &ids, &weights, work, &mut y).unwrap();
    }
    device.download(&y).unwrap()
}

/// The same random rows through a layer here and by `run`, from x, expert ids and router weights:
/// `tokens` tokens that go to `top_k` experts each, some to none.
pub(crate) fn compare_layers(
    law: &mut Law,
    context: &str,
    random: &mut Random,
    layer: &Layer<'_>,
    (tokens, top_k): (usize, usize),
    run: impl FnOnce(&[u16], &[i32], &[f32]) -> Vec<u16>,
) {
    let inputs = Tokens::new(random, layer, (tokens, top_k), some_to_none);
    let found = run(&inputs.x, &inputs.ids, &inputs.weights);
    law.equal(&format!("{context}, {tokens} tokens"), &found, &inputs.canonical(layer));
}
