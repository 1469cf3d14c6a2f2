//! The measurements as JSON and as a table.

use std::fmt::Write as _;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use marlinspike_accel::limits::Limits;
use marlinspike_accel::timing::Times;
use marlinspike_bench::Workload;
use serde::Serialize;

use super::peers::Peer;
use crate::style::{Paint, printable};

/// The JSON object.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    /// Type of the weights.
    pub(super) weights: &'static str,
    /// Type of x.
    pub(super) activations: &'static str,
    /// Replays of each recording.
    pub(super) replays: u32,
    pub(super) results: Vec<Row>,
}

/// The device and its measured limits.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    pub(super) device: String,
    pub(super) compute_capability: String,
    pub(super) multiprocessors: u32,
    pub(super) read_tb_s: f64,
    pub(super) matrix_tflop_s: f64,
    pub(super) matrix_instruction: &'static str,
}

/// A case's measurement.
pub(super) struct Case {
    pub(super) workload: Workload,
    pub(super) tokens: usize,
    pub(super) times: Times,
    /// Least number of bytes that a call moves: weights once, x and y.
    pub(super) bytes: f64,
    /// Mean number of experts that a call of a layer hits.
    pub(super) experts_hit: Option<f64>,
}

/// The resource that sets a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Bound {
    /// Memory bandwidth.
    Read,
    /// Operations of the tensor cores.
    Matrix,
}

/// Another kernel's time of a case.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Other {
    pub(super) peer: String,
    pub(super) us: f64,
    /// Its time over ours.
    pub(super) ratio: f64,
}

/// A case compared with the limits and with other kernels.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) shape: String,
    #[serde(skip)]
    pub(super) workload: Workload,
    pub(super) tokens: usize,
    pub(super) us_median: f64,
    pub(super) us_least: f64,
    pub(super) bytes: f64,
    pub(super) flops: f64,
    pub(super) experts_hit: Option<f64>,
    /// At the median time.
    pub(super) gb_s: f64,
    /// At the median time.
    pub(super) tflop_s: f64,
    /// The resource that sets the limit.
    pub(super) bound: Bound,
    /// Least time by the limits, in microseconds.
    pub(super) us_limit: f64,
    /// Least time by the limits over the median.
    pub(super) of_limit: f64,
    pub(super) peers: Vec<Other>,
}

impl Row {
    pub(super) fn new(case: Case, limits: &Limits, peers: &[Peer]) -> Self {
        let flops = 2.0 * case.workload.macs(case.tokens) as f64;
        let (reading, multiplying) = (case.bytes / limits.read, flops / limits.matrix);
        let bound = if multiplying > reading { Bound::Matrix } else { Bound::Read };
        let us_limit = reading.max(multiplying) * 1e6;
        let us = f64::from(case.times.median);
        let same =
            |peer: &&Peer| peer.workload == Some(case.workload) && peer.tokens == case.tokens;
        let other =
            |peer: &Peer| Other { peer: peer.peer.clone(), us: peer.us, ratio: peer.us / us };
        Self {
            shape: case.workload.to_string(),
            workload: case.workload,
            tokens: case.tokens,
            us_median: us,
            us_least: case.times.least.into(),
            bytes: case.bytes,
            flops,
            experts_hit: case.experts_hit,
            gb_s: case.bytes / us / 1e3,
            tflop_s: flops / us / 1e6,
            bound,
            us_limit,
            of_limit: us_limit / us,
            peers: peers.iter().filter(same).map(other).collect(),
        }
    }
}

impl Report {
    /// The other kernels, in the order of their first result.
    pub(super) fn peers(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for other in self.results.iter().flat_map(|row| &row.peers) {
            if !names.contains(&other.peer.as_str()) {
                names.push(&other.peer);
            }
        }
        names
    }

    /// The report as a table.
    pub(super) fn text(&self, paint: Paint) -> String {
        let m = &self.machine;
        let mut text = format!("{}\n", paint.strong(&printable(&m.device)));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "compute capability {}, {} multiprocessors; reads {:.2} TB/s, {} {:.0} TFLOP/s",
            m.compute_capability,
            m.multiprocessors,
            m.read_tb_s,
            m.matrix_instruction,
            m.matrix_tflop_s
        );
        let _ = writeln!(
            text,
            "{} weights, {} activations; median and fastest of {} replays; others: median, and \
             its ratio to ours\n",
            self.weights, self.activations, self.replays
        );
        let _ = writeln!(text, "{}", self.table());
        text
    }

    fn table(&self) -> Table {
        let peers = self.peers();
        let mut table = Table::new();
        table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        let mut header: Vec<String> = [
            "shape",
            "M",
            "experts",
            "µs",
            "fastest",
            "GB/s",
            "TFLOP/s",
            "FLOP/byte",
            "limit µs",
            "by",
            "of limit",
        ]
        .map(str::to_owned)
        .to_vec();
        header.extend(peers.iter().map(|peer| printable(peer).into_owned()));
        table.set_header(header);
        for row in &self.results {
            let mut cells = vec![
                row.shape.clone(),
                row.tokens.to_string(),
                row.experts_hit.map_or_else(String::new, |hit| format!("{hit:.1}")),
                time(row.us_median),
                time(row.us_least),
                format!("{:.0}", row.gb_s),
                format!("{:.1}", row.tflop_s),
                format!("{:.1}", row.flops / row.bytes),
                time(row.us_limit),
                match row.bound {
                    Bound::Read => "read".to_owned(),
                    Bound::Matrix => "matrix".to_owned(),
                },
                format!("{:.0} %", row.of_limit * 100.0),
            ];
            cells.extend(peers.iter().map(|name| {
                let found = row.peers.iter().find(|other| other.peer == *name);
                found.map_or_else(
                    || "-".to_owned(),
                    |other| format!("{} ({:.2})", time(other.us), other.ratio),
                )
            }));
            table.add_row(cells);
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            column.set_cell_alignment(match index {
                0 | 9 => CellAlignment::Left,
                _ => CellAlignment::Right,
            });
        }
        table
    }
}

