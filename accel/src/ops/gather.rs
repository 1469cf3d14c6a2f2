//! Rows in the order of a product's blocks, and their quantization.

use marlinspike::moe::activation::Definition;
use marlinspike::num::scalar::ScalarType;

use super::{
    align::{PlacedBlocks, Runs},
    check,
    gemm::checks,
    quantize::{FP8_GROUP, fp8_scale_step},
};
use crate::{
    device::Device,
    error::AccelError,
    launch::{Activation, Arguments, Grid, Kernel, Placing, Pointer, arguments},
    memory::Buffer,
    operation::{Law, Mutant, Needs, Row, lattice},
};

/// Part of upstream's `moe_wna16_marlin_gemm`, and of its activations.
pub(crate) static ROW: Row = Row {
    name: "moe_gather",
    source: "moe_gather",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| {
        let both = &[0, 1][..];
        let all = [
            ("IS_BF16", both),
            ("ACTIVATES", both),
            ("QUANTIZES", &[0, 1, 2]),
            ("IS_UE8M0", both),
            ("PLACES", both),
        ];
        let mut all = lattice(&all);
        all.retain(|parameters| {
            !(parameters.contains(&("ACTIVATES", 1)) && parameters.contains(&("PLACES", 1)))
        });
        Ok(all)
    },
    arguments: GatherArguments::SIZES,
    mutants: &[
        Mutant::new(
            "the row of another token",
            "__ldcg(x + row * pieces + at)",
            "__ldcg(x + (row ^ row % 2) * pieces + at)",
        ),
        Mutant::new(
            "the largest number of half of a gathered group",
            "for (unsigned step = LANES / 2; step > 0; step /= 2)",
            "for (unsigned step = LANES / 4; step > 0; step /= 2)",
        ),
        Mutant::new(
            "the largest number of one warp of a gathered row",
            "value = fmaxf(value, of_warps[first + warp]);",
            "value = of_warps[first];",
        ),
        Mutant::new(
            "one place for all entries of an expert",
            "before += run(runs[i]) == own;",
            "before += 0;",
        ),
        Mutant::new(
            "an expert's places among those of the one before",
            "r < end; r += 32",
            "r + 1 < end; r += 32",
        ),
    ],
};

static KERNEL: Kernel<GatherArguments> = Kernel::early(&ROW);

/// At most the kernel's `MOST_PLACED` and `MOST_EXPERTS`.
const MOST_ENTRIES: usize = 512;
const MOST_EXPERTS: usize = 1024;

/// Whether rows can be gathered before their blocks are aligned: every thread block then sorts all entries. Up to this
/// number that takes less time than a kernel of its own (measured on an H200).
pub(crate) fn places(entries: usize, top_k: usize, runs: &Runs) -> bool {
    (1..=MOST_ENTRIES).contains(&entries) && top_k <= 32 && runs.all_experts() <= MOST_EXPERTS
}

/// Rows of x that leave multiprocessors free.
const FEW_ROWS: u32 = 256;

arguments! {
    /// Arguments of `moe_gather.cu`.
    GatherArguments {
        rows: Pointer,
        gathered: Pointer,
        scales: Pointer,
        scale_step: u32,
        place_of: Pointer,
        entries: u32,
        size_k: u32,
        activation: Activation,
        topk_weights: Pointer,
        row_weights: Pointer,
        top_k: u32,
        placing: Placing,
    }
}

/// What rows are gathered from.
#[derive(Debug)]
pub(crate) enum RowSource<'a> {
    /// x `[entries / top_k, size_k]`: a row for each `top_k` entries, and each entry's router weight for the
    /// row's place.
    X {
        x: &'a Buffer<u16>,
        top_k: usize,
        weights: RouterWeights<'a>,
        /// The alignment that is made as rows are gathered; absent where the blocks are aligned already.
        placing: Option<Placing>,
    },
    /// The activation of `gate_up` `[places, width]`, whose rows are in the same order.
    GateUp { gate_up: &'a Buffer<u16>, activation: &'a Definition },
}

impl<'a> RowSource<'a> {
    /// The buffer of the rows, and the number of gathered rows that each is read for.
    fn check(
        &self,
        device: &Device,
        blocks: &PlacedBlocks,
        size_k: usize,
    ) -> Result<(&'a Buffer<u16>, u32), AccelError> {
        let (buffer, width, top_k, count) = match self {
            Self::X { x, top_k, weights, .. } => {
                weights.check(device, blocks)?;
                (*x, size_k, *top_k, blocks.entries())
            }
            Self::GateUp { gate_up, activation } => {
                (*gate_up, activation.width_in(size_k), 1, blocks.places())
            }
        };
        let top_k_32 = check::positive(&ROW, "top_k", top_k)?;
        let is_whole = buffer.len().checked_rem(width) == Some(0);
        if !is_whole || (buffer.len() / width).checked_mul(top_k) != Some(count) {
            let found = format!("{} elements", buffer.len());
            let expected = format!("rows of {width}, each for {top_k} of {count}");
            return Err(ROW.refuse("rows", found, expected));
        }
        Ok((buffer, top_k_32))
    }
}

