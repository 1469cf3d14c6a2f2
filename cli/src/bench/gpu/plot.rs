//! The roofline as an SVG: operations per second against operations per byte, on logarithmic scales,
//! below the device's limits. Products and layers have a panel each.

use std::fmt::Write as _;

use marlinspike_bench::Workload;

use super::report::{Report, Row};
use crate::style::printable;

/// Size of a panel's plot.
const WIDTH: f64 = 520.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 76.0;
const GAP: f64 = 60.0;
const BELOW: f64 = 50.0;
/// Height of a line of the legend.
const LINE: f64 = 20.0;

/// A palette that colour-blind readers can distinguish (Okabe and Ito).
const COLOURS: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8f7a00", "#56b4e9", "#444444"];

const STYLE: &str = "\
text{font:12px system-ui,sans-serif;fill:#1c2128}\
.title{font-size:16px;font-weight:600}.panel{font-size:13px;font-weight:600}\
.soft{fill:#5b6672}.x{text-anchor:middle}.y{text-anchor:end}\
.grid{stroke:#d9dee5;stroke-width:1;fill:none}.frame{stroke:#5b6672;fill:none}\
.roof{stroke:#1c2128;stroke-width:2;fill:none}\
.ours{stroke-width:1.5;fill:none}.other{fill:#fff;stroke-width:1.5}";

/// Exponents of the powers of ten that enclose `low` and `high`.
fn decades(low: f64, high: f64) -> [i32; 2] {
    let from = low.log10().floor() as i32;
    [from, (high.log10().ceil() as i32).max(from + 1)]
}

/// Both axes of the panels.
struct Axes {
    x: [i32; 2],
    y: [i32; 2],
}

impl Axes {
    fn new(report: &Report) -> Self {
        let roof = report.machine.matrix_tflop_s;
        let (mut x, mut y) = ([f64::INFINITY, 0f64], [f64::INFINITY, roof]);
        for row in &report.results {
            let slowest = row.peers.iter().map(|other| other.ratio).fold(1.0, f64::max);
            x = [x[0].min(row.flops / row.bytes), x[1].max(row.flops / row.bytes)];
            y = [y[0].min(row.tflop_s / slowest), y[1].max(row.tflop_s)];
        }
        // An empty plot shows the ridge point of the roofline.
        let corner = roof / report.machine.read_tb_s;
        x = [x[0].min(corner), x[1].max(corner)];
        y[0] = y[0].min(roof / 10.0);
        Self { x: decades(x[0], x[1]), y: decades(y[0], y[1] * 1.02) }
    }

    fn x(&self, intensity: f64) -> f64 {
        let [low, high] = self.x.map(f64::from);
        WIDTH * (intensity.log10() - low) / (high - low)
    }

    fn y(&self, tflop_s: f64) -> f64 {
        let [low, high] = self.y.map(f64::from);
        HEIGHT * (high - tflop_s.log10()) / (high - low)
    }
}

/// The label of a power of ten.
fn power(exponent: i32) -> String {
    let digits = usize::try_from(-exponent).unwrap_or(0);
    format!("{:.digits$}", 10f64.powi(exponent))
}

/// The path of the marker of the `which`th other kernel, centred on a point.
fn mark(which: usize, x: f64, y: f64) -> String {
    match which % 4 {
        0 => format!("M{:.1} {:.1}h8v8h-8z", x - 4.0, y - 4.0),
        1 => format!("M{x:.1} {:.1}l5 9h-10z", y - 5.5),
        2 => format!("M{x:.1} {:.1}l5 5l-5 5l-5 -5z", y - 5.0),
        _ => format!("M{x:.1} {:.1}l-5 -9h10z", y + 5.5),
    }
}

