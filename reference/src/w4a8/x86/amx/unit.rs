//! The tile unit: its permission, its configuration and its product.

use std::arch::asm;
use std::sync::OnceLock;

use crate::w4a8::x86::cpuid;

/// Columns of a tile of results: 32-bit values of a row of 64 bytes.
pub(in crate::w4a8) const COLUMNS: usize = 16;
/// Rows of a tile.
pub(in crate::w4a8) const ROWS: usize = 16;
/// Bytes of a tile's row.
pub(in crate::w4a8) const ROW_BYTES: usize = 64;

/// Rows of activations times sixteen columns of weights, a number of steps of k.
#[derive(Debug, Clone, Copy)]
pub(in crate::w4a8) struct Operands<const N: usize> {
    /// The first row of each tile of rows.
    pub(in crate::w4a8) rows: [*const u8; N],
    /// Bytes from one row to the next.
    pub(in crate::w4a8) stride: usize,
    /// Weights `[k / 4][16][4]`.
    pub(in crate::w4a8) weights: *const u8,
    /// Rows of a tile, and k of a step.
    pub(in crate::w4a8) tile: [usize; 2],
    /// Steps, at least one.
    pub(in crate::w4a8) steps: usize,
}

/// What multiplies tiles of int8.
pub(in crate::w4a8) trait Unit:
    Copy + std::fmt::Debug + Send + Sync + 'static
{
    /// The unit, if this process may use it.
    fn new() -> Option<Self>;

    /// Configures the tiles for `rows` rows and `step` k (32 or 64) until the result is dropped.
    fn configure(self, rows: usize, step: usize) -> Tiles;

    /// `sums` `[N][16][16]`: the products of `N` tiles, added to the previous sums if `ADD`.
    ///
    /// # Safety
    /// The tiles are configured for [`Operands::tile`]. All rows and weights of [`Operands`] can be read
    /// and `sums` can be written; if `ADD`, it is initialized.
    unsafe fn multiply<const N: usize, const ADD: bool>(self, of: Operands<N>, sums: *mut i32);
}

/// The CPU's unit. A value proves that the CPU has it and that Linux has permitted its use.
#[derive(Debug, Clone, Copy)]
pub(in crate::w4a8) struct Amx(());

/// Whether the CPU has tiles of 16 rows of 64 bytes and multiplies int8.
fn supported() -> bool {
    const TILE_AND_INT8: u32 = 1 << 24 | 1 << 25;
    if cpuid(0, 0).eax < 0x1d || cpuid(7, 0).edx & TILE_AND_INT8 != TILE_AND_INT8 {
        return false;
    }
    // Palette 1: bytes of a tile and of a row, number of tiles, rows.
    let palette = cpuid(0x1d, 1);
    let (tile, row) = (palette.eax >> 16, palette.ebx & 0xffff);
    let (tiles, rows) = (palette.ebx >> 16, palette.ecx & 0xffff);
    tile >= 1024 && row >= ROW_BYTES as u32 && tiles >= 8 && rows >= ROWS as u32
}

/// Asks Linux for the permission to use tiles, which holds for all threads of the process.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: This call of `arch_prctl` takes two numbers and accesses no memory of the process. The
    // registers that a system call changes are declared.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Configuration([u8; 64]);

impl Configuration {
    /// Tiles 0 to 3 hold sums, 4 to 6 rows of activations, 7 weights.
    fn new(rows: usize, step: usize) -> Self {
        let mut bytes = [0; 64];
        // The palette.
        bytes[0] = 1;
        for tile in 0..8 {
            let (rows, width) = match tile {
                0..4 => (rows, ROW_BYTES),
                4..7 => (rows, step),
                _ => (step / 4, ROW_BYTES),
            };
            bytes[16 + 2 * tile] = width as u8;
            bytes[48 + tile] = rows as u8;
        }
        Self(bytes)
    }
}

/// Releases the tiles when dropped, so that nothing of them is saved when threads are switched.
pub(in crate::w4a8) struct Tiles {
    pub(in crate::w4a8) unit: Option<Amx>,
}

impl Drop for Tiles {
    fn drop(&mut self) {
        if self.unit.is_some() {
            // SAFETY: The unit exists, and no tile is in use between blocks of assembly.
            unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
        }
    }
}

