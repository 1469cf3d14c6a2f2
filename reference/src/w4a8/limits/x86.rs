//! x86-64.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::hint::black_box;

use super::{CHAINS, Instruction};

/// [`Instruction::run`].
pub(super) fn run(instruction: Instruction, rounds: u64) -> Option<[i32; CHAINS]> {
    match instruction {
        Instruction::Vpdpbusd512 => {
            let there =
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni");
            // SAFETY: both features that the function needs were detected.
            there.then(|| unsafe { vpdpbusd_512(rounds) })
        }
        Instruction::Vpdpbusd256 => {
            let there = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("avxvnni");
            // SAFETY: both features that the function needs were detected.
            there.then(|| unsafe { vpdpbusd_256(rounds) })
        }
        Instruction::Vpmaddubsw => {
            // SAFETY: the function needs only AVX2, which was detected.
            is_x86_feature_detected!("avx2").then(|| unsafe { vpmaddubsw(rounds) })
        }
        Instruction::Tdpbssd => crate::w4a8::x86::tile_chains(rounds),
        Instruction::Sdot | Instruction::Smmla => None,
    }
}

/// [`super::read`].
pub(super) fn read(words: &[u64]) -> u64 {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the function needs only AVX-512F, which was detected.
        unsafe { read_avx512(words) }
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the function needs only AVX2, which was detected.
        unsafe { read_avx2(words) }
    } else {
        super::sum(words)
    }
}

/// Start of chain `i`; opaque, so that the compiler cannot merge chains.
#[inline(always)]
fn start(i: usize) -> i32 {
    black_box(i as i32 + 1)
}

#[target_feature(enable = "avx512f,avx512vnni")]
fn vpdpbusd_512(rounds: u64) -> [i32; CHAINS] {
    let (ones, threes) = (_mm512_set1_epi8(black_box(1)), _mm512_set1_epi8(black_box(3)));
    let mut chains: [__m512i; CHAINS] = std::array::from_fn(|i| _mm512_set1_epi32(start(i)));
    for _ in 0..rounds {
        for x in &mut chains {
            *x = _mm512_dpbusd_epi32(*x, ones, threes);
        }
    }
    chains.map(|x| _mm512_cvtsi512_si32(x))
}

#[target_feature(enable = "avx2,avxvnni")]
fn vpdpbusd_256(rounds: u64) -> [i32; CHAINS] {
    let (ones, threes) = (_mm256_set1_epi8(black_box(1)), _mm256_set1_epi8(black_box(3)));
    let mut chains: [__m256i; CHAINS] = std::array::from_fn(|i| _mm256_set1_epi32(start(i)));
    for _ in 0..rounds {
        for x in &mut chains {
            *x = _mm256_dpbusd_avx_epi32(*x, ones, threes);
        }
    }
    chains.map(|x| _mm256_cvtsi256_si32(x))
}

#[target_feature(enable = "avx2")]
fn vpmaddubsw(rounds: u64) -> [i32; CHAINS] {
    // Lower bytes by 3, upper bytes by 0.
    let threes = _mm256_set1_epi16(black_box(3));
    let mut chains: [__m256i; CHAINS] = std::array::from_fn(|i| _mm256_set1_epi16(start(i) as i16));
    for _ in 0..rounds {
        for x in &mut chains {
            *x = _mm256_maddubs_epi16(*x, threes);
        }
    }
    chains.map(|x| _mm256_extract_epi16::<0>(x))
}

/// Four cache lines at a time, each into its own sums.
#[target_feature(enable = "avx512f")]
fn read_avx512(words: &[u64]) -> u64 {
    let mut sums = [_mm512_setzero_si512(); 4];
    let (blocks, rest) = words.as_chunks::<32>();
    for block in blocks {
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: a block has 4 times the vector's 64 bytes.
            let line = unsafe { _mm512_loadu_si512(block.as_ptr().add(8 * i).cast()) };
            *sum = _mm512_add_epi64(*sum, line);
        }
    }
    let sum =
        _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]));
    rest.iter().fold(_mm512_reduce_add_epi64(sum) as u64, |sum, &word| sum.wrapping_add(word))
}

/// As [`read_avx512`], two lines at a time.
#[target_feature(enable = "avx2")]
fn read_avx2(words: &[u64]) -> u64 {
    let mut sums = [_mm256_setzero_si256(); 4];
    let (blocks, rest) = words.as_chunks::<16>();
    for block in blocks {
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: a block has 4 times the vector's 32 bytes.
            let half = unsafe { _mm256_loadu_si256(block.as_ptr().add(4 * i).cast()) };
            *sum = _mm256_add_epi64(*sum, half);
        }
    }
    let sum =
        _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
    let mut lanes = [0u64; 4];
    // SAFETY: the array has the vector's 32 bytes.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), sum) };
    lanes.iter().chain(rest).fold(0, |sum, &word| sum.wrapping_add(word))
}
