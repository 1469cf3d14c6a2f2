//! Calls of ggml through `calls.c`.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{self, NonNull};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use marlinspike_bench::ours::copies;
use marlinspike_bench::routing::Routing;
use marlinspike_bench::tile::Tile;
use marlinspike_bench::{Contender, Workload};

use super::{BLOCK_BYTES, GROUP, q4_0};

/// `struct peer`, an opaque C type.
#[repr(C)]
struct Peer {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn peer_dense(
        threads: c_int,
        cpus: *const c_int,
        buffer: *const c_char,
        k: i64,
        n: i64,
        copies: c_int,
        tokens: i64,
    ) -> *mut Peer;
    fn peer_moe(
        threads: c_int,
        cpus: *const c_int,
        experts: i64,
        top_k: i64,
        h: i64,
        inner: i64,
        tokens: i64,
    ) -> *mut Peer;
    fn peer_free(peer: *mut Peer);
    fn peer_matrix_bytes(peer: *const Peer, matrix: c_int) -> usize;
    fn peer_set_matrix(peer: *mut Peer, matrix: c_int, blocks: *const c_void);
    fn peer_set_x(peer: *mut Peer, x: *const f32);
    fn peer_set_routing(peer: *mut Peer, ids: *const i32, weights: *const f32);
    fn peer_run(peer: *mut Peer, at: c_int) -> c_int;
    fn peer_out_len(peer: *const Peer, at: c_int) -> usize;
    fn peer_get_out(peer: *mut Peer, at: c_int, out: *mut f32);
    fn peer_pause(peer: *mut Peer);
    fn peer_resume(peer: *mut Peer);
}

/// A workload on repacked weights. Not `Send`: the thread that created it is one of ggml's.
#[derive(Debug)]
pub struct Ggml {
    peer: NonNull<Peer>,
    graphs: usize,
    /// Of a layer: experts of each call.
    routings: Vec<Routing>,
}

impl Ggml {
    /// The workload on the weights of `tiles` (groups of 32) in the buffer type `buffer`, and rows `x` `[T, ..]`, with as many
    /// threads as `cpus` has, each pinned if `pinned`, the calling one to the last.
    ///
    /// # Errors
    /// When ggml has no repacking for this CPU or no memory.
    pub fn new(
        workload: Workload,
        buffer: &CStr,
        tiles: &[Tile],
        cold_bytes: usize,
        x: &[f32],
        routings: Vec<Routing>,
        cpus: &[usize],
        pinned: bool,
    ) -> Result<Self> {
        let tokens = (x.len() / workload.sizes()[0]) as i64;
        let ids: Vec<c_int> = cpus.iter().map(|&cpu| cpu as c_int).collect();
        let at = if pinned { ids.as_ptr() } else { ptr::null() };
        let threads = ids.len() as c_int;
        let layer = matches!(workload, Workload::Moe { .. });
        ensure!(!layer || buffer == c"CPU_REPACK", "ggml: a layer in a buffer type without ids");
        let graphs = match workload {
            Workload::Dense { size_k, size_n } => {
                copies(cold_bytes, size_k / GROUP * BLOCK_BYTES * size_n)
            }
            Workload::Moe { .. } => 1,
        };
        let peer = match workload {
            Workload::Dense { size_k, size_n } => {
                let (k, n) = (size_k as i64, size_n as i64);
                let buffer = buffer.as_ptr();
                // SAFETY: `at` is null or has `threads` numbers; `buffer` is a C string; sizes are
                // positive.
                unsafe { peer_dense(threads, at, buffer, k, n, graphs as c_int, tokens) }
            }
            Workload::Moe { num_experts, top_k, hidden_size, intermediate_size } => {
                let [e, j, h, i] =
                    [num_experts, top_k, hidden_size, intermediate_size].map(|size| size as i64);
                // SAFETY: as above.
                unsafe { peer_moe(threads, at, e, j, h, i, tokens) }
            }
        };
        let peer = NonNull::new(peer).context("ggml: no repacking for this CPU, or no memory")?;
        let mut this = Self { peer, graphs, routings };
        match workload {
            Workload::Dense { .. } => {
                (0..graphs).try_for_each(|copy| this.set(copy, &tiles[0], copy..copy + 1))?;
            }
            Workload::Moe { num_experts, .. } => {
                this.set(0, &tiles[0], 0..num_experts)?;
                this.set(1, &tiles[1], 0..num_experts)?;
            }
        }
        // SAFETY: ggml copies the T · K or T · H floats of its x, which `tokens` came from.
        unsafe { peer_set_x(this.peer.as_ptr(), x.as_ptr()) };
        for number in 0..graphs {
            this.call(number)?;
        }
        this.pause();
        Ok(this)
    }