/// `text` escaped for XML.
fn escaped(text: &str) -> String {
    printable(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The complete SVG.
pub(super) fn roofline(report: &Report) -> String {
    let axes = Axes::new(report);
    let is_dense = |row: &&Row| matches!(row.workload, Workload::Dense { .. });
    let (dense, layers): (Vec<&Row>, Vec<&Row>) = report.results.iter().partition(is_dense);
    let panels: Vec<(&str, Vec<&Row>)> = [("products", dense), ("expert layers", layers)]
        .into_iter()
        .filter(|p| !p.1.is_empty())
        .collect();
    let peers = report.peers();
    let shapes = panels.iter().map(|(_, rows)| distinct(rows).len()).max().unwrap_or(0);
    let legend = LINE * shapes.max(peers.len()) as f64 + 16.0;
    let width = LEFT + panels.len().max(1) as f64 * (WIDTH + GAP);
    let height = TOP + HEIGHT + BELOW + legend;
    let m = &report.machine;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"roofline\" \
         width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\"><style>{STYLE}</style>\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\
         <text class=\"title\" x=\"{LEFT}\" y=\"28\">{}: {} weights, {} activations</text>\
         <text class=\"soft\" x=\"{LEFT}\" y=\"47\">limits of the same run: reads {:.2} TB/s, {} {:.0} \
         TFLOP/s; others are plotted at the intensity of our weights, so height is speed</text>",
        escaped(&m.device),
        escaped(report.weights),
        report.activations,
        m.read_tb_s,
        m.matrix_instruction,
        m.matrix_tflop_s,
    );
    for (at, (name, rows)) in panels.iter().enumerate() {
        let left = LEFT + at as f64 * (WIDTH + GAP);
        push(&mut out, format_args!("<g transform=\"translate({left} {TOP})\">"));
        frame(&mut out, report, &axes, name);
        points(&mut out, &axes, rows, &peers);
        key(&mut out, rows, &peers);
        out.push_str("</g>");
    }
    out.push_str("</svg>\n");
    out
}

/// Grid, axis labels, and the roof.
fn frame(out: &mut String, report: &Report, axes: &Axes, name: &str) {
    push(out, format_args!("<text class=\"panel\" y=\"-8\">{name}</text>"));
    for exponent in axes.x[0]..=axes.x[1] {
        let x = axes.x(10f64.powi(exponent));
        push(out, format_args!("<path class=\"grid\" d=\"M{x:.1} 0v{HEIGHT}\"/>"));
        let y = HEIGHT + 18.0;
        push(
            out,
            format_args!("<text class=\"x\" x=\"{x:.1}\" y=\"{y}\">{}</text>", power(exponent)),
        );
    }
    for exponent in axes.y[0]..=axes.y[1] {
        let y = axes.y(10f64.powi(exponent));
        push(out, format_args!("<path class=\"grid\" d=\"M0 {y:.1}h{WIDTH}\"/>"));
        let at = y + 4.0;
        push(
            out,
            format_args!("<text class=\"y\" x=\"-8\" y=\"{at:.1}\">{}</text>", power(exponent)),
        );
    }
    let (middle, below) = (WIDTH / 2.0, HEIGHT + 38.0);
    push(out, format_args!("<text class=\"x\" x=\"{middle}\" y=\"{below}\">FLOP per byte</text>"));
    push(
        out,
        format_args!(
            "<text class=\"x\" transform=\"translate(-46 {}) rotate(-90)\">TFLOP/s</text>",
            HEIGHT / 2.0
        ),
    );
    let m = &report.machine;
    // The sloped part starts at the left or the lower edge of the plot.
    let (left, floor) = (10f64.powi(axes.x[0]), 10f64.powi(axes.y[0]));
    let start = left.max(floor / m.read_tb_s);
    let corner = (m.matrix_tflop_s / m.read_tb_s).max(start);
    push(
        out,
        format_args!(
            "<path class=\"roof\" d=\"M{:.1} {:.1}L{:.1} {:.1}H{WIDTH}\"/>",
            axes.x(start),
            axes.y(start * m.read_tb_s),
            axes.x(corner),
            axes.y(m.matrix_tflop_s)
        ),
    );
    push(out, format_args!("<rect class=\"frame\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>"));
}

/// The distinct shapes of `rows`.
fn distinct<'r>(rows: &[&'r Row]) -> Vec<&'r str> {
    let mut names: Vec<&str> = rows.iter().map(|row| row.shape.as_str()).collect();
    names.dedup();
    names
}

/// Every measurement; ours are joined by lines.
fn points(out: &mut String, axes: &Axes, rows: &[&Row], peers: &[&str]) {
    for (at, shape) in distinct(rows).into_iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        let of: Vec<&&Row> = rows.iter().filter(|row| row.shape == shape).collect();
        let line: Vec<String> = of
            .iter()
            .map(|row| format!("{:.1} {:.1}", axes.x(row.flops / row.bytes), axes.y(row.tflop_s)))
            .collect();
        push(
            out,
            format_args!("<path class=\"ours\" stroke=\"{colour}\" d=\"M{}\"/>", line.join("L")),
        );
        for row in of {
            let x = axes.x(row.flops / row.bytes);
            let what = format!("{shape}, M {}", row.tokens);
            for other in &row.peers {
                let which = peers.iter().position(|name| *name == other.peer).unwrap_or(0);
                let tflop_s = row.tflop_s / other.ratio;
                push(
                    out,
                    format_args!(
                        "<path class=\"other\" stroke=\"{colour}\" d=\"{}\"><title>{}: {}, {:.1} µs, \
                         {tflop_s:.1} TFLOP/s</title></path>",
                        mark(which, x, axes.y(tflop_s)),
                        escaped(&other.peer),
                        escaped(&what),
                        other.us
                    ),
                );
            }
            push(
                out,
                format_args!(
                    "<circle cx=\"{x:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"><title>{}, {:.1} µs, \
                     {:.1} TFLOP/s, {:.0} % of the limit</title></circle>",
                    axes.y(row.tflop_s),
                    escaped(&what),
                    row.us_median,
                    row.tflop_s,
                    row.of_limit * 100.0
                ),
            );
        }
    }
}