/// Microseconds with three significant digits, or rounded to an integer if that has more.
fn time(us: f64) -> String {
    let digits = if us < 10.0 { 2 } else { usize::from(us < 1000.0) };
    format!("{us:.digits$}")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A report of a device that reads 4 TB/s and computes 800 TFLOP/s.
    pub(in super::super) fn sample() -> Report {
        let limits = Limits { read: 4e12, matrix: 8e14, instruction: "wgmma m64n256k16 bf16" };
        let dense = Workload::Dense { size_k: 4096, size_n: 28672 };
        let moe =
            Workload::Moe { num_experts: 128, top_k: 8, hidden_size: 2048, intermediate_size: 768 };
        let peer = |peer: &str, workload, tokens, us| -> Peer {
            let text = format!(
                r#"{{"peer": "{peer}", "shape": "{workload}", "tokens": {tokens}, "us": {us}}}"#
            );
            let mut peer: Peer = serde_json::from_str(&text).unwrap();
            peer.workload = Some(workload);
            peer
        };
        let peers = [
            peer("cublas-bf16", dense, 1, 58.0),
            peer("vllm-marlin", dense, 1, 28.0),
            peer("cublas-bf16", dense, 4096, 1219.0),
            peer("vllm-marlin", dense, 4096, 2784.0),
            peer("vllm-marlin-moe", moe, 16, 103.0),
        ];
        let case = |workload, tokens, median: f32, bytes, experts_hit| {
            let times = Times { median, least: median * 0.98 };
            Row::new(Case { workload, tokens, times, bytes, experts_hit }, &limits, &peers)
        };
        let results = vec![
            case(dense, 1, 20.0, 60.6e6, None),
            case(dense, 64, 63.0, 64.8e6, None),
            case(dense, 4096, 1500.0, 329e6, None),
            case(moe, 1, 20.0, 19.5e6, Some(8.0)),
            case(moe, 16, 80.0, 2.1e8, Some(83.0)),
        ];
        let machine = Machine {
            device: "NVIDIA H200".into(),
            compute_capability: "9.0".into(),
            multiprocessors: 132,
            read_tb_s: 4.0,
            matrix_tflop_s: 800.0,
            matrix_instruction: limits.instruction,
        };
        Report { machine, weights: "uint4b8", activations: "bf16", replays: 7, results }
    }

    #[test]
    fn rows_follow_from_times_and_limits() {
        let report = sample();
        let row = &report.results[0];
        // 2 · 4096 · 28672 operations; 60.6 MB at 4 TB/s take 15.15 µs of the 20.
        assert_eq!(row.flops, 234_881_024.0);
        assert_eq!(row.bound, Bound::Read);
        assert!((row.us_limit - 15.15).abs() < 1e-9 && (row.of_limit - 0.7575).abs() < 1e-9);
        assert!((row.gb_s - 3030.0).abs() < 1e-9 && (row.tflop_s - 11.744_051_2).abs() < 1e-9);
        let ratios: Vec<f64> = row.peers.iter().map(|other| other.ratio).collect();
        assert_eq!(ratios, [2.9, 1.4]);
        // 962 GFLOP at 800 TFLOP/s take longer than 329 MB.
        let row = &report.results[2];
        assert_eq!(row.bound, Bound::Matrix);
        assert!((row.us_limit - 1_202.590_842_88).abs() < 1e-6, "{}", row.us_limit);
        // Three matrices for each of eight experts.
        assert_eq!(report.results[3].flops, 2.0 * 8.0 * 3.0 * 2048.0 * 768.0);
        assert_eq!(report.peers(), ["cublas-bf16", "vllm-marlin", "vllm-marlin-moe"]);
    }

    #[test]
    fn the_table_has_a_column_for_each_peer() {
        let text = sample().text(Paint { on: false });
        assert!(text.contains("reads 4.00 TB/s, wgmma m64n256k16 bf16 800 TFLOP/s"), "{text}");
        let line = |start: &str| text.lines().find(|line| line.trim_start().starts_with(start));
        let header = line("shape").unwrap();
        let last = header.split_whitespace().last();
        assert!(header.contains("cublas-bf16") && last == Some("vllm-marlin-moe"), "{header}");
        let first = line("4096x28672").unwrap();
        assert!(first.contains("58.0 (2.90)") && first.contains("28.0 (1.40)"), "{first}");
        assert!(line("qwen3-30b-a3b").unwrap().contains(" 8.0 "), "{text}");
        assert_eq!([time(2.34567), time(23.4567), time(2345.67)], ["2.35", "23.5", "2346"]);
    }
}