    /// Fills ggml's matrix with matrices of the tile's columns.
    fn set(&mut self, matrix: usize, tile: &Tile, numbers: std::ops::Range<usize>) -> Result<()> {
        let columns: Vec<_> = (0..tile.columns()).map(|column| q4_0(tile, column)).collect();
        let places = numbers.flat_map(|number| (0..tile.shape().size_n).map(move |n| (number, n)));
        let bytes: Vec<u8> =
            places.flat_map(|(number, n)| &columns[tile.column(number, n)]).copied().collect();
        // SAFETY: the peer is alive, and has as many matrices as it was made with.
        let expected = unsafe { peer_matrix_bytes(self.peer.as_ptr(), matrix as c_int) };
        ensure!(bytes.len() == expected, "ggml: matrix of {expected} bytes, not {}", bytes.len());
        // SAFETY: as above; ggml reads as many bytes as the matrix has.
        unsafe { peer_set_matrix(self.peer.as_ptr(), matrix as c_int, bytes.as_ptr().cast()) };
        Ok(())
    }

    fn call(&mut self, number: usize) -> Result<()> {
        let (peer, graph) = (self.peer.as_ptr(), (number % self.graphs) as c_int);
        if !self.routings.is_empty() {
            let Routing { topk_ids, topk_weights, .. } =
                &self.routings[number % self.routings.len()];
            // SAFETY: the peer is alive; both have top_k entries for each of its tokens.
            unsafe { peer_set_routing(peer, topk_ids.as_ptr(), topk_weights.as_ptr()) };
        }
        // SAFETY: the peer is alive and has the graph; its inputs have been set.
        let done = unsafe { peer_run(peer, graph) == 0 };
        ensure!(done, "ggml: the graph failed");
        Ok(())
    }

    /// The result of call `number`, row-major.
    ///
    /// # Errors
    /// When the graph fails.
    pub fn output(&mut self, number: usize) -> Result<Vec<f32>> {
        self.resume();
        self.call(number)?;
        self.pause();
        let graph = (number % self.graphs) as c_int;
        // SAFETY: the peer is alive and has the graph.
        let mut out = vec![0f32; unsafe { peer_out_len(self.peer.as_ptr(), graph) }];
        // SAFETY: as above; as many floats are written as the result has.
        unsafe { peer_get_out(self.peer.as_ptr(), graph, out.as_mut_ptr()) };
        Ok(out)
    }

    fn pause(&mut self) {
        // SAFETY: the peer is alive, and no graph is running.
        unsafe { peer_pause(self.peer.as_ptr()) }
    }

    fn resume(&mut self) {
        // SAFETY: the peer is alive.
        unsafe { peer_resume(self.peer.as_ptr()) }
    }
}

impl Contender for Ggml {
    fn burst(&mut self, first: usize, calls: usize, seconds: &mut Vec<f64>) {
        self.resume();
        for number in first..first + calls {
            let start = Instant::now();
            self.call(number).expect("a graph that succeeded before");
            seconds.push(start.elapsed().as_secs_f64());
        }
        self.pause();
    }
}

impl Drop for Ggml {
    fn drop(&mut self) {
        self.resume();
        // SAFETY: the peer is alive, and nothing uses it afterwards.
        unsafe { peer_free(self.peer.as_ptr()) }
    }
}
