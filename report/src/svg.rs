//! A builder for the inline SVGs of the report.
//!
//! A plot is as wide as the page allows, up to its own width. Horizontal positions are shares of that
//! width, so text keeps its size in pixels on a narrow page; only cells and lines are stretched.

use std::fmt::{self, Write as _};

/// Margins on the other sides of a plot, in pixels.
const RIGHT: f64 = 18.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 40.0;
/// Width that a plot keeps on a narrow page, without its labels; below it the page scrolls.
const NARROWEST: f64 = 160.0;

/// An inline SVG under construction. The origin is the plot's upper left corner.
pub(crate) struct Svg {
    text: String,
    h: f64,
}

impl Svg {
    /// Starts a plot of at most `w` by `h` pixels with a left margin of `left` pixels.
    pub(crate) fn new(left: usize, w: f64, h: f64, label: &str) -> Self {
        let mut svg = Self { text: String::new(), h };
        let sides = left as f64 + RIGHT;
        // The padding holds the labels: inside it, percentages are of the plot's width alone.
        svg.push(format_args!(
            "<svg role=\"img\" aria-label=\"{label}\" \
             style=\"padding:{TOP}px {RIGHT}px {BOTTOM}px {left}px;height:{}px;max-width:{}px;\
             min-width:{}px\">",
            TOP + h + BOTTOM,
            sides + w,
            sides + w.min(NARROWEST),
        ));
        svg
    }

    pub(crate) fn push(&mut self, part: fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.text.write_fmt(part);
    }

    /// A rectangle that covers the plot.
    pub(crate) fn rect(&mut self, class: &str) {
        let h = self.h;
        self.push(format_args!("<rect class=\"{class}\" width=\"100%\" height=\"{h}\"/>"));
    }

    /// Draws rows of cells that fill the plot. All cells of a level form one path, whose class is
    /// `prefix` followed by the level; cells without a level are not drawn.
    pub(crate) fn cells<'r>(
        &mut self,
        prefix: &str,
        [rows, cols]: [usize; 2],
        levels: impl Iterator<Item = Vec<Option<usize>>> + 'r,
    ) {
        let mut paths: Vec<String> = Vec::new();
        for (r, row) in levels.enumerate() {
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
        let h = self.h;
        self.push(format_args!(
            "<svg width=\"100%\" height=\"{h}\" viewBox=\"0 0 {cols} {rows}\" \
             preserveAspectRatio=\"none\" shape-rendering=\"crispEdges\">"
        ));
        for (level, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
            self.push(format_args!("<path class=\"{prefix}{level}\" d=\"{path}\"/>"));
        }
        self.push(format_args!("</svg>"));
    }

    /// A filled part of the width, at least `least` pixels wide.
    pub(crate) fn band(&mut self, class: &str, [from, to]: [f64; 2], least: f64) {
        let (h, x, width) = (self.h, 100.0 * from, 100.0 * (to - from));
        self.push(format_args!(
            "<rect class=\"{class}\" x=\"{x:.3}%\" style=\"width:max({width:.3}%,{least}px)\" \
             height=\"{h}\"/>"
        ));
    }

    /// A line across the plot at a share of its width.
    pub(crate) fn line_x(&mut self, at: f64) {
        let (h, x) = (self.h, 100.0 * at);
        self.push(format_args!("<line class=\"lines\" x1=\"{x:.3}%\" x2=\"{x:.3}%\" y2=\"{h}\"/>"));
    }

    /// A line across the plot at `y` pixels.
    pub(crate) fn line_y(&mut self, y: f64) {
        self.push(format_args!("<line class=\"lines\" x2=\"100%\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"));
    }

    /// The ticks below the plot with their labels, each at a share of its width. A narrow page shows
    /// every other tick.
    pub(crate) fn ticks_x(&mut self, ticks: impl Iterator<Item = (f64, usize)>) {
        for (i, (at, name)) in ticks.enumerate() {
            let class = if i % 2 == 1 { " class=\"odd\"" } else { "" };
            let (h, x, y) = (self.h, 100.0 * at, self.h + 16.0);
            self.push(format_args!(
                "<svg x=\"{x:.3}%\" overflow=\"visible\"{class}><path class=\"tick\" d=\"M0 {h}v4\"/>\
                 <text y=\"{y}\" class=\"x\">{name}</text></svg>"
            ));
        }
    }

    /// A tick with a label left of a plot.
    pub(crate) fn tick_y(&mut self, y: f64, name: impl fmt::Display) {
        self.push(format_args!("<path class=\"tick\" d=\"M-4 {y:.1}h4\"/>"));
        let y = y + 3.5;
        self.push(format_args!("<text x=\"-7\" y=\"{y:.1}\" class=\"y\">{name}</text>"));
    }

    /// The label of the horizontal axis.
    pub(crate) fn name_x(&mut self, name: &str) {
        let y = self.h + 33.0;
        self.push(format_args!("<text x=\"50%\" y=\"{y}\" class=\"x axis\">{name}</text>"));
    }

    /// Draws a ring around a cell of `px` by `py` pixels. Its centre is at a share of the width and
    /// at `y` pixels.
    pub(crate) fn ring(&mut self, at: f64, y: f64, [px, py]: [f64; 2]) {
        let (x, radius) = (100.0 * at, (px.hypot(py) / 2.0 + 3.0).max(6.0));
        for class in ["halo", "mark"] {
            self.push(format_args!(
                "<circle class=\"{class}\" cx=\"{x:.3}%\" cy=\"{y:.1}\" r=\"{radius:.1}\"/>"
            ));
        }
    }

    /// The complete `<svg>` element.
    pub(crate) fn finish(mut self) -> String {
        self.text.push_str("</svg>");
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a page of 400 pixels the plot shrinks and its text does not: no text is inside an element
    /// that scales its contents.
    #[test]
    fn text_is_not_scaled_with_the_plot() {
        let mut svg = Svg::new(62, 448.0, 320.0, "test");
        svg.cells("l", [2, 3], vec![vec![Some(0); 3]; 2].into_iter());
        svg.ticks_x([(0.0, 0), (0.5, 4096)].into_iter());
        svg.tick_y(10.0, "row 0");
        svg.name_x("n");
        let text = svg.finish();
        assert!(text.contains("max-width:528px;min-width:240px"), "{text}");
        // Inside a viewBox are only paths.
        let mut scaled = text.split("viewBox").skip(1);
        let cells = scaled.next().and_then(|part| part.split("</svg>").next()).expect("cells");
        assert!(cells.contains("<path") && !cells.contains("<text"), "{cells}");
        assert_eq!((scaled.next(), text.contains("transform=\"scale")), (None, false));
        assert_eq!(text.matches("<text").count(), 4);
        assert_eq!(text.matches("class=\"odd\"").count(), 1);
        assert_eq!(text.matches("<svg").count(), text.matches("</svg>").count());
    }
}
