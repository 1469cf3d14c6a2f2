//! The configs from which products are generated: all that upstream's operators take.

use super::LinearConfig;
use crate::formats::Format;
use crate::layers::ParallelStyle;
use crate::layers::ParallelStyle::{Column, Row};
use crate::num::dims::GroupSize;
use crate::ops::axes::{Space, shown};
use crate::ops::is_read_back;
use crate::ops::quant::QuantConfig;
use crate::ops::quant::lattice::{
    DEVICE, LINEAR_SHAPES, Probe, deployment, on_rank, parallel, plain_quant, quant_axes, quants,
    ranks, scheme, settle,
};
use crate::ops::quant::values::whole_k;
use crate::ops::tensors::FLAGS;
use crate::select::{LinearDesc, select_linear};

/// Tensor-parallel ranks: their number, this one, and what is cut.
const RANKS: [(usize, usize, ParallelStyle); 3] = [(2, 1, Column), (2, 0, Row), (4, 3, Row)];

fn config(quant: QuantConfig, (size_k, size_n): (usize, usize)) -> LinearConfig {
    LinearConfig {
        quant,
        size_m: 1,
        size_n,
        size_k,
        scale_factor: None,
        schedule: None,
        quantizer: None,
    }
}

/// The axes of a product. Row counts are drawn with each case.
pub(super) fn space() -> Space<LinearConfig> {
    let finish = |c: &mut LinearConfig| settle(&mut c.quant);
    let shapes = LINEAR_SHAPES.map(|(k, n)| (format!("{k} x {n}"), (k, n)));
    quant_axes(Space::new(config(plain_quant(), LINEAR_SHAPES[0]), finish), |c| &mut c.quant)
        .axis("has_bias", shown(FLAGS), |c, &flag| c.quant.has_bias = flag)
        .axis("tensor_parallel", ranks(&RANKS), |c, &tp| c.quant.tensor_parallel = tp)
        .axis("size_k x size_n", shapes, |c, &(k, n)| (c.size_k, c.size_n) = (k, n))
        .illegal(
            "integers have groups of 32, 64, 128 or all of K",
            &["weight", "group_size"],
            |c| {
                let format = c.quant.checkpoint_format;
                matches!(format, Format::Int(_)) && c.quant.group_size == GroupSize::Of(16)
            },
        )
        .together(&["weight", "dtype", "input_dtype", "group_size", "desc_act"])
}

/// Every legal config, in the order of earlier versions.
pub(super) fn configs() -> Vec<LinearConfig> {
    // A combination of types that fits no shape need not be combined with the other axes.
    let mut probe = Probe::default();
    let quants: Vec<_> =
        quants().filter(|q| is_offered(&config(q.clone(), (384, 192)), &mut probe)).collect();
    let mut configs = Vec::new();
    for quant in quants {
        for tp in std::iter::once(None)
            .chain(RANKS.map(|(size, rank, style)| parallel(size, rank, style)))
        {
            for has_bias in FLAGS {
                let quant = on_rank(&quant, tp, has_bias);
                configs.extend(LINEAR_SHAPES.map(|shape| config(quant.clone(), shape)));
            }
        }
    }
    configs.retain(|c| is_offered(c, &mut probe));
    configs
}

/// Whether the reference accepts every case of this config.
fn is_offered(c: &LinearConfig, probe: &mut Probe) -> bool {
    let desc = LinearDesc {
        input_size: whole_k(&c.quant, c.size_k),
        input_size_per_partition: c.size_k,
        output_size_per_partition: c.size_n,
        options: deployment(),
    };
    is_read_back(c)
        && probe.takes(&c.quant)
        && select_linear(&scheme(&c.quant), &desc, &DEVICE).chosen.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::CaseConfig;

    /// The lattice, which upstream's rules filter, is every combination that the declared axes call legal.
    #[test]
    fn the_lattice_is_every_legal_combination() {
        let axes = space().axes();
        let mut rows = vec![Vec::new()];
        for axis in axes.axes() {
            let longer = |row: Vec<usize>| {
                (0..axis.values.len()).map(move |value| [row.as_slice(), &[value]].concat())
            };
            rows = rows.into_iter().flat_map(longer).collect();
        }
        let legal = rows.iter().filter(|row| axes.objection(row).is_none());
        let text = |config: &CaseConfig| serde_json::Value::Object(config.to_json()).to_string();
        let mut declared: Vec<String> = legal.map(|row| text(&axes.config(row))).collect();
        let mut lattice: Vec<String> =
            configs().into_iter().map(|config| text(&config.into())).collect();
        declared.sort();
        lattice.sort();
        assert!(
            declared == lattice,
            "{} declared, {} in the lattice",
            declared.len(),
            lattice.len()
        );
    }
}
