//! Hashes of a token's logits for several batches and numbers of ranks, on as many of this machine's GPUs as there are,
//! and times of the additions.
//!
//! ```text
//! rank_hashes [--times]
//! ```
//!
//! The model's end: an expert layer over ranks, a row-parallel product over ranks, logits by columns. Each line is a
//! configuration with the hash of the first token's logits; then the same as engines compute it, with the rank's own
//! K, 16-bit parts and each rank's own sum over experts. It fails unless the first hashes are one.
//! `--times`: the sums of ranks next to the sum of as many bytes in slots, and a whole call on ranks that share the GPU.

use std::{collections::BTreeSet, process::ExitCode, time::Instant};

use marlinspike::moe::activation::{Activation, Definition};
use marlinspike::moe::layer::Layer;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::Split;
use marlinspike::vectors::Rng;
use marlinspike::weight::Weight;
use marlinspike_accel::{
    AccelError, Device,
    memory::Buffer,
    ops::{MarlinLayer, MarlinWeight, Rank, marlin_gemm, ranks::add_gathered, sum_on_device},
    timing::REPLAYS,
    workload::WeightType,
};
use sha2::{Digest, Sha256};

type AnyError = Box<dyn std::error::Error>;

const BF16: ScalarType = ScalarType::BFLOAT16;
const HIDDEN: usize = 2048;
const SIZE_I: usize = 768;
const EXPERTS: usize = 16;
const TOP_K: usize = 4;
const VOCABULARY: usize = 4096;
const RANKS: [usize; 4] = [1, 2, 4, 8];

/// The model's end.
struct Model {
    w13: Vec<Weight<'static>>,
    w2: Vec<Weight<'static>>,
    rows: Weight<'static>,
    head: Weight<'static>,
}

/// Tokens and their routing.
struct Batch {
    x: Vec<u16>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    }
}

impl Model {
    fn new() -> Result<Self, AccelError> {
        let ty = WeightType::named("uint4b8").expect("a type of the table");
        let rng = &mut Rng::new(11);
        let mut stack = |size_k, size_n| {
            (0..EXPERTS)
                .map(|_| ty.weight(rng, Shape::new(size_k, size_n)))
                .collect::<Result<_, _>>()
        };
        let (w13, w2) = (stack(HIDDEN, 2 * SIZE_I)?, stack(SIZE_I, HIDDEN)?);
        let rows = ty.weight(rng, Shape::new(HIDDEN, HIDDEN))?;
        Ok(Self { w13, w2, rows, head: ty.weight(rng, Shape::new(HIDDEN, VOCABULARY))? })
    }

    /// The experts of a rank: those of `rank_of`, and the whole layer's properties.
    fn layer(&self, device: &Device, rank: usize, ranks: usize) -> Result<MarlinLayer, AccelError> {
        let each = EXPERTS / ranks;
        let rank_of: Vec<usize> = (0..EXPERTS).map(|expert| expert / each).collect();
        let own = rank * each..(rank + 1) * each;
        let map = |expert: usize| own.contains(&expert).then(|| (expert - own.start) as i32);
        let map: Vec<i32> = (0..EXPERTS).map(|expert| map(expert).unwrap_or(-1)).collect();
        let layer = Layer {
            w13: &self.w13[own.clone()],
            w2: &self.w2[own.clone()],
            orders: [None, None],
            num_experts: EXPERTS,
            expert_map: Some(&map),
            activation: Definition::new(Activation::Silu),
            dtype: BF16,
            input_dtype: None,
            router_weight_on_input: false,
        };
        MarlinLayer::new(device, &layer)?.with_ranks(device, rank, &rank_of)
    }
}

impl Batch {
    /// The first token is the same in every batch.
    fn new(tokens: usize) -> Self {
        let (mut of_x, mut of_routing) = (random(5), random(6));
        let half = |bits: u64| BF16.encode_rne((bits % 4096) as f64 / 1024.0 - 2.0) as u16;
        let x = (0..tokens * HIDDEN).map(|_| half(of_x())).collect();
        let first = |token: usize, r: u64| (r as usize + token) % EXPERTS;
        let ids = (0..tokens).flat_map(|token| {
            let first = first(token, of_routing());
            // An odd step visits each of 16 experts once.
            (0..TOP_K).map(move |slot| ((first + 5 * slot) % EXPERTS) as i32)
        });
        let ids: Vec<i32> = ids.collect();
        let weights = ids.iter().enumerate().map(|(slot, _)| [0.4, 0.3, 0.2, 0.1][slot % TOP_K]);
        Self { x, weights: weights.collect(), ids }
    }
}

