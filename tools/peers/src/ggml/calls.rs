//! Calls of ggml through `calls.c`.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use marlinspike_bench::ours::copies;
use marlinspike_bench::routing::Routing;
use marlinspike_bench::tile::Tile;
use marlinspike_bench::{Contender, Workload};

use super::{Configuration, Format, q4_0};
use crate::mxfp4;

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
        weights: c_int,
        k: i64,
        n: i64,
        copies: c_int,
        tokens: i64,
    ) -> *mut Peer;
    fn peer_moe(
        threads: c_int,
        cpus: *const c_int,
        buffer: *const c_char,
        weights: c_int,
        experts: i64,
        top_k: i64,
        h: i64,
        inner: i64,
        tokens: i64,
    ) -> *mut Peer;
    fn peer_free(peer: *mut Peer);
    fn peer_row_bytes(weights: c_int, k: i64) -> usize;
    fn peer_quantize(weights: c_int, rows: *const f32, blocks: *mut c_void, count: i64, k: i64);
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

/// A workload. Not `Send`: the thread that created it is one of ggml's.
#[derive(Debug)]
pub struct Ggml {
    peer: NonNull<Peer>,
    graphs: usize,
    /// Of a layer: experts of each call.
    routings: Vec<Routing>,
}

/// A tile's columns in blocks of a format.
struct Rows<'t> {
    tile: &'t Tile,
    format: Format,
    blocks: Vec<Vec<u8>>,
}

impl<'t> Rows<'t> {
    fn new(tile: &'t Tile, format: Format) -> Result<Self> {
        let (k, ty) = (tile.shape().size_k, format as c_int);
        // SAFETY: the format is one of ggml's types.
        let len = unsafe { peer_row_bytes(ty, k as i64) };
        ensure!(len > 0, "ggml: K {k} has no whole blocks of {format:?}");
        let one = |column| match format {
            Format::Q4_0 => q4_0(tile, column),
            Format::Mxfp4 => mxfp4::ggml_blocks(tile, column),
            Format::Q4K | Format::Iq4Xs => {
                let floats: Vec<f32> = tile.floats(column).collect();
                let mut blocks = vec![0u8; len];
                // SAFETY: one row of k floats, and as many bytes as its blocks have.
                unsafe {
                    peer_quantize(ty, floats.as_ptr(), blocks.as_mut_ptr().cast(), 1, k as i64);
                }
                blocks
            }
        };
        Ok(Self { tile, format, blocks: (0..tile.columns()).map(one).collect() })
    }

    /// Column `n` of matrix `number`.
    fn row(&self, number: usize, n: usize) -> &[u8] {
        &self.blocks[match self.format {
            Format::Mxfp4 => mxfp4::column(self.tile, number, n),
            _ => self.tile.column(number, n),
        }]
    }
}

impl Ggml {
    /// The workload on the weights of `tiles` (groups of 32) and rows `x` `[T, ..]`, with as many threads as
    /// `cpus` has, each pinned if `pinned`, the calling one to the last.
    ///
    /// # Errors
    /// When ggml has no such buffer type on this CPU, or no memory.
    pub fn new(
        workload: Workload,
        configuration: Configuration,
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
        let (weights, buffer) = (configuration.weights as c_int, configuration.buffer.as_ptr());
        let graphs = match workload {
            Workload::Dense { size_k, size_n } => {
                // SAFETY: the format is one of ggml's types.
                copies(cold_bytes, unsafe { peer_row_bytes(weights, size_k as i64) } * size_n)
            }
            Workload::Moe { .. } => 1,
        };
        let peer = match workload {
            Workload::Dense { size_k, size_n } => {
                let (k, n) = (size_k as i64, size_n as i64);
                // SAFETY: `at` is null or has `threads` numbers; `buffer` is a C string; sizes are
                // positive, and K has whole blocks of the format.
                unsafe { peer_dense(threads, at, buffer, weights, k, n, graphs as c_int, tokens) }
            }
            Workload::Moe { num_experts, top_k, hidden_size, intermediate_size } => {
                let [e, j, h, i] =
                    [num_experts, top_k, hidden_size, intermediate_size].map(|size| size as i64);
                // SAFETY: as above.
                unsafe { peer_moe(threads, at, buffer, weights, e, j, h, i, tokens) }
            }
        };
        let peer = NonNull::new(peer).context("ggml: no such buffer on this CPU, or no memory")?;
        let mut this = Self { peer, graphs, routings };
        let format = configuration.weights;
        match workload {
            Workload::Dense { size_n, .. } => {
                let rows = Rows::new(&tiles[0], format)?;
                (0..graphs)
                    .try_for_each(|copy| this.set(copy, &rows, copy..copy + 1, 0..size_n))?;
            }
            Workload::Moe { num_experts: e, hidden_size: h, intermediate_size: i, .. } => {
                let [w13, w2] = [&tiles[0], &tiles[1]].map(|tile| Rows::new(tile, format));
                let (w13, w2) = (w13?, w2?);
                match format {
                    Format::Mxfp4 => {
                        this.set(0, &w13, 0..e, 0..i)?;
                        this.set(1, &w13, 0..e, i..2 * i)?;
                        this.set(2, &w2, 0..e, 0..h)?;
                    }
                    _ => {
                        this.set(0, &w13, 0..e, 0..2 * i)?;
                        this.set(1, &w2, 0..e, 0..h)?;
                    }
                }
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

    /// Fills ggml's matrix with these columns of each of the numbered matrices.
    fn set(
        &mut self,
        matrix: usize,
        rows: &Rows<'_>,
        numbers: Range<usize>,
        columns: Range<usize>,
    ) -> Result<()> {
        let mut bytes = Vec::new();
        for number in numbers {
            columns.clone().for_each(|n| bytes.extend_from_slice(rows.row(number, n)));
        }
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
