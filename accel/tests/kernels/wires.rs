//! Row-parallel products over ranks whose sums or memory come from elsewhere: at an engine's addresses, gathered by any
//! library, by NCCL.
#![allow(unsafe_code)]

use crate::common;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaContext, result, sys};

use crate::common::{Law, Random, weight};
use crate::peers::{Layer, gpus, open, whole};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::Split;
use marlinspike::weight::Weight;
use marlinspike_accel::{
    AccelError, Device,
    ops::{MarlinWeight, NcclId, NcclRank, Rank, gemm::marlin_gemm_part, ranks::add_gathered},
};

const BF16: ScalarType = ScalarType::BFLOAT16;

/// Memory of an engine, which this crate did not allocate: zeros on one GPU.
struct Engine {
    context: Arc<CudaContext>,
    address: u64,
}

impl Engine {
    fn new(gpu: usize, bytes: usize) -> Self {
        let context = CudaContext::new(gpu).unwrap();
        // SAFETY: the context is current; the memory is of this size, and freed once, when nothing uses it any more.
        let address = unsafe {
            let address = result::malloc_sync(bytes).unwrap();
            result::memset_d8_sync(address, 0, bytes).unwrap();
            address
        };
        context.synchronize().unwrap();
        Self { context, address }
    }

    /// Lets kernels of this GPU access that memory.
    fn access(&self, other: &Self) {
        self.context.bind_to_thread().unwrap();
        if self.context.ordinal() != other.context.ordinal() {
            // SAFETY: both contexts are alive; the flags are zero. Access that another test enabled is no failure.
            let _ = unsafe { sys::cuCtxEnablePeerAccess(other.context.cu_ctx(), 0) };
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.context.bind_to_thread().unwrap();
        // SAFETY: the memory was allocated above.
        unsafe { result::free_sync(self.address) }.unwrap();
    }
}

#[test]
fn ranks_at_an_engines_addresses_have_the_bits_of_the_reference() {
    let test = "ranks_at_an_engines_addresses_have_the_bits_of_the_reference";
    let Some(_gpu) = common::whole_gpu_or_skip(test) else { return };
    let mut law = Law::new("row-parallel product at given addresses, 1, 2, 4 and 8 ranks");
    let mut random = Random(0x5EED_000D_89AB_CDEF);
    let (shape, size_m) = (Shape::new(1536, 64), 5);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(64), true);
    let x = random.halves(BF16, size_m * shape.size_k, 1.0);
    let wanted = whole(&x, &w);
    for count in [1, 2, 4, 8] {
        let capacity = size_m * shape.size_n;
        let bytes = Rank::bytes(capacity).unwrap();
        let memory: Vec<Engine> =
            (0..count).map(|rank| Engine::new(rank % gpus(), bytes)).collect();
        memory.iter().for_each(|from| memory.iter().for_each(|to| from.access(to)));
        let addresses: Vec<u64> = memory.iter().map(|memory| memory.address).collect();
        let layer = Layer::new(open(count), &w, &x);
        let rank = |(rank, device)| {
            // SAFETY: zeros of that many bytes, in order of rank, which outlive the ranks and which nothing else uses.
            unsafe { Rank::of_addresses(device, rank, &addresses, capacity) }.unwrap()
        };
        let mut ranks: Vec<Rank> = layer.devices.iter().enumerate().map(rank).collect();
        for call in 0..3 {
            let mut y = layer.outputs(size_m);
            layer.call(&mut ranks, &mut y);
            layer.check(&ranks);
            for (r, y) in y.iter().enumerate() {
                let found = layer.devices[r].download(y).unwrap();
                law.equal(&format!("rank {r} of {count}, call {call}"), &found, &wanted);
            }
        }
        let refused = |rank, addresses: &[u64]| {
            // SAFETY: refused before any use.
            match unsafe { Rank::of_addresses(&layer.devices[0], rank, addresses, capacity) } {
                Err(AccelError::Argument { what, .. }) => what,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(refused(0, &[addresses[0]; 3]), "addresses");
        assert_eq!(refused(count, &addresses), "rank");
        assert_eq!(refused(0, &[addresses[0] + 128]), "address");
        assert_eq!(refused(0, &[0]), "address");
        drop(ranks);
    }
    law.held_on(gpus());
}

/// Sums that the caller's own work writes into shared memory.
#[test]
fn sums_that_the_caller_writes_have_the_bits_of_the_reference() {
    let test = "sums_that_the_caller_writes_have_the_bits_of_the_reference";
    let Some(_gpu) = common::whole_gpu_or_skip(test) else { return };
    let mut law = Law::new("row-parallel product of the caller's sums, 2 ranks");
    let mut random = Random(0x5EED_0015_89AB_CDEF);
    let (shape, size_m) = (Shape::new(2048, 192), 7);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(128), true);
    let x = random.halves(BF16, size_m * shape.size_k, 1.0);
    let wanted = whole(&x, &w);
    let layer = Layer::new(open(2), &w, &x);
    let size = [size_m, shape.size_n];
    let mut ranks = layer.ranks(size_m);
    for call in 0..3 {
        for (r, rank) in ranks.iter_mut().enumerate() {
            let device = &layer.devices[r];
            let mut sums = device.zeroed::<f32>(wanted.len()).unwrap();
            marlin_gemm_part(device, layer.x(r), &layer.weights[r], &mut sums).unwrap();
            let sums = device.download(&sums).unwrap();
            let address = rank.start_sums(device, size).unwrap();
            assert!(rank.start_sums(device, size).is_err());
            // SAFETY: the address is of that many floats of this call, which nothing else uses until `add`.
            unsafe { result::memcpy_htod_sync(address, &sums) }.unwrap();
        }
        let mut y = layer.outputs(size_m);
        for (r, rank) in ranks.iter_mut().enumerate() {
            rank.add(&layer.devices[r], &layer.weights[r], &mut y[r]).unwrap();
        }
        layer.check(&ranks);
        for (r, y) in y.iter().enumerate() {
            let found = layer.devices[r].download(y).unwrap();
            law.equal(&format!("rank {r}, call {call}"), &found, &wanted);
        }
    }
    let refused = ranks[0].start_sums(&layer.devices[0], [size_m + 1, shape.size_n]);
    assert!(matches!(refused, Err(AccelError::Argument { what: "size", .. })), "{refused:?}");
    law.held_on(gpus());
}

/// Sums that came here on the host, for every number of ranks.
#[test]
fn gathered_sums_have_the_bits_of_the_reference() {
    let test = "gathered_sums_have_the_bits_of_the_reference";
    let Some(device) = common::device_or_skip(test) else { return };
    let mut law = Law::new("row-parallel product of gathered sums, 1, 2, 4 and 8 ranks");
    let mut random = Random(0x5EED_0011_89AB_CDEF);
    let (shape, size_m) = (Shape::new(2048, 192), 7);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(128), true);
    let x = random.halves(BF16, size_m * shape.size_k, 1.0);
    let wanted = whole(&x, &w);
    for count in [1, 2, 4, 8] {
        let mut sums = Vec::new();
        let mut last = None;
        for rank in 0..count {
            let split = Split::new(shape.size_k, rank, count).unwrap();
            let part = split.part_of(&w).unwrap();
            let part = MarlinWeight::of_part(&device, &part, BF16).unwrap();
            let rows = x.chunks_exact(shape.size_k).flat_map(|row| &row[split.rows()]);
            let x = device.upload(&rows.copied().collect::<Vec<u16>>()).unwrap();
            let mut y = device.zeroed::<f32>(wanted.len()).unwrap();
            marlin_gemm_part(&device, &x, &part, &mut y).unwrap();
            sums.extend(device.download(&y).unwrap());
            last = Some(part);
        }
        let (sums, last) = (device.upload(&sums).unwrap(), last.unwrap());
        let mut y = device.upload(&vec![0xabcd; wanted.len()]).unwrap();
        add_gathered(&device, &last, &sums, &mut y).unwrap();
        law.equal(&format!("{count} ranks"), &device.download(&y).unwrap(), &wanted);
        let what = |result| match result {
            Err(AccelError::Argument { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        let mut long = device.zeroed::<u16>(wanted.len() + 192).unwrap();
        assert_eq!(what(add_gathered(&device, &last, &sums, &mut long)), "sums");
        let plain = MarlinWeight::new(&device, std::slice::from_ref(&w), BF16).unwrap();
        assert_eq!(what(add_gathered(&device, &plain, &sums, &mut y)), "weight");
    }
    law.held();
}

/// NCCL refuses two ranks on one GPU, so a single GPU runs one rank.
#[test]
fn ranks_by_nccl_have_the_bits_of_the_reference() {
    let test = "ranks_by_nccl_have_the_bits_of_the_reference";
    let Some(_gpu) = common::whole_gpu_or_skip(test) else { return };
    let mut law = Law::new("row-parallel product by NCCL, a rank on each GPU");
    let mut random = Random(0x5EED_0012_89AB_CDEF);
    let (shape, size_m) = (Shape::new(2048, 128), 9);
    let x = random.halves(BF16, size_m * shape.size_k, 1.0);
    let weights = [false, true]
        .map(|bias| weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(64), bias));
    let wanted = weights.each_ref().map(|w| whole(&x, w));
    for count in [1, 2, 4, 8].into_iter().filter(|&count| count <= gpus()) {
        let id = match NcclId::new() {
            Ok(id) => id,
            Err(error @ AccelError::NcclMissing { .. }) => {
                return common::say(&format!("SKIPPED ({error}): {test}"));
            }
            Err(error) => panic!("{error}"),
        };
        assert_eq!(NcclId::from_bytes(id.to_bytes()), id);
        // Each rank waits for the others while it joins.
        let found: Vec<Vec<Vec<u16>>> = std::thread::scope(|scope| {
            let (x, weights) = (&x, &weights);
            let start = |rank| scope.spawn(move || by_nccl(id, [rank, count], size_m, x, weights));
            let ranks: Vec<_> = (0..count).map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for (rank, outputs) in found.iter().enumerate() {
            for (call, found) in outputs.iter().enumerate() {
                let context = format!("rank {rank} of {count}, call {call}");
                law.equal(&context, found, &wanted[call / 3]);
            }
        }
    }
    law.held_on(gpus());
}

/// Outputs of a rank: three calls with each weight.
fn by_nccl(
    id: NcclId,
    [rank, ranks]: [usize; 2],
    size_m: usize,
    x: &[u16],
    weights: &[Weight<'_>],
) -> Vec<Vec<u16>> {
    let device = Device::open_ordinal(rank).unwrap();
    let shape = weights[0].shape();
    let len = size_m * shape.size_n;
    let limit = Duration::from_secs(20);
    let mut own = NcclRank::new(&device, id, [rank, ranks], len, limit).unwrap();
    let split = Split::new(shape.size_k, rank, ranks).unwrap();
    let rows = x.chunks_exact(shape.size_k).flat_map(|row| &row[split.rows()]);
    let from = device.upload(&rows.copied().collect::<Vec<u16>>()).unwrap();
    let mut outputs = Vec::new();
    for w in weights {
        let part = MarlinWeight::of_part(&device, &split.part_of(w).unwrap(), BF16).unwrap();
        for _ in 0..3 {
            let mut y = device.upload(&vec![0xabcd; len]).unwrap();
            own.multiply(&device, &from, &part).unwrap();
            assert!(own.multiply(&device, &from, &part).is_err());
            own.add(&device, &part, &mut y).unwrap();
            own.check(&device).unwrap();
            outputs.push(device.download(&y).unwrap());
        }
    }
    outputs
}

#[test]
fn ranks_that_nccl_waits_for_are_errors() {
    let test = "ranks_that_nccl_waits_for_are_errors";
    let Some(device) = common::device_or_skip(test) else { return };
    let id = match NcclId::new() {
        Ok(id) => id,
        Err(error @ AccelError::NcclMissing { .. }) => {
            return common::say(&format!("SKIPPED ({error}): {test}"));
        }
        Err(error) => panic!("{error}"),
    };
    let limit = Duration::from_secs(2);
    let refused = |place| NcclRank::new(&device, id, place, 64, limit).unwrap_err();
    for place in [[0, 3], [1, 1]] {
        assert!(matches!(refused(place), AccelError::Argument { .. }), "{place:?}");
    }
    // The second rank never comes.
    let begin = Instant::now();
    let error = refused([0, 2]);
    assert!(matches!(error, AccelError::Nccl { .. }), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}: {error}", begin.elapsed());
    common::say(&format!("LAW a rank that NCCL waits for is an error after {:?}", begin.elapsed()));
}
