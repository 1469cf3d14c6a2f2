//! A builder for the inline SVGs of the report.

use std::fmt::{self, Write as _};

/// Margins on the other sides of a plot, in pixels.
const RIGHT: f64 = 18.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 40.0;

/// An inline SVG under construction. The origin is the plot's upper left corner.
pub(super) struct Svg {
    text: String,
}

impl Svg {
    /// Starts a plot of `w` by `h` pixels with a left margin of `left` pixels.
    pub(super) fn new(left: usize, w: f64, h: f64, label: &str) -> Self {
        let (full_w, full_h) = (left as f64 + w + RIGHT, TOP + h + BOTTOM);
        let mut svg = Self { text: String::new() };
        svg.push(format_args!(
            "<svg role=\"img\" aria-label=\"{label}\" width=\"{full_w}\" height=\"{full_h}\" \
             viewBox=\"0 0 {full_w} {full_h}\"><g transform=\"translate({left} {TOP})\">"
        ));
        svg
    }

    pub(super) fn push(&mut self, part: fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.text.write_fmt(part);
    }

    /// A rectangle that covers the plot.
    pub(super) fn rect(&mut self, class: &str, w: f64, h: f64) {
        self.push(format_args!("<rect class=\"{class}\" width=\"{w}\" height=\"{h}\"/>"));
    }

    /// Draws rows of cells of `scale` pixels. All cells of a level form one path, whose class is
    /// `prefix` followed by the level; cells without a level are not drawn.
    pub(super) fn cells<'r>(
        &mut self,
        prefix: &str,
        scale: [f64; 2],
        rows: impl Iterator<Item = Vec<Option<usize>>> + 'r,
    ) {
        let mut paths: Vec<String> = Vec::new();
        for (r, row) in rows.enumerate() {
            let mut start = 0;
            for run in row.chunk_by(|a, b| a == b) {
                let len = run.len();
                if let Some(level) = run[0] {
                    paths.resize(paths.len().max(level + 1), String::new());
                    // Writing to a string cannot fail.
                    let _ = write!(paths[level], "M{start} {r}h{len}v1h-{len}z");
                }
                start += len;
            }
        }
        let [px, py] = scale;
        self.push(format_args!(
            "<g transform=\"scale({px} {py})\" shape-rendering=\"crispEdges\">"
        ));
        for (level, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
            self.push(format_args!("<path class=\"{prefix}{level}\" d=\"{path}\"/>"));
        }
        self.push(format_args!("</g>"));
    }

    /// A tick with a label below a plot of height `h`.
    pub(super) fn tick_x(&mut self, x: f64, h: f64, name: impl fmt::Display) {
        self.push(format_args!("<path class=\"tick\" d=\"M{x:.1} {h}v4\"/>"));
        let y = h + 16.0;
        self.push(format_args!("<text x=\"{x:.1}\" y=\"{y}\" class=\"x\">{name}</text>"));
    }

    /// A tick with a label left of a plot.
    pub(super) fn tick_y(&mut self, y: f64, name: impl fmt::Display) {
        self.push(format_args!("<path class=\"tick\" d=\"M-4 {y:.1}h4\"/>"));
        let y = y + 3.5;
        self.push(format_args!("<text x=\"-7\" y=\"{y:.1}\" class=\"y\">{name}</text>"));
    }

    /// The label of the horizontal axis.
    pub(super) fn name_x(&mut self, w: f64, h: f64, name: &str) {
        let (x, y) = ((w / 2.0).floor(), h + 33.0);
        self.push(format_args!("<text x=\"{x}\" y=\"{y}\" class=\"x axis\">{name}</text>"));
    }

    /// Draws a ring around a cell of `scale` pixels with its centre at `(x, y)`.
    pub(super) fn ring(&mut self, [x, y]: [f64; 2], [px, py]: [f64; 2]) {
        let radius = (px.hypot(py) / 2.0 + 3.0).max(6.0);
        for class in ["halo", "mark"] {
            self.push(format_args!(
                "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius:.1}\"/>"
            ));
        }
    }

    /// The complete `<svg>` element.
    pub(super) fn finish(mut self) -> String {
        self.text.push_str("</g></svg>");
        self.text
    }
}