/// The router weights of entries, and room for those of places.
#[derive(Debug)]
pub(crate) struct RouterWeights<'a> {
    /// `[entries]`.
    pub(crate) of_entries: &'a Buffer<f32>,
    /// `[places]`; those of padding keep their contents.
    pub(crate) of_places: &'a mut Buffer<f32>,
}

impl RouterWeights<'_> {
    fn check(&self, device: &Device, blocks: &PlacedBlocks) -> Result<(), AccelError> {
        let Self { of_entries, of_places } = self;
        let parts =
            [("topk_weights", of_entries.is_on(device)), ("row_weights", of_places.is_on(device))];
        check::same_device(&ROW, device, &parts)?;
        checks::router_weights(&ROW, "topk_weights", Some(of_entries), blocks.entries())?;
        checks::router_weights(&ROW, "row_weights", Some(of_places), blocks.places())
    }
}

/// Where gathered rows go.
#[derive(Debug)]
pub(crate) enum Gathered<'a> {
    /// `[places, size_k]`, or room for more.
    Halves(&'a mut Buffer<u16>),
    /// e4m3fn codes `[places, size_k]` and scales `[size_k / 128, fp8_scale_step(places)]`, as
    /// [`per_token_group_quant_fp8_on_device`](super::quantize::per_token_group_quant_fp8_on_device) makes them of the
    /// 16-bit rows.
    Fp8Groups { codes: &'a mut Buffer<u8>, scales: &'a mut Buffer<f32>, ue8m0: bool },
    /// e4m3fn codes `[places, size_k]` and scales `[places]`, as [`fp8_on_device`](super::quantize::fp8_on_device) makes
    /// them of the 16-bit rows without a bound.
    Fp8Rows { codes: &'a mut Buffer<u8>, scales: &'a mut Buffer<f32> },
}

/// How rows are quantized as they are gathered: the kernel's QUANTIZES.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Quantizes {
    Nothing,
    Groups,
    Rows,
}

/// The parameters and arguments of an output.
struct Destination {
    quantizes: Quantizes,
    ue8m0: bool,
    rows: Pointer,
    scales: Pointer,
    scale_step: u32,
}

impl Gathered<'_> {
    /// Returns an error unless there is room for rows of all places.
    fn check(
        self,
        device: &Device,
        places: usize,
        size_k: usize,
    ) -> Result<Destination, AccelError> {
        let refuse = |found: String, expected: String| ROW.refuse("gathered", found, expected);
        match self {
            Self::Halves(rows) => {
                check::same_device(&ROW, device, &[("gathered", rows.is_on(device))])?;
                if rows.len() / size_k < places {
                    let found = format!("{} elements", rows.len());
                    return Err(refuse(found, format!("at least {places} rows of {size_k}")));
                }
                let (quantizes, rows) = (Quantizes::Nothing, rows.into());
                Ok(Destination {
                    quantizes,
                    ue8m0: false,
                    rows,
                    scales: Pointer::NULL,
                    scale_step: 0,
                })
            }
            Self::Fp8Groups { codes, scales, ue8m0 } => {
                if !size_k.is_multiple_of(FP8_GROUP) {
                    return Err(ROW.refuse("size_k", size_k, "a multiple of 128"));
                }
                let shape = [size_k / FP8_GROUP, fp8_scale_step(places)];
                Self::quantized(device, [places, size_k], (codes, scales), shape)?;
                Ok(Destination {
                    quantizes: Quantizes::Groups,
                    ue8m0,
                    rows: codes.into(),
                    scales: scales.into(),
                    scale_step: shape[1] as u32,
                })
            }
            Self::Fp8Rows { codes, scales } => {
                // The activations of a row lie in shared memory, and a number for each warp.
                let most = device.arch().shared_memory() as usize / 2 - 512;
                if size_k > most {
                    return Err(ROW.refuse("size_k", size_k, format!("at most {most}")));
                }
                Self::quantized(device, [places, size_k], (codes, scales), [1, places])?;
                Ok(Destination {
                    quantizes: Quantizes::Rows,
                    ue8m0: false,
                    rows: codes.into(),
                    scales: scales.into(),
                    scale_step: 0,
                })
            }
        }
    }

    /// Returns an error unless there is room for codes of all places, and scales have that shape.
    fn quantized(
        device: &Device,
        [places, size_k]: [usize; 2],
        (codes, scales): (&Buffer<u8>, &Buffer<f32>),
        [groups, step]: [usize; 2],
    ) -> Result<(), AccelError> {
        let parts = [("gathered", codes.is_on(device) && scales.is_on(device))];
        check::same_device(&ROW, device, &parts)?;
        if codes.len() / size_k < places || scales.len() != groups * step {
            let found = format!("{} codes, {} scales", codes.len(), scales.len());
            let expected = format!("[{places}, {size_k}] and [{groups}, {step}]");
            return Err(ROW.refuse("gathered", found, expected));
        }
        Ok(())
    }
}

