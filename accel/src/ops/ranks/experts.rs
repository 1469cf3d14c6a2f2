//! Expert layers over ranks: each has some of the experts, whole, and all tokens.

use super::{Rank, Started, grid};
use crate::{
    device::Device,
    error::AccelError,
    launch::{Arguments, Kernel, Pointer, Ranks, arguments},
    memory::Buffer,
    nvrtc::Parameter,
    operation::{Law, Mutant, Needs, Row, lattice},
    ops::{MarlinLayer, Workspace, align::PlacedBlocks, check},
};

/// Upstream: the combine step of expert parallelism.
pub(crate) static ROW: Row = Row {
    name: "moe_sum_ranks",
    source: "moe_sum_ranks",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| {
        Ok(lattice(&[("IS_BF16", &[0, 1]), ("RANKS", &[1, 2, 4, 8]), ("SHOTS", &[1, 2])]))
    },
    arguments: SumArguments::SIZES,
    mutants: &[
        Mutant::new(
            "slots in the order of ranks",
            "for (unsigned j = 0; j < top_k; j += AT_ONCE) {",
            "for (unsigned i = 0; i < RANKS * WARP; i += AT_ONCE) {\n            const unsigned j = i % WARP, \
             here = __ballot_sync(ALL_LANES, slot.rank == i / WARP);",
        ),
        Mutant::new("the owner's experts alone", "slot.rank < RANKS", "slot.rank == ranks.rank"),
    ],
};

static KERNEL: Kernel<SumArguments> = Kernel::early(&ROW);

arguments! {
    /// Arguments of `moe_sum_ranks.cu`.
    SumArguments {
        ranks: Ranks,
        down: Pointer,
        y: Pointer,
        topk_ids: Pointer,
        rank_of: Pointer,
        place_of: Pointer,
        tokens: u32,
        top_k: u32,
        size_n: u32,
        num_experts: u32,
        capacity: u64,
        limit_ms: u32,
    }
}

/// Slots of a token: a lane of a warp for each.
const MOST_SLOTS: usize = 32;
/// More bytes that a rank may read in one shot than in two: a barrier takes as long.
const ONE_SHOT_BYTES: usize = 1_000_000;

/// Sizes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slots {
    tokens: usize,
    top_k: usize,
    hidden: usize,
}

/// What a call sums up.
#[derive(Default)]
struct Sum {
    down: Pointer,
    y: Pointer,
    topk_ids: Pointer,
    rank_of: Pointer,
    place_of: Pointer,
    tokens: u32,
    top_k: u32,
    size_n: u32,
    num_experts: u32,
}

impl Rank {
    /// Starts a call: the rows of the slots whose experts are on this rank, in `work`.
    ///
    /// # Errors
    /// As [`MarlinLayer::forward`]; [`AccelError::Argument`] also for a layer without the ranks of its experts
    /// ([`MarlinLayer::with_ranks`]) or of another rank, for more tokens than the capacity has room for, and for
    /// a call that was started and not added.
    pub fn compute_experts(
        &mut self,
        device: &Device,
        layer: &MarlinLayer,
        x: &Buffer<u16>,
        routing: (&Buffer<i32>, &Buffer<f32>),
        work: &mut Workspace,
    ) -> Result<(), AccelError> {
        self.check_device(device)?;
        self.check_idle()?;
        self.check_layer(layer)?;
        let (hidden, top_k) = (layer.hidden_size(), work.top_k());
        let tokens = x.len() / hidden;
        if top_k > MOST_SLOTS {
            return Err(ROW.refuse("top_k", top_k, format!("at most {MOST_SLOTS}")));
        }
        // 16-bit rows of slots take the place of f32 sums.
        let share = tokens.div_ceil(self.shared.ranks());
        let needed = [Some(tokens), share.checked_mul(top_k).map(|rows| rows.div_ceil(2))];
        let needed = needed.map(|rows| rows.and_then(|rows| rows.checked_mul(hidden)));
        let capacity = self.shared.region.capacity;
        if !needed.iter().all(|needed| needed.is_some_and(|needed| needed <= capacity)) {
            let found = format!("{tokens} tokens of {top_k} slots of {hidden}");
            let expected = format!("room for {needed:?} in a capacity of {capacity}");
            return Err(ROW.refuse("tokens", found, expected));
        }
        layer.compute_slots(device, x, routing.0, routing.1, work)?;
        self.started = Some(Started::Experts(Slots { tokens, top_k, hidden }));
        Ok(())
    }

