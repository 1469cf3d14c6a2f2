//! Row-parallel products over ranks whose sums or memory come from elsewhere: at an engine's addresses, gathered by any
//! library, by NCCL.
#![allow(unsafe_code)]

use crate::common;

use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaSlice, DevicePtr};

use crate::common::{Law, Random, weight};
use crate::peers::{Layer, alone, open, whole};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::Split;
use marlinspike_accel::{
    AccelError,
    ops::{MarlinWeight, NcclId, NcclRank, Rank, gemm::marlin_gemm_part, ranks::add_gathered},
};

const BF16: ScalarType = ScalarType::BFLOAT16;

/// Memory of an engine, which this crate did not allocate.
#[test]
fn ranks_at_an_engines_addresses_have_the_bits_of_the_reference() {
    let test = "ranks_at_an_engines_addresses_have_the_bits_of_the_reference";
    if common::device_or_skip(test).is_none() {
        return;
    }
    let _alone = alone();
    let mut law = Law::new("row-parallel product at given addresses, 1, 2, 4 and 8 ranks");
    let mut random = Random(0x5EED_000D_89AB_CDEF);
    let (shape, size_m) = (Shape::new(1536, 64), 5);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(64), true);
    let x = random.halves(BF16, size_m * shape.size_k, 1.0);
    let wanted = whole(&x, &w);
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    for count in [1, 2, 4, 8] {
        let capacity = size_m * shape.size_n;
        let bytes = Rank::bytes(capacity).unwrap();
        let memory: Vec<CudaSlice<u8>> =
            (0..count).map(|_| stream.alloc_zeros(bytes).unwrap()).collect();
        stream.synchronize().unwrap();
        let addresses: Vec<u64> =
            memory.iter().map(|memory| memory.device_ptr(&stream).0).collect();
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
    law.held();
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

/// NCCL refuses two ranks on one GPU, so one rank is what a single GPU can run; more are not run here.
#[test]
fn one_rank_by_nccl_has_the_bits_of_the_reference() {
    let test = "one_rank_by_nccl_has_the_bits_of_the_reference";
    let Some(device) = common::device_or_skip(test) else { return };
    let id = match NcclId::new() {
        Ok(id) => id,
        Err(error @ AccelError::NcclMissing { .. }) => {
            return common::say(&format!("SKIPPED ({error}): {test}"));
        }
        Err(error) => panic!("{error}"),
    };
    assert_eq!(NcclId::from_bytes(id.to_bytes()), id);
    let mut law = Law::new("row-parallel product, one rank by NCCL");
    let mut random = Random(0x5EED_0012_89AB_CDEF);
    let (shape, size_m) = (Shape::new(1536, 128), 9);
    let x = random.halves(BF16, size_m * shape.size_k, 1.0);
    let limit = Duration::from_secs(20);
    let len = size_m * shape.size_n;
    let mut rank = NcclRank::new(&device, id, [0, 1], len, limit).unwrap();
    let from = device.upload(&x).unwrap();
    for bias in [false, true] {
        let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(64), bias);
        let part = Split::whole(shape.size_k).part_of(&w).unwrap();
        let part = MarlinWeight::of_part(&device, &part, BF16).unwrap();
        for call in 0..3 {
            let mut y = device.upload(&vec![0xabcd; len]).unwrap();
            rank.multiply(&device, &from, &part).unwrap();
            assert!(rank.multiply(&device, &from, &part).is_err());
            rank.add(&device, &part, &mut y).unwrap();
            rank.check(&device).unwrap();
            let found = device.download(&y).unwrap();
            law.equal(&format!("bias {bias}, call {call}"), &found, &whole(&x, &w));
        }
    }
    drop(rank);
    law.held();
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