fn hash(logits: &[u16]) -> String {
    let bytes: Vec<u8> = logits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    Sha256::digest(bytes)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Columns `range` of rows.
fn columns(x: &[u16], range: std::ops::Range<usize>) -> Vec<u16> {
    x.chunks_exact(HIDDEN).flat_map(|row| &row[range.clone()]).copied().collect()
}

/// The sum of the ranks' 16-bit values in f32, rounded.
fn rounded_sum(parts: &[Vec<u16>]) -> Vec<u16> {
    let float = |bits: u16| f32::from_bits(u32::from(bits) << 16);
    let sum = |i: usize| parts.iter().map(|part| float(part[i])).sum::<f32>();
    (0..parts[0].len()).map(|i| BF16.encode_rne(f64::from(sum(i))) as u16).collect()
}

/// The first token's logits.
fn logits(
    model: &Model,
    batch: &Batch,
    ranks: usize,
    is_canonical: bool,
) -> Result<Vec<u16>, AccelError> {
    let gpus = Device::count()?;
    let devices =
        (0..ranks).map(|r| Device::open_ordinal(r % gpus)).collect::<Result<Vec<_>, _>>()?;
    let all: Vec<&Device> = devices.iter().collect();
    let tokens = batch.x.len() / HIDDEN;
    let mut own = Rank::of_process(&all, tokens * TOP_K * HIDDEN)?;
    let (mut layers, mut work, mut inputs) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, device) in devices.iter().enumerate() {
        layers.push(model.layer(device, rank, ranks)?);
        work.push(layers[rank].workspace(device, tokens, TOP_K)?);
        inputs.push((
            device.upload(&batch.x)?,
            device.upload(&batch.ids)?,
            device.upload(&batch.weights)?,
        ));
    }
    let mut y: Vec<Buffer<u16>> =
        devices.iter().map(|device| device.zeroed(tokens * HIDDEN)).collect::<Result<_, _>>()?;
    let download = |y: &[Buffer<u16>]| -> Result<Vec<Vec<u16>>, AccelError> {
        devices.iter().zip(y).map(|(device, y)| device.download(y)).collect()
    };
    for (r, device) in devices.iter().enumerate() {
        let (x, ids, weights) = &inputs[r];
        match is_canonical {
            true => own[r].compute_experts(device, &layers[r], x, (ids, weights), &mut work[r])?,
            false => layers[r].forward(device, x, ids, weights, &mut work[r], &mut y[r])?,
        }
    }
    if is_canonical {
        for (r, device) in devices.iter().enumerate() {
            own[r].add_experts(device, &layers[r], &inputs[r].1, &work[r], &mut y[r])?;
        }
    }
    let mut hidden = download(&y)?;
    if !is_canonical {
        hidden = vec![rounded_sum(&hidden); ranks];
    }
    let mut weights = Vec::new();
    for (r, device) in devices.iter().enumerate() {
        let refuse = |error: marlinspike::Error| AccelError::Argument {
            operation: "rank_hashes",
            what: "split",
            found: error.to_string(),
            expected: "a number of ranks that K allows".into(),
        };
        let split = Split::new(HIDDEN, r, ranks).map_err(refuse)?;
        let x = device.upload(&columns(&hidden[r], split.rows()))?;
        if is_canonical {
            let part = split.part_of(&model.rows).map_err(refuse)?;
            weights.push(MarlinWeight::of_part(device, &part, BF16)?);
            own[r].multiply(device, &x, &weights[r])?;
        } else {
            let slice = model.rows.slice_rows(split.rows()).map_err(refuse)?;
            marlin_gemm(device, &x, &MarlinWeight::new(device, &[slice], BF16)?, &mut y[r])?;
        }
    }
    for (r, weight) in weights.iter().enumerate() {
        own[r].add(&devices[r], weight, &mut y[r])?;
    }
    let mut hidden = download(&y)?;
    if !is_canonical {
        hidden = vec![rounded_sum(&hidden); ranks];
    }
    let mut logits = Vec::new();
    for (r, device) in devices.iter().enumerate() {
        own[r].check(device)?;
        let each = VOCABULARY / ranks;
        let head = model.head.slice_columns(r * each..(r + 1) * each).expect("whole columns");
        let head = MarlinWeight::new(device, &[head], BF16)?;
        let mut y = device.zeroed(tokens * each)?;
        marlin_gemm(device, &device.upload(&hidden[r])?, &head, &mut y)?;
        logits.extend_from_slice(&device.download(&y)?[..each]);
    }
    Ok(logits)
}

