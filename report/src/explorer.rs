//! Links from a wrong value to its place in the explorer of layouts.

use marlinspike::check::{Mismatch, OutputReport};
use marlinspike::layouts::positions::{Request, positions};

/// The layouts of an output, by the end of its name.
const LAYOUTS: [(&str, &[&str]); 4] = [
    ("marlin_qweight", &["marlin_qweight"]),
    ("marlin_scales", &["marlin_scales", "marlin_scales_8bit"]),
    ("marlin_zeros", &["marlin_zeros"]),
    ("marlin_bias", &["marlin_bias"]),
];

/// The query that shows a wrong value of a packed Marlin tensor in the explorer, for matrices that it can
/// draw. Rows are those of the packed matrix, which act-order sorts.
pub(crate) fn query(o: &OutputReport, m: &Mismatch) -> Option<String> {
    let (_, layouts) = LAYOUTS.iter().find(|(end, _)| o.name.ends_with(end))?;
    let picture = o.picture.as_ref()?;
    let (_, plane) = picture.planes.iter().find(|(e, _)| *e == m.expert.unwrap_or(0))?;
    // Of one matrix: a stack's tensor has the expert first.
    let index = &m.index[usize::from(m.expert.is_some())..];
    let element = index.iter().fold(0, |element, i| element * picture.buffer.cols + i);
    let requests = layouts.iter().flat_map(|layout| {
        [16, 8].map(|activation_bits| {
            let mut request = Request::default();
            request.layout = (*layout).to_owned();
            (request.size_n, request.activation_bits) = (plane.cols, activation_bits);
            if m.width == 4 || m.width == 8 {
                request.bits = m.width;
            }
            (request.size_k, request.group_size) = match (*layout, plane.rows) {
                ("marlin_qweight", rows) => (rows, -1),
                (_, 1) => (32, -1),
                (_, groups) => (groups.checked_mul(32)?, 32),
            };
            Some(request)
        })
    });
    let request = requests.flatten().find(|request| shows(request, m, element))?;
    let Request { layout, size_k, size_n, bits, activation_bits, group_size, .. } = request;
    let bit = m.bit;
    Some(format!(
        "layout={layout}&amp;size_k={size_k}&amp;size_n={size_n}&amp;bits={bits}\
         &amp;activation_bits={activation_bits}&amp;group_size={group_size}&amp;element={element}&amp;bit={bit}"
    ))
}

/// Whether the layout has the wrong value where the verdict found it.
fn shows(request: &Request, m: &Mismatch, element: usize) -> bool {
    let Ok(all) = positions(request) else { return false };
    let value = all.values.iter().find(|v| v.element == element && v.bit == m.bit);
    value.is_some_and(|v| {
        // Of a code, the fragment: with act-order, the verdict's k is the checkpoint's.
        let row = m.k.is_some() || v.row == m.group.unwrap_or(0);
        row && v.width == m.width && v.fragment == m.fragment && Some(v.col) == m.n
    })
}
