//! What a device can do at most, measured: bytes read per second, and operations of the matrix unit.

use marlinspike_kernels::{PROBES, Source};

use crate::{
    device::Device, error::AccelError, memory::Buffer, raw::limits as raw, timing::REPLAYS,
};

/// The limits of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Bytes read from memory per second, best of some readings of 2 GiB.
    pub read: f64,
    /// Floating-point operations per second (a multiply-add is two) of the matrix unit with bf16
    /// operands that are not zeros: the median of some runs of about 10 ms, so that the clock is one
    /// that the chip keeps.
    pub matrix: f64,
    /// The instruction of it.
    pub instruction: &'static str,
}

/// Memory to be read, in whole rounds of all threads.
pub(crate) struct Reads {
    pub(crate) words: Buffer<u32>,
    pub(crate) result: Buffer<u32>,
    pub(crate) blocks: u32,
}

impl Reads {
    /// At least `bytes`.
    fn new(device: &Device, bytes: usize) -> Result<Self, AccelError> {
        let blocks = 8 * device.multiprocessors();
        let threads = blocks as usize * raw::THREADS as usize;
        let words = bytes.div_ceil(4).next_multiple_of(8 * threads * 4);
        let (words, result) = (device.zeroed(words)?, device.zeroed(threads)?);
        Ok(Self { words, result, blocks })
    }

    /// Vectors of 16 bytes.
    pub(crate) fn vectors(&self) -> u64 {
        self.words.len() as u64 / 4
    }
}

/// Bytes that are read: many times any cache.
const BYTES: usize = 2 << 30;

fn probe(name: &str) -> Result<&'static Source, AccelError> {
    PROBES.iter().find(|source| source.name == name).ok_or_else(|| AccelError::Driver {
        call: "limits",
        reason: format!("no source {name} is embedded"),
    })
}

/// Measures `device`, in about a second.
///
/// # Errors
/// [`AccelError::NvrtcMissing`] and [`AccelError::Compile`] from preparing the kernels;
/// [`AccelError::Driver`], as where the device has not 2 GiB to spare.
pub fn measure(device: &Device) -> Result<Limits, AccelError> {
    let (matrix, instruction) = matrix(device)?;
    Ok(Limits { read: read(device, BYTES)?, matrix, instruction })
}

/// Bytes per second.
fn read(device: &Device, bytes: usize) -> Result<f64, AccelError> {
    let mut reads = written(device, bytes)?;
    let read = device.load(probe("read_limit")?, &[("FILL", 0)])?;
    let bytes = reads.words.len() as f64 * 4.0;
    let graph = device.record(|| raw::read(device, &read, &mut reads))?;
    let times = device.time(&graph, REPLAYS)?;
    Ok(bytes / f64::from(times.least) * 1e6)
}

/// Memory that holds a hash of each word's place: no zeros, which may be quicker to read.
fn written(device: &Device, bytes: usize) -> Result<Reads, AccelError> {
    let mut reads = Reads::new(device, bytes)?;
    let fill = device.load(probe("read_limit")?, &[("FILL", 1)])?;
    raw::read(device, &fill, &mut reads)?;
    Ok(reads)
}

/// Exclusive or of all words that were read, after filling `bytes` of memory: what shows in a test
/// that every word is read.
///
/// # Errors
/// As [`measure`].
#[doc(hidden)]
pub fn checksum(device: &Device, bytes: usize) -> Result<(usize, u32), AccelError> {
    let mut reads = written(device, bytes)?;
    let read = device.load(probe("read_limit")?, &[("FILL", 0)])?;
    raw::read(device, &read, &mut reads)?;
    let of_threads = device.download(&reads.result)?;
    Ok((reads.words.len(), of_threads.into_iter().fold(0, |all, word| all ^ word)))
}

/// Operations per second, and the instruction.
fn matrix(device: &Device) -> Result<(f64, &'static str), AccelError> {
    // The asynchronous instruction is this one architecture's.
    let wgmma = device.compute_capability() == (9, 0);
    let function = device.load(probe("matrix_limit")?, &[("WGMMA", wgmma.into())])?;
    // A block's operations in a round of eight instructions in each chain.
    let (name, per_round) = match wgmma {
        true => ("wgmma m64n256k16 bf16", 2.0 * 8.0 * 524_288.0),
        false => ("mma.sync m16n8k16 bf16", 8.0 * 8.0 * 4096.0),
    };
    let blocks = device.multiprocessors() * if wgmma { 1 } else { 4 };
    let rounds = if wgmma { 8192 } else { 1 << 16 };
    let mut result = device.zeroed(blocks as usize * raw::THREADS as usize)?;
    let graph =
        device.record(|| raw::matrix(device, &function, wgmma, blocks, rounds, &mut result))?;
    let times = device.time(&graph, REPLAYS)?;
    let operations = per_round * f64::from(rounds) * f64::from(blocks);
    Ok((operations / f64::from(times.median) * 1e6, name))
}