    /// Ends a call: y `[M, H]` of all ranks' slots, on every rank: the bits of one device's
    /// [`MarlinLayer::forward`] with all experts. `topk_ids` and `work` are those of
    /// [`compute_experts`](Self::compute_experts). Waits on the device for all ranks.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a y or ids of another size, and without a call of `compute_experts`; those of
    /// preparing and running a kernel. A rank that does not come is an error of [`check`](Self::check).
    pub fn add_experts(
        &mut self,
        device: &Device,
        layer: &MarlinLayer,
        topk_ids: &Buffer<i32>,
        work: &Workspace,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        self.check_device(device)?;
        let is_bf16 = check::is_bf16(&ROW, "dtype", layer.dtype())?;
        let rank_of = self.check_layer(layer)?;
        let Some(Started::Experts(slots)) = self.started else {
            let found = format!("{} elements", y.len());
            return Err(ROW.refuse("y", found, "a call of `compute_experts` before"));
        };
        let Slots { tokens, top_k, hidden } = slots;
        let (down, blocks) = work.slots();
        let entries = tokens * top_k;
        let has_all = match blocks {
            None => down.len() == entries * hidden,
            Some(all) => all.entries() == entries && down.len() / hidden >= all.places(),
        };
        if (layer.hidden_size(), work.top_k()) != (hidden, top_k) || !has_all {
            let found = format!("{} elements, {} slots per token", down.len(), work.top_k());
            return Err(ROW.refuse("work", found, format!("that of the computed {slots:?}")));
        }
        let parts = [
            ("topk_ids", topk_ids.is_on(device)),
            ("rank_of", rank_of.is_on(device)),
            ("work", down.is_on(device)),
            ("y", y.is_on(device)),
        ];
        check::same_device(&ROW, device, &parts)?;
        if (y.len(), topk_ids.len()) != (tokens * hidden, entries) {
            let found = format!("{} elements, {} ids", y.len(), topk_ids.len());
            return Err(ROW.refuse(
                "y",
                found,
                format!("[{tokens}, {hidden}], [{tokens}, {top_k}]"),
            ));
        }
        check::columns(&ROW, "size_n", hidden, 8)?;
        self.started = None;
        if tokens == 0 {
            return Ok(());
        }
        self.turn = (self.turn + 1) % 2;
        // Tokens times slots were below 2^31 in the workspace, and hidden in the weight; there are at most 8192 experts.
        let sum = Sum {
            down: down.into(),
            y: y.into(),
            topk_ids: topk_ids.into(),
            rank_of: rank_of.into(),
            place_of: blocks.map(PlacedBlocks::place_of).into(),
            tokens: tokens as u32,
            top_k: top_k as u32,
            size_n: hidden as u32,
            num_experts: rank_of.len() as u32,
        };
        let shots = 1 + u32::from(!self.is_one_shot(slots));
        self.launch_sum(device, is_bf16, shots, sum)
    }

    /// Whether every rank reads the slots of all tokens. Owners' sums are a second transfer and a second barrier, but
    /// fewer bytes, unless a token has few slots.
    fn is_one_shot(&self, slots: Slots) -> bool {
        let Slots { tokens, top_k, hidden } = slots;
        let (ranks, bytes) = (self.shared.ranks(), 2 * tokens * hidden);
        // Of all ranks but one.
        let more =
            (bytes * top_k).saturating_sub(bytes * (top_k + ranks) / ranks) / ranks * (ranks - 1);
        let fits = bytes * top_k <= 4 * self.shared.region.capacity;
        fits && !self.two_shot.unwrap_or(more > ONE_SHOT_BYTES)
    }

    /// Loads the kernel of [`add_experts`](Self::add_experts).
    pub(super) fn load_sum(
        &self,
        device: &Device,
        is_bf16: Parameter,
        shots: u32,
    ) -> Result<(), AccelError> {
        self.launch_sum(device, is_bf16, shots, Sum { size_n: 8, ..Sum::default() })
    }

    fn launch_sum(
        &self,
        device: &Device,
        is_bf16: Parameter,
        shots: u32,
        sum: Sum,
    ) -> Result<(), AccelError> {
        let Sum { down, y, topk_ids, rank_of, place_of, tokens, top_k, size_n, num_experts } = sum;
        // The capacity has room for the slots of a share and for y. There is an id, a rank and a row of `down`, or a
        // place of one, for each slot; ids beyond the experts are not looked up. Without tokens nothing is read.
        let arguments = SumArguments {
            ranks: self.shared.arguments(self.rank, self.turn),
            down,
            y,
            topk_ids,
            rank_of,
            place_of,
            tokens,
            top_k,
            size_n,
            num_experts,
            capacity: self.shared.region.capacity as u64,
            limit_ms: self.limit_ms(),
        };
        let parameters = [is_bf16, ("RANKS", self.shared.ranks() as u32), ("SHOTS", shots)];
        let elements = tokens as usize * top_k as usize * size_n as usize;
        KERNEL.launch(device, &parameters, grid(self.shared.ranks(), elements), arguments)
    }

    /// The ranks of the layer's experts, if the layer is this rank's.
    fn check_layer<'a>(&self, layer: &'a MarlinLayer) -> Result<&'a Buffer<i32>, AccelError> {
        match layer.ranks() {
            Some(of) if of.rank == self.rank && of.ranks <= self.shared.ranks() => Ok(&of.rank_of),
            of => {
                let found = of.map(|of| format!("experts of rank {} of {}", of.rank, of.ranks));
                let expected = format!("those of {self:?}: MarlinLayer::with_ranks");
                Err(ROW.refuse("layer", found.unwrap_or_else(|| "no ranks".into()), expected))
            }
        }
    }
}
