//! The plots of an output's card: the positions of its wrong values, or the sizes of its errors.

use std::fmt::{self, Write as _};

use marlinspike::check::{ErrorMap, Grid, Mismatch, OutputReport, Picture};

use crate::error_map;
use crate::escape;
use crate::mismatch_map::Drawing;

/// Rows of a Marlin tile.
const TILE_K: usize = 16;
/// Columns of a Marlin tile.
const TILE_N: usize = 64;

/// The plots of one output.
pub(crate) fn figures(out: &mut String, picture: &Picture, o: &OutputReport) -> fmt::Result {
    let class = if picture.errors.is_some() { "figures one" } else { "figures" };
    writeln!(out, "<div class=\"{class}\">")?;
    match &picture.errors {
        Some(map) => product(out, map, o.first_mismatch.as_ref())?,
        None => {
            planes(out, picture, o)?;
            buffer(out, picture, o)?;
        }
    }
    out.push_str("</div>\n");
    if picture.planes_left_out > 0 {
        let n = picture.planes_left_out;
        writeln!(out, "<p class=\"soft\">{n} more experts with wrong values are not drawn.</p>")?;
    }
    Ok(())
}

/// Whether the output is a packed weight and whether it has several experts.
fn form(o: &OutputReport) -> (bool, bool) {
    let first = o.first_mismatch.as_ref();
    (first.is_some_and(|m| m.fragment.is_some()), first.is_some_and(|m| m.expert.is_some()))
}

/// The matrices of the picture; a list is drawn as its buffer.
fn matrices(picture: &Picture) -> &[(usize, Grid)] {
    if picture.row_label == "row" { &[] } else { &picture.planes }
}

/// A plot of each expert's matrix.
fn planes(out: &mut String, picture: &Picture, o: &OutputReport) -> fmt::Result {
    let (tiled, stacked) = form(o);
    for (expert, grid) in matrices(picture) {
        let of = if stacked { format!("expert {expert}, ") } else { String::new() };
        let here = o.first_mismatch.as_ref().filter(|m| m.expert.is_none_or(|e| e == *expert));
        let (rows, cols) = (picture.row_label, picture.col_label);
        let what = format!("{of}({rows}, {cols}) plane");
        // The index of a code of activations is [row, k].
        let column = |m: &Mismatch| match cols {
            "n" => m.n,
            _ => m.k.and_then(|_| m.index.first().copied()),
        };
        let drawing = Drawing {
            grid,
            density: 1.0,
            rows,
            cols,
            lines: if tiled { [Some(TILE_K), Some(TILE_N)] } else { [None, Some(TILE_N)] },
            mark: here.and_then(|m| Some((m.k.or(m.group)?, column(m)?))),
            label: format!("wrong values in the {what}"),
        };
        let lines = match drawing.line_steps() {
            [Some(k), Some(n)] => format!("; lines every {k} k and {n} n (tiles are 16 by 64)"),
            [None, Some(n)] => format!("; lines every {n} {cols}"),
            [Some(k), None] => format!("; lines every {k} k (tiles are 16 by 64)"),
            [None, None] => String::new(),
        };
        figure(out, &drawing, &what, &format!("{} by {} values{lines}", grid.rows, grid.cols))?;
    }
    Ok(())
}

/// A plot of the whole tensor as stored, one expert after another.
fn buffer(out: &mut String, picture: &Picture, o: &OutputReport) -> fmt::Result {
    let (tiled, stacked) = form(o);
    let grid = &picture.buffer;
    let experts = matrices(picture).first().map_or(1, |(_, plane)| {
        let rows = plane.rows / if tiled { TILE_K } else { 1 };
        if stacked && rows > 0 { (grid.rows / rows).max(1) } else { 1 }
    });
    let size = (grid.rows * grid.cols).max(1);
    let per_expert = (grid.rows / experts).max(1);
    let drawing = Drawing {
        grid,
        density: o.elements as f64 / size as f64,
        rows: "row",
        cols: "element of the row",
        lines: [(experts > 1).then_some(per_expert), None],
        mark: o.first_mismatch.as_ref().map(|m| buffer_place(m, per_expert)),
        label: "wrong values in the buffer".to_owned(),
    };
    let lines = match drawing.line_steps()[0] {
        Some(step) if step == per_expert => "; a line before every expert".to_owned(),
        Some(step) => format!("; a line before every {} experts", step / per_expert),
        None => String::new(),
    };
    let about = format!("{} rows of {} elements{lines}", grid.rows, grid.cols);
    figure(out, &drawing, "buffer", &about)
}

/// The figures of a product: its errors, and the part of k that explains them.
fn product(out: &mut String, map: &ErrorMap, first: Option<&Mismatch>) -> fmt::Result {
    let mark = first.and_then(|m| Some((*m.index.first()?, *m.index.last()?)));
    let (width, height) = (map.cols.div_ceil(map.cell_cols), map.rows.div_ceil(map.cell_rows));
    let cell = if width * height > 1 {
        format!("; a cell covers {height} by {width} and shows the largest")
    } else {
        String::new()
    };
    out.push_str("<figure>");
    out.push_str(&error_map::map(map, mark));
    write!(
        out,
        "<figcaption><b>error over bound</b>: {} rows by {} columns{cell}. No kernel of the declared \
         class has an error above 1.<span class=\"scale\">",
        map.rows, map.cols
    )?;
    for (level, words) in error_map::LEVELS.iter().enumerate() {
        write!(
            out,
            "<span><svg width=\"16\" height=\"16\"><rect class=\"e{level}\" width=\"16\" \
             height=\"16\" rx=\"3\"/></svg>{words}</span>"
        )?;
    }
    out.push_str("</span></figcaption></figure>\n");
    if let Some(cause) = &map.cause {
        let ranges: Vec<String> = cause
            .ranges
            .iter()
            .take(6)
            .map(|r| {
                if r.len() == 1 {
                    r.start.to_string()
                } else {
                    format!("{} to {}", r.start, r.end - 1)
                }
            })
            .collect();
        let more = if cause.ranges.len() > 6 { ", ..." } else { "" };
        writeln!(
            out,
            "<figure>{}<figcaption><b>explanation</b>: k {}{more} of {}; a line before every \
             group of {}</figcaption></figure>",
            error_map::strip(cause),
            ranges.join(", "),
            cause.size_k,
            cause.group_size
        )?;
    }
    Ok(())
}

/// Row and column of a mismatch in the buffer, where experts are stacked vertically.
fn buffer_place(m: &Mismatch, rows_per_expert: usize) -> (usize, usize) {
    let own = &m.index[usize::from(m.expert.is_some() && m.index.len() > 1)..];
    let row = if own.len() > 1 { own[0] } else { 0 };
    (m.expert.unwrap_or(0) * rows_per_expert + row, own.last().copied().unwrap_or(0))
}

fn figure(out: &mut String, drawing: &Drawing<'_>, what: &str, about: &str) -> fmt::Result {
    let [rows, cols] = drawing.cell();
    let cell =
        if rows * cols > 1 { format!("; a cell covers {rows} by {cols}") } else { String::new() };
    writeln!(
        out,
        "<figure>{}<figcaption><b>{}</b>: {}{cell}</figcaption></figure>",
        drawing.render(),
        escape(what),
        escape(about)
    )
}