/// Row `place_of[t]` of `gathered`, `size_k` numbers of `dtype`, is made for entry t of the blocks:
/// copied, or by the bits of [`Definition::apply`]; then quantized, if that is asked for. Rows of padding keep their
/// contents.
///
/// Rows of x whose blocks are aligned already are read while the last kernel on the stream may still run: it must not write
/// them, as [`align_on_device`](super::align::align_on_device) does not.
///
/// # Errors
/// [`AccelError::Argument`] where size_k is not a multiple of 8, there are other rows than the blocks'
/// entries are made of, `gathered` is not room for all blocks, or a buffer is of another device; those of
/// preparing and launching the kernel.
pub(crate) fn gather_on_device(
    device: &Device,
    rows: RowSource<'_>,
    dtype: ScalarType,
    size_k: usize,
    blocks: &PlacedBlocks,
    gathered: Gathered<'_>,
) -> Result<(), AccelError> {
    let (entries, places) = (blocks.entries(), blocks.places());
    let (buffer, top_k) = rows.check(device, blocks, size_k)?;
    let parts = [("rows", buffer.is_on(device)), ("blocks", blocks.is_on(device))];
    check::same_device(&ROW, device, &parts)?;
    let is_bf16 = check::is_bf16(&ROW, "dtype", dtype)?;
    let size_k_32 = check::positive(&ROW, "size_k", size_k)?;
    if !size_k.is_multiple_of(8) {
        return Err(ROW.refuse("size_k", size_k, "a multiple of 8"));
    }
    check::columns(&ROW, "size_k", size_k, 8)?;
    let Destination { quantizes, ue8m0, rows: to, scales, scale_step } =
        gathered.check(device, places, size_k)?;
    if entries == 0 || blocks.experts() == 0 {
        return Ok(());
    }
    // Each entry has a place below those of `gathered`, or a negative number. `rows` has entries / top_k rows of size_k
    // or a row of the activation's width for each place; there is a router weight for each entry, and room for one of
    // each place.
    let copied = GatherArguments {
        rows: buffer.into(),
        gathered: to,
        scales,
        scale_step,
        place_of: blocks.place_of().into(),
        // Room for entries, their padding included, is below 2^31.
        entries: entries as u32,
        size_k: size_k_32,
        activation: Activation::default(),
        topk_weights: Pointer::NULL,
        row_weights: Pointer::NULL,
        top_k,
        placing: Placing::default(),
    };
    let pieces = size_k_32 / 8;
    let (activates, grid, arguments) = match rows {
        RowSource::X { weights, placing, .. } => {
            let grid = grid_of_x(quantizes, copied.entries / top_k, pieces);
            let (topk_weights, row_weights) = (weights.of_entries.into(), weights.of_places.into());
            let placing = placing.unwrap_or_default();
            (0, grid, GatherArguments { topk_weights, row_weights, placing, ..copied })
        }
        RowSource::GateUp { activation, .. } => {
            let grid = match quantizes {
                Quantizes::Rows => Grid::whole_rows(copied.entries, pieces),
                _ => Grid::one_thread_each_piece(copied.entries, pieces),
            };
            (1, grid, GatherArguments { activation: activation.into(), ..copied })
        }
    };
    let quantizes = ("QUANTIZES", quantizes as u32);
    let places = ("PLACES", u32::from(arguments.placing.num_runs > 0));
    let ue8m0 = ("IS_UE8M0", ue8m0.into());
    let parameters = [is_bf16, ("ACTIVATES", activates), quantizes, ue8m0, places];
    KERNEL.launch(device, &parameters, grid, arguments)
}

/// The thread blocks for `rows` rows of x.
fn grid_of_x(quantizes: Quantizes, rows: u32, pieces: u32) -> Grid {
    // Up to four pieces to a thread, as evenly as whole warps allow; one where few rows leave multiprocessors free, and
    // more of a row that is quantized as a whole, which has one thread block.
    let (blocks, each) = match quantizes {
        Quantizes::Rows => (1, if rows <= FEW_ROWS { 1 } else { 4 }),
        _ => (pieces.div_ceil(4 * 256), 4),
    };
    let threads = pieces.div_ceil(each * blocks).next_multiple_of(32).min(1024);
    Grid::new((rows, blocks, 1), (threads, 1, 1))
}

#[cfg(test)]
mod tests {
    use super::{MOST_ENTRIES, MOST_EXPERTS, ROW};

    #[test]
    fn the_kernel_has_room_for_what_is_placed() {
        let most = |name| marlinspike_kernels::constant(ROW.source, name, &[]).unwrap() as usize;
        assert!(MOST_ENTRIES <= most("MOST_PLACED") && MOST_EXPERTS <= most("MOST_EXPERTS"));
    }
}