/// The products of `$count` tiles of rows; `$begin` prepares tile `$sum` of sums.
macro_rules! products {
    ($of:ident, $sums:ident, $begin:ident, $($sum:literal, $tile:literal, $rows:ident, $at:literal;)+) => {
        asm!(
            $($begin!($sum, $at),)+
            "2:",
            "tileloadd tmm7, [{weights} + {line}*1]",
            $(
                concat!("tileloadd tmm", $tile, ", [{", stringify!($rows), "} + {stride}*1]"),
                concat!("tdpbssd tmm", $sum, ", tmm", $tile, ", tmm7"),
                concat!("add {", stringify!($rows), "}, {step}"),
            )+
            "add {weights}, {block}",
            "dec {steps}",
            "jnz 2b",
            $(concat!("tilestored [{sums} + {line}*1 + ", $at, "], tmm", $sum),)+
            $($rows = inout(reg) $of.rows[$sum] => _,)+
            weights = inout(reg) $of.weights => _,
            steps = inout(reg) $of.steps => _,
            stride = in(reg) $of.stride,
            step = in(reg) $of.tile[1],
            block = in(reg) COLUMNS * $of.tile[1],
            line = in(reg) ROW_BYTES,
            sums = in(reg) $sums,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Sums that start from zero.
macro_rules! zero {
    ($sum:literal, $at:literal) => {
        concat!("tilezero tmm", $sum)
    };
}

/// Sums that start from those in memory.
macro_rules! previous {
    ($sum:literal, $at:literal) => {
        concat!("tileloadd tmm", $sum, ", [{sums} + {line}*1 + ", $at, "]")
    };
}

impl Unit for Amx {
    fn new() -> Option<Self> {
        static PERMITTED: OnceLock<bool> = OnceLock::new();
        PERMITTED.get_or_init(|| supported() && permitted()).then_some(Self(()))
    }

    fn configure(self, rows: usize, step: usize) -> Tiles {
        assert!((1..=ROWS).contains(&rows) && (step == 32 || step == 64), "{rows} rows, {step} k");
        let configuration = Configuration::new(rows, step);
        // SAFETY: `new`, the only constructor of this type, detected the unit and its permission. The
        // configuration is valid: palette 1, at most 16 rows of at most 64 bytes.
        unsafe {
            let at = configuration.0.as_ptr();
            asm!("ldtilecfg [{}]", in(reg) at, options(readonly, nostack, preserves_flags));
        }
        Tiles { unit: Some(self) }
    }

    #[inline(always)]
    unsafe fn multiply<const N: usize, const ADD: bool>(self, of: Operands<N>, sums: *mut i32) {
        // SAFETY: guaranteed by the caller. The tiles are clobbered, and no other code uses them.
        unsafe {
            match (N, ADD) {
                (1, false) => products!(of, sums, zero, 0, 4, rows0, 0;),
                (1, true) => products!(of, sums, previous, 0, 4, rows0, 0;),
                (2, false) => products!(of, sums, zero, 0, 4, rows0, 0; 1, 5, rows1, 1024;),
                (2, true) => products!(of, sums, previous, 0, 4, rows0, 0; 1, 5, rows1, 1024;),
                (4, false) => products!(of, sums, zero, 0, 4, rows0, 0; 1, 5, rows1, 1024;
                    2, 6, rows2, 2048; 3, 4, rows3, 3072;),
                (4, true) => products!(of, sums, previous, 0, 4, rows0, 0; 1, 5, rows1, 1024;
                    2, 6, rows2, 2048; 3, 4, rows3, 3072;),
                _ => unreachable!("1, 2 or 4 tiles"),
            }
        }
    }
}

/// [`Instruction::Tdpbssd`](crate::w4a8::limits::Instruction::Tdpbssd): `rounds` products on each of
/// twelve tiles of sums, four at a time.
pub(in crate::w4a8) fn chains(rounds: u64) -> Option<[i32; 12]> {
    let unit = Amx::new()?;
    let _tiles = unit.configure(ROWS, ROW_BYTES);
    let (ones, threes) = ([1u8; 1024], [3u8; 1024]);
    let mut lowest = [0; 12];
    for first in [0, 4, 8] {
        let mut sums = [[0i32; 256]; 4];
        for (i, tile) in sums.iter_mut().enumerate() {
            tile.fill((first + i) as i32 + 1);
        }
        // SAFETY: The unit exists and its tiles are configured; the arrays have the tiles' 1024 bytes.
        // The tiles are clobbered, and no other code uses them.
        unsafe {
            asm!(
                "tileloadd tmm0, [{sums} + {line}*1]",
                "tileloadd tmm1, [{sums} + {line}*1 + 1024]",
                "tileloadd tmm2, [{sums} + {line}*1 + 2048]",
                "tileloadd tmm3, [{sums} + {line}*1 + 3072]",
                "tileloadd tmm4, [{ones} + {line}*1]",
                "tileloadd tmm7, [{threes} + {line}*1]",
                "test {rounds}, {rounds}",
                "jz 3f",
                "2:",
                "tdpbssd tmm0, tmm4, tmm7",
                "tdpbssd tmm1, tmm4, tmm7",
                "tdpbssd tmm2, tmm4, tmm7",
                "tdpbssd tmm3, tmm4, tmm7",
                "dec {rounds}",
                "jnz 2b",
                "3:",
                "tilestored [{sums} + {line}*1], tmm0",
                "tilestored [{sums} + {line}*1 + 1024], tmm1",
                "tilestored [{sums} + {line}*1 + 2048], tmm2",
                "tilestored [{sums} + {line}*1 + 3072], tmm3",
                sums = in(reg) sums.as_mut_ptr(),
                ones = in(reg) ones.as_ptr(),
                threes = in(reg) threes.as_ptr(),
                line = in(reg) ROW_BYTES,
                rounds = inout(reg) rounds => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm7") _,
                options(nostack),
            );
        }
        for (i, tile) in sums.iter().enumerate() {
            lowest[first + i] = tile[0];
        }
    }
    Some(lowest)
}