/// The legend of colours and markers.
fn key(out: &mut String, rows: &[&Row], peers: &[&str]) {
    let line = |at: usize| HEIGHT + BELOW + 16.0 + LINE * at as f64;
    for (at, shape) in distinct(rows).into_iter().enumerate() {
        let (y, colour) = (line(at), COLOURS[at % COLOURS.len()]);
        let of: Vec<String> = rows
            .iter()
            .filter(|row| row.shape == shape)
            .map(|row| row.tokens.to_string())
            .collect();
        push(
            out,
            format_args!(
                "<circle cx=\"6\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"/><text x=\"18\" y=\"{y:.1}\">{}, M \
                 {}</text>",
                y - 4.0,
                escaped(shape),
                of.join(", ")
            ),
        );
    }
    let here =
        |name: &&str| rows.iter().flat_map(|row| &row.peers).any(|other| other.peer == *name);
    for (at, name) in peers.iter().filter(|name| here(name)).enumerate() {
        let (y, which) = (line(at), peers.iter().position(|peer| peer == name).unwrap_or(0));
        push(
            out,
            format_args!(
                "<path class=\"other\" stroke=\"#5b6672\" d=\"{}\"/><text x=\"344\" y=\"{y:.1}\">{}</text>",
                mark(which, 332.0, y - 4.0),
                escaped(name)
            ),
        );
    }
}

fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = out.write_fmt(text);
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::sample;
    use super::*;

    #[test]
    fn axes_hold_every_figure() {
        let report = sample();
        let axes = Axes::new(&report);
        // Intensities from 3.9 (M 1) to 2924 (M 4096); 3.8 TFLOP/s of the slowest to 800.
        assert_eq!((axes.x, axes.y), ([0, 4], [0, 3]));
        assert_eq!((axes.x(1.0), axes.x(10_000.0)), (0.0, WIDTH));
        assert_eq!((axes.y(1.0), axes.y(1000.0)), (HEIGHT, 0.0));
        assert_eq!([power(-1), power(0), power(3)], ["0.1", "1", "1000"]);
        assert_eq!(decades(1.0, 1.0), [0, 1]);
    }

    #[test]
    fn every_figure_is_drawn_once() {
        let report = sample();
        let svg = roofline(&report);
        assert_eq!(svg.matches("% of the limit</title>").count(), report.results.len());
        let others: usize = report.results.iter().map(|row| row.peers.len()).sum();
        assert_eq!(svg.matches(" TFLOP/s</title></path>").count(), others);
        assert!(svg.contains("cublas-bf16: 4096x28672, M 1, 58.0 µs, 4.0 TFLOP/s"), "{svg}");
        assert_eq!(svg.matches("class=\"roof\"").count(), 2);
        // 800 TFLOP/s at 4 TB/s: the corner at 200 operations per byte.
        let axes = Axes::new(&report);
        let corner = format!("L{:.1} {:.1}H{WIDTH}", axes.x(200.0), axes.y(800.0));
        assert!(svg.contains(&corner), "{corner}");
    }

    #[test]
    fn names_from_files_cannot_break_out() {
        let mut report = sample();
        report.results[0].peers[0].peer = "</text><script>".into();
        let svg = roofline(&report);
        assert!(!svg.contains("<script>") && svg.contains("&lt;/text&gt;&lt;script&gt;"), "{svg}");
    }

    #[test]
    fn without_peers_or_layers_there_is_one_panel() {
        let mut report = sample();
        report.results.truncate(2);
        report.results.iter_mut().for_each(|row| row.peers.clear());
        let svg = roofline(&report);
        assert_eq!(svg.matches("class=\"roof\"").count(), 1);
        assert_eq!(svg.matches("<circle").count(), 2 + 1);
    }
}