fn hashes() -> Result<bool, AnyError> {
    let model = Model::new()?;
    // Their contexts live while those of the ranks are made and dropped.
    let devices = (0..Device::count()?).map(Device::open_ordinal).collect::<Result<Vec<_>, _>>()?;
    println!("{} GPUs: {}", devices.len(), devices[0].name());
    println!("ranks  batch  this project      as engines do");
    let (mut ours, mut theirs) = (BTreeSet::new(), BTreeSet::new());
    for ranks in RANKS {
        for tokens in [1, 16, 300] {
            let batch = Batch::new(tokens);
            let of = |is_canonical| logits(&model, &batch, ranks, is_canonical).map(|y| hash(&y));
            let (our, their) = (of(true)?, of(false)?);
            println!("{ranks:5}  {tokens:5}  {our}  {their}");
            ours.insert(our);
            theirs.insert(their);
        }
    }
    let count = RANKS.len() * 3;
    println!("different hashes in {count} configurations: {} and {}", ours.len(), theirs.len());
    Ok(ours.len() == 1)
}

fn times() -> Result<(), AnyError> {
    let device = Device::open()?;
    println!(
        "{}; microseconds: sums of ranks; slots of as many bytes; a call with the product",
        device.name()
    );
    let weight = WeightType::named("uint4b8").expect("a type of the table");
    let weight = weight.weight(&mut Rng::new(3), Shape::new(4096, 4096))?;
    for size_m in [1, 16, 64, 1024, 4096] {
        for ranks in RANKS {
            let len = size_m * 4096;
            let part = Split::new(4096, 0, ranks)?.part_of(&weight)?;
            let part = MarlinWeight::of_part(&device, &part, BF16)?;
            let sums = device.zeroed::<f32>(ranks * len)?;
            let slots = device.zeroed::<u16>(2 * ranks * len)?;
            let (mut y, mut other) = (device.zeroed::<u16>(len)?, device.zeroed::<u16>(len)?);
            let mut tree = || add_gathered(&device, &part, &sums, &mut y);
            let mut plain =
                || sum_on_device(&device, &slots, BF16, 2 * ranks, 4096, None, &mut other);
            tree()?;
            plain()?;
            let tree = device.record(move || (0..8).try_for_each(|_| tree()))?;
            let plain = device.record(move || (0..8).try_for_each(|_| plain()))?;
            let [tree, plain] = [tree, plain].map(|graph| device.time(&graph, REPLAYS));
            let (tree, plain) = (tree?.each(8).median, plain?.each(8).median);
            print!("M {size_m:4}, ranks {ranks}: {tree:8.2} {plain:8.2}");
            // One GPU does not run the graphs of eight streams at once.
            match ranks {
                8 => println!(),
                _ => println!(" {:8.2}", call(&weight, size_m, ranks)?),
            }
        }
    }
    Ok(())
}

/// Microseconds of a call, replayed, on ranks that share the GPU.
fn call(weight: &Weight<'_>, size_m: usize, ranks: usize) -> Result<f64, AnyError> {
    let devices = (0..ranks).map(|_| Device::open()).collect::<Result<Vec<_>, _>>()?;
    let all: Vec<&Device> = devices.iter().collect();
    let mut own = Rank::of_process(&all, size_m * 4096)?;
    let mut parts = Vec::new();
    for (r, device) in devices.iter().enumerate() {
        let part = Split::new(4096, r, ranks)?.part_of(weight)?;
        let part = MarlinWeight::of_part(device, &part, BF16)?;
        parts.push((part, device.zeroed(size_m * 4096 / ranks)?, device.zeroed(size_m * 4096)?));
    }
    // Twice: modules are loaded before anything is recorded, and the number of calls stays even.
    for _ in 0..2 {
        for ((rank, device), (part, x, _)) in own.iter_mut().zip(&devices).zip(&parts) {
            rank.multiply(device, x, part)?;
        }
        for ((rank, device), (part, _, y)) in own.iter_mut().zip(&devices).zip(&mut parts) {
            rank.add(device, part, y)?;
        }
    }
    let graphs = own.iter_mut().zip(&devices).zip(&mut parts).map(|((rank, device), part)| {
        let (part, x, y) = part;
        device.record(move || {
            (0..8).try_for_each(|_| {
                rank.multiply(device, x, part)?;
                rank.add(device, part, y)
            })
        })
    });
    let graphs = graphs.collect::<Result<Vec<_>, _>>()?;
    let mut least = f64::INFINITY;
    for _ in 0..REPLAYS {
        devices.iter().try_for_each(Device::synchronize)?;
        let begin = Instant::now();
        graphs.iter().try_for_each(|graph| graph.replay())?;
        devices.iter().try_for_each(Device::synchronize)?;
        least = least.min(begin.elapsed().as_secs_f64() * 1e6 / 8.0);
    }
    drop(graphs);
    own.iter().zip(&devices).try_for_each(|(rank, device)| rank.check(device))?;
    Ok(least)
}

fn run() -> Result<bool, AnyError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [] => hashes(),
        [only] if only == "--times" => times().map(|()| true),
        _ => Err("usage: rank_hashes [--times]".into()),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
