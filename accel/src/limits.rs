//! Measured limits of a device: bytes read per second, and operations of the matrix unit per
//! second.

use marlinspike_kernels::constant;

use crate::{
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    memory::Buffer,
    operation::{Law, Needs, Row, lattice},
    timing::REPLAYS,
};

/// The limits of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Bytes read from memory per second, the best of some readings of 2 GiB.
    pub read: f64,
    /// Floating-point operations per second (a multiply-add is two) of the matrix unit with
    /// operands of that type that are not zeros: the median of some runs of about 10 ms, long enough for a
    /// sustained clock.
    pub matrix: f64,
    /// The instruction that was measured.
    pub instruction: &'static str,
}

static READ: Row = Row {
    name: "read_limit",
    source: "read_limit",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("FILL", &[0, 1])])),
    arguments: ReadArguments::SIZES,
    mutants: &[],
};

static MATRIX: Row = Row {
    name: "matrix_limit",
    source: "matrix_limit",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |arch| Ok(lattice(&[("WGMMA", if arch.has_wgmma() { &[0, 1, 2] } else { &[0] })])),
    arguments: MatrixArguments::SIZES,
    mutants: &[],
};

static READ_KERNEL: Kernel<ReadArguments> = Kernel::new(&READ);
static MATRIX_KERNEL: Kernel<MatrixArguments> = Kernel::new(&MATRIX);

arguments! {
    /// Arguments of `read_limit.cu`.
    ReadArguments {
        words: Pointer,
        result: Pointer,
        count: u64,
    }
}

arguments! {
    /// Arguments of `matrix_limit.cu`.
    MatrixArguments {
        result: Pointer,
        rounds: u32,
    }
}

/// Threads of a block of both sources.
const THREADS: u32 = 256;

/// Memory for reading, in whole rounds of all threads.
struct Reads {
    words: Buffer<u32>,
    result: Buffer<u32>,
    blocks: u32,
}

impl Reads {
    /// At least `bytes`.
    fn new(device: &Device, bytes: usize) -> Result<Self, AccelError> {
        let blocks = 8 * device.multiprocessors();
        let threads = blocks as usize * THREADS as usize;
        let words = bytes.div_ceil(4).next_multiple_of(8 * threads * 4);
        let (words, result) = (device.zeroed(words)?, device.zeroed(threads)?);
        Ok(Self { words, result, blocks })
    }

    /// Reads all words, or fills them.
    fn run(&mut self, device: &Device, fill: u32) -> Result<(), AccelError> {
        // Whole rounds of eight vectors of 16 bytes for each thread, and a result for each thread.
        let count = self.words.len() as u64 / 4;
        let arguments =
            ReadArguments { words: (&self.words).into(), result: (&self.result).into(), count };
        let grid = Grid::new((self.blocks, 1, 1), (THREADS, 1, 1));
        READ_KERNEL.launch(device, &[("FILL", fill)], grid, arguments)
    }
}

/// Bytes to read: much larger than any cache.
const BYTES: usize = 2 << 30;

/// Operands of the matrix unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operands {
    /// bf16.
    Bf16,
    /// e4m3; measured on Hopper, elsewhere bf16 in their place.
    E4m3,
}

/// Measures `device` with such operands, in about a second.
///
/// # Errors
/// [`AccelError::NvrtcMissing`] and [`AccelError::Compile`] from preparing the kernels;
/// [`AccelError::Driver`], as where the device has less than 2 GiB free.
pub fn measure(device: &Device, operands: Operands) -> Result<Limits, AccelError> {
    let (matrix, instruction) = matrix(device, operands)?;
    Ok(Limits { read: read(device, BYTES)?, matrix, instruction })
}

/// Bytes per second.
fn read(device: &Device, bytes: usize) -> Result<f64, AccelError> {
    let mut reads = written(device, bytes)?;
    // Loading a module cannot be recorded.
    reads.run(device, 0)?;
    let bytes = reads.words.len() as f64 * 4.0;
    let graph = device.record(|| reads.run(device, 0))?;
    let times = device.time(&graph, REPLAYS)?;
    Ok(bytes / f64::from(times.least) * 1e6)
}

/// Memory that holds a hash of each word's place, since zeros may be faster to read.
fn written(device: &Device, bytes: usize) -> Result<Reads, AccelError> {
    let mut reads = Reads::new(device, bytes)?;
    reads.run(device, 1)?;
    Ok(reads)
}

/// The exclusive or of all words read from `bytes` of filled memory: a test checks with it that
/// every word is read.
///
/// # Errors
/// As [`measure`].
#[doc(hidden)]
pub fn checksum(device: &Device, bytes: usize) -> Result<(usize, u32), AccelError> {
    let mut reads = written(device, bytes)?;
    reads.run(device, 0)?;
    let of_threads = device.download(&reads.result)?;
    Ok((reads.words.len(), of_threads.into_iter().fold(0, |all, word| all ^ word)))
}

/// Operations per second, and the instruction.
fn matrix(device: &Device, operands: Operands) -> Result<(f64, &'static str), AccelError> {
    // Only this architecture has the asynchronous instruction.
    let wgmma = device.compute_capability() == (9, 0);
    // A block's operations in a round of eight instructions in each chain.
    let (mode, name, per_round) = match (wgmma, operands) {
        (true, Operands::Bf16) => (1, "wgmma m64n256k16 bf16", 2.0 * 8.0 * 524_288.0),
        (true, Operands::E4m3) => (2, "wgmma m64n256k32 e4m3", 2.0 * 8.0 * 1_048_576.0),
        (false, _) => (0, "mma.sync m16n8k16 bf16", 8.0 * 8.0 * 4096.0),
    };
    let blocks = device.multiprocessors() * if wgmma { 1 } else { 4 };
    let rounds = if wgmma { 8192 } else { 1 << 16 };
    // An element for each thread.
    let result = device.zeroed::<f32>(blocks as usize * THREADS as usize)?;
    let parameters = [("WGMMA", mode)];
    let shared_bytes = constant("matrix_limit", "SHARED_BYTES", &parameters)?;
    let grid = Grid { blocks: (blocks, 1, 1), threads: (THREADS, 1, 1), shared_bytes };
    let run = |rounds| {
        let arguments = MatrixArguments { result: (&result).into(), rounds };
        MATRIX_KERNEL.launch(device, &parameters, grid, arguments)
    };
    // Loading a module cannot be recorded.
    run(1)?;
    let graph = device.record(|| run(rounds))?;
    let times = device.time(&graph, REPLAYS)?;
    let operations = per_round * f64::from(rounds) * f64::from(blocks);
    Ok((operations / f64::from(times.median) * 1e6, name))
}
