//! The measurements as JSON and as a table.

use std::fmt::Write as _;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use marlinspike::num::dims::GroupSize;
use marlinspike_bench::limits::{Bound, Limits};
use marlinspike_bench::{Seconds, Workload};
use serde::Serialize;

use crate::style::{Paint, printable};

/// The JSON object.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    /// One for each number of threads.
    pub(super) limits: Vec<Limits>,
    pub(super) results: Vec<Row>,
}

/// The machine.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    pub(super) cpu: String,
    /// Bytes; 0 where unknown.
    pub(super) last_level_cache: usize,
    pub(super) kernel: String,
    /// The instruction whose rate is the limit; null for kernels without intrinsics.
    pub(super) instruction: Option<&'static str>,
    pub(super) pinned: bool,
}

/// A case's measurement.
pub(super) struct Case {
    pub(super) shape: Workload,
    pub(super) group: GroupSize,
    pub(super) tokens: usize,
    pub(super) threads: usize,
    /// Bytes of the weights that calls cycle through.
    pub(super) weight_bytes: usize,
    /// Bytes of weights that a call reads.
    pub(super) bytes_read: f64,
    pub(super) seconds: Seconds,
}

/// A case compared with the limits.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    shape: String,
    /// −1: one scale per channel.
    group_size: i64,
    tokens: usize,
    threads: usize,
    weight_bytes: usize,
    bytes_read: f64,
    macs: u64,
    seconds: Seconds,
    /// In the best call.
    gb_s: f64,
    /// In the best call.
    gmac_s: f64,
    /// The resource that sets the limit.
    bound: Bound,
    /// Least time by the limits over the best call's time.
    of_limit_best: f64,
    /// Least time by the limits over the median call's time.
    of_limit_median: f64,
}

impl Row {
    /// `limits` must contain an entry for the case's number of threads.
    pub(super) fn new(case: Case, limits: &[Limits]) -> Self {
        let macs = case.shape.macs(case.tokens);
        let limits = limits.iter().find(|l| l.threads == case.threads);
        let (floor, bound) = limits
            .map_or((f64::NAN, Bound::Read), |limits| limits.floor(case.bytes_read, macs as f64));
        let best = case.seconds.best;
        Self {
            shape: case.shape.to_string(),
            group_size: case.group.to_config(),
            tokens: case.tokens,
            threads: case.threads,
            weight_bytes: case.weight_bytes,
            bytes_read: case.bytes_read,
            macs,
            seconds: case.seconds,
            gb_s: case.bytes_read / 1e9 / best,
            gmac_s: macs as f64 / 1e9 / best,
            bound,
            of_limit_best: floor / best,
            of_limit_median: floor / case.seconds.median,
        }
    }
}

impl Report {
    /// The report as a table.
    pub(super) fn text(&self, paint: Paint) -> String {
        let Machine { cpu, kernel, instruction, pinned, .. } = &self.machine;
        let mut text = format!("{}\n", paint.strong(&printable(cpu)));
        let how = if *pinned { "pinned threads" } else { "threads not pinned" };
        let _ = writeln!(text, "kernel {kernel}, {how}; best / median\n");
        for limits in &self.limits {
            let threads = plural(limits.threads);
            let read = limits.read_gb_s;
            let _ = write!(text, "{threads}: reads {:.1} / {:.1} GB/s", read.best, read.median);
            if let (Some(rate), Some(name)) = (limits.gmac_s, instruction) {
                let _ = write!(text, ", {name} {:.0} / {:.0} GMAC/s", rate.best, rate.median);
            }
            text.push('\n');
        }
        let _ = write!(text, "\n{}\n", self.table());
        text
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header([
            "shape",
            "group",
            "tokens",
            "threads",
            "ms best",
            "ms median",
            "GB/s",
            "GMAC/s",
            "limit",
            "of limit best",
            "median",
        ]);
        for row in &self.results {
            let group = match row.group_size {
                -1 => "channel".to_owned(),
                g => g.to_string(),
            };
            let bound = match row.bound {
                Bound::Read => "read",
                Bound::Multiply => "multiply",
            };
            table.add_row([
                row.shape.clone(),
                group,
                row.tokens.to_string(),
                row.threads.to_string(),
                format!("{:.3}", row.seconds.best * 1e3),
                format!("{:.3}", row.seconds.median * 1e3),
                format!("{:.1}", row.gb_s),
                format!("{:.1}", row.gmac_s),
                bound.to_owned(),
                format!("{:.0} %", row.of_limit_best * 100.0),
                format!("{:.0} %", row.of_limit_median * 100.0),
            ]);
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            let alignment = match index {
                0 | 8 => CellAlignment::Left,
                _ => CellAlignment::Right,
            };
            column.set_cell_alignment(alignment);
        }
        table
    }
}

fn plural(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}
