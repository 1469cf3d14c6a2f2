//! Limits of a CPU, for benchmarks to time: multiply-accumulates of one instruction, and memory reads.
//!
//! A product of packed weights takes at least the time to read its weights and to issue its
//! multiply-accumulates. [`Instruction::run`] executes independent chains of a kernel's main
//! instruction on registers; [`read`] reads every byte of a slice once.

#[cfg(target_arch = "aarch64")]
#[path = "aarch64.rs"]
mod simd;
#[cfg(target_arch = "x86_64")]
#[path = "x86.rs"]
mod simd;

/// Independent chains of [`Instruction::run`]: enough to cover latency times issue width of the CPUs
/// that have the instructions, and few enough for the registers.
pub const CHAINS: usize = 12;

/// An instruction that multiplies bytes and adds the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Instruction {
    /// AVX-512 VNNI's `vpdpbusd` on 512 bits.
    Vpdpbusd512,
    /// AVX-VNNI's `vpdpbusd` on 256 bits.
    Vpdpbusd256,
    /// AVX2's `vpmaddubsw`, whose 16-bit sums a kernel must still widen.
    Vpmaddubsw,
    /// AMX's `tdpbssd` on whole tiles.
    Tdpbssd,
    /// Arm's `sdot` on 128 bits.
    Sdot,
    /// Arm's `smmla`.
    Smmla,
}

impl Instruction {
    /// All instructions, in no order.
    pub const ALL: [Self; 6] = [
        Self::Vpdpbusd512,
        Self::Vpdpbusd256,
        Self::Vpmaddubsw,
        Self::Tdpbssd,
        Self::Sdot,
        Self::Smmla,
    ];

    /// The multiplication instruction of the kernel with this [`name`](super::Kernel::name); `None` for
    /// the scalar and the portable kernel.
    pub fn of_kernel(name: &str) -> Option<Self> {
        Some(match name {
            "avx512-vnni" => Self::Vpdpbusd512,
            "avx-vnni" => Self::Vpdpbusd256,
            "avx2" => Self::Vpmaddubsw,
            "amx-int8" => Self::Tdpbssd,
            "neon-dotprod" => Self::Sdot,
            "neon-i8mm" => Self::Smmla,
            _ => return None,
        })
    }

    /// The mnemonic, with the width where it is ambiguous.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vpdpbusd512 => "vpdpbusd zmm",
            Self::Vpdpbusd256 => "vpdpbusd ymm",
            Self::Vpmaddubsw => "vpmaddubsw ymm",
            Self::Tdpbssd => "tdpbssd",
            Self::Sdot => "sdot",
            Self::Smmla => "smmla",
        }
    }

    /// Multiply-accumulates of one execution.
    pub fn macs(self) -> u64 {
        match self {
            Self::Vpdpbusd512 => 64,
            Self::Vpdpbusd256 | Self::Vpmaddubsw | Self::Smmla => 32,
            Self::Tdpbssd => 16 * 16 * 64,
            Self::Sdot => 16,
        }
    }

    /// Executes the instruction `rounds` times on each of [`CHAINS`] accumulators:
    /// [`Instruction::macs`] · `rounds` · [`CHAINS`] multiply-accumulates. `None` if the CPU lacks it.
    ///
    /// Returns the chains' lowest lanes (32 bits; `vpmaddubsw` 16 bits), so that tests can verify the
    /// work. Chain i starts at i + 1 in every lane. A step adds 4·1·3 (`smmla`, whose lane is a sum of
    /// eight products: 8·1·3; `tdpbssd`: 64·1·3); `vpmaddubsw` triples the lower byte: x ← 3 · (x mod 256).
    pub fn run(self, rounds: u64) -> Option<[i32; CHAINS]> {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        {
            simd::run(self, rounds)
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            let _ = rounds;
            None
        }
    }
}

/// Reads every word once, in order, by the widest available loads. Returns their sum modulo 2^64.
pub fn read(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        simd::read(words)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        sum(words)
    }
}

/// Sixteen words are two cache lines; the compiler vectorizes the lanes.
#[inline(always)]
fn sum(words: &[u64]) -> u64 {
    const LANES: usize = 16;
    let mut lanes = [0u64; LANES];
    let (lines, rest) = words.as_chunks::<LANES>();
    for line in lines {
        for (lane, word) in lanes.iter_mut().zip(line) {
            *lane = lane.wrapping_add(*word);
        }
    }
    lanes.iter().chain(rest).fold(0, |sum, &word| sum.wrapping_add(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::w4a8::kernels;

    #[test]
    fn every_vector_kernel_has_its_instruction_and_the_cpu_has_it_too() {
        for kernel in kernels() {
            if ["scalar", "portable"].contains(&kernel.name()) {
                assert_eq!(Instruction::of_kernel(kernel.name()), None);
                continue;
            }
            let instruction = Instruction::of_kernel(kernel.name());
            assert!(instruction.is_some_and(|i| i.run(1).is_some()), "{}", kernel.name());
        }
    }

    #[test]
    fn each_chain_went_through_every_round() {
        for instruction in Instruction::ALL {
            for rounds in [0, 1, 2, 77] {
                let Some(found) = instruction.run(rounds) else { continue };
                let expected = std::array::from_fn(|i| {
                    let start = i as i32 + 1;
                    match instruction {
                        Instruction::Vpmaddubsw => (0..rounds).fold(start, |x, _| 3 * (x & 255)),
                        Instruction::Smmla => start + rounds as i32 * 24,
                        Instruction::Tdpbssd => start + rounds as i32 * 192,
                        _ => start + rounds as i32 * 12,
                    }
                });
                assert_eq!(found, expected, "{} {rounds}", instruction.name());
            }
        }
    }

    #[test]
    fn reading_touches_every_word() {
        for len in [0, 1, 15, 16, 17, 1000] {
            let words: Vec<u64> = (0..len).map(|i| (u64::MAX / 3).wrapping_mul(i + 1)).collect();
            let expected = words.iter().fold(0u128, |sum, &w| sum + u128::from(w)) as u64;
            assert_eq!(read(&words), expected, "{len} words");
        }
    }
}
