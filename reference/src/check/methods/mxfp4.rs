//! gpt-oss: a rank's part of MXFP4 experts, with the padding of its kernel.

use super::{Computation, Expected, Form, Mistake, codes, in_lines, known};
use crate::Result;
use crate::case::{Case, GptOssConfig, GptOssMatrix};
use crate::check::compare::Rows;
use crate::checkpoint::transpose_words;
use crate::dims::{GroupSize, Shape};
use crate::prepare::gate_up::GateUp;
use crate::scalar::ScalarType;
use crate::tensor::DType;
use crate::weight::{Groups, Table, Weight};

/// `load_weights_mxfp4`.
#[derive(Debug, Clone)]
pub(super) struct GptOss {
    config: GptOssConfig,
    w13: Vec<Weight<'static>>,
    w2: Vec<Weight<'static>>,
    /// How files store the scales.
    scale_type: DType,
    /// What stands in the scales' new places.
    padding: u32,
    /// Whether w2's bias is the first rank's alone.
    bias_once: bool,
}

impl GptOss {
    pub(super) fn new(case: &Case<'_>, c: &GptOssConfig) -> Result<Self> {
        let [w13, w2] = c.matrices()?;
        let stack = |GptOssMatrix { name, model: [size_n, size_k], .. }: GptOssMatrix| {
            let input = |part: &str| case.input(&format!("{name}_{part}"));
            let (weight, scales, bias) = (input("weight")?, input("weight_scale")?, input("bias")?);
            let one = |e: usize| {
                let weight = weight.index0(e)?;
                let bias = Table::from_tensor(&bias.index0(e)?, ScalarType::BFLOAT16)?;
                let scales = Table::from_tensor(&scales.index0(e)?, ScalarType::FLOAT8_E8M0FNU)?;
                Ok(Weight {
                    name: weight.name().to_owned(),
                    ty: ScalarType::FLOAT4_E2M1F,
                    codes: codes(&weight, 4, Shape::new(size_k, size_n))?,
                    scales: scales.transposed(),
                    zeros: None,
                    groups: Groups::Uniform(GroupSize::Of(32)),
                    global_scale: None,
                    bias: Some(bias),
                })
            };
            (0..c.num_experts).map(one).collect::<Result<Vec<_>>>()
        };
        Ok(Self {
            config: c.clone(),
            w13: stack(w13)?,
            w2: stack(w2)?,
            scale_type: case.input("w13_weight_scale")?.dtype(),
            padding: 0,
            bias_once: true,
        })
    }

    fn prepared(&self) -> Result<[Vec<Weight<'static>>; 2]> {
        let (shard, order) = (self.config.shard, self.config.gate_up);
        let w13 = self.w13.iter().map(|w| shard.w13(w, order)).collect::<Result<_>>()?;
        let w2 = self.w2.iter().map(|w| {
            let mut made = shard.w2(w)?;
            if !self.bias_once {
                let first = crate::prepare::gpt_oss::GptOssShard { tp_rank: 0, ..shard };
                made.bias = first.w2(w)?.bias;
            }
            Ok(made)
        });
        Ok([w13, w2.collect::<Result<_>>()?])
    }

    /// K and N that hold the model's numbers: of w13 in halves, each half is padded, so that only
    /// the interleaved order has one rectangle.
    fn inside(&self, which: usize, [size_n, size_k]: [usize; 2]) -> Result<[usize; 2]> {
        let (features, h) = (self.config.shard.features()?.len(), self.config.shard.hidden_size);
        Ok(match which {
            0 if self.config.gate_up == GateUp::Interleaved => [h, 2 * features],
            0 => [h, size_n],
            _ => [features.min(size_k), h],
        })
    }
}

impl Computation for GptOss {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let experts = self.config.num_experts;
        let mut all = Vec::new();
        let prepared = self.prepared()?;
        let matrices = self.config.matrices()?.into_iter().zip(prepared);
        for (which, (matrix, weights)) in matrices.enumerate() {
            let GptOssMatrix { name, padded, .. } = matrix;
            let [n, k] = padded;
            let inside = self.inside(which, padded)?;
            let (mut bytes, mut scales, mut bias) = (Vec::new(), Vec::new(), Vec::new());
            for weight in &weights {
                let words = transpose_words(weight.codes.words(), k / 8, n);
                bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()).map(u32::from));
                let used = [inside[0] / 32, inside[1]];
                let table = &weight.scales;
                let padded = in_lines(table).into_iter().enumerate().map(|(i, bits)| {
                    let (g, n) = (i % table.rows(), i / table.rows());
                    if g < used[0] && n < used[1] { bits } else { bits | self.padding }
                });
                scales.extend(padded);
                bias.extend(weight.bias.iter().flat_map(Table::iter_bits));
            }
            let part = |part: &str| format!("{name}_{part}");
            let lines = |rows, matrix, inside, width| Form {
                inside,
                ..Form::lines(rows, matrix, width, Some(experts))
            };
            let groups = [inside[0] / 32, inside[1]];
            all.extend([
                Expected {
                    name: part("weight"),
                    dtype: DType::U8,
                    shape: vec![experts, n, k / 2],
                    elements: bytes,
                    form: lines(Rows::K, [k, n], inside, 4),
                },
                Expected {
                    name: part("weight_scale"),
                    dtype: self.scale_type,
                    shape: vec![experts, n, k / 32],
                    elements: scales,
                    form: lines(Rows::Group, [k / 32, n], groups, 8),
                },
                Expected {
                    name: part("bias"),
                    dtype: DType::BF16,
                    shape: vec![experts, n],
                    elements: bias,
                    form: lines(Rows::Group, [1, n], [1, inside[1]], 16),
                },
            ]);
        }
        Ok(all)
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        fn order(c: &mut GptOss, order: GateUp) {
            c.config.gate_up = order;
        }
        known! {
            "gate-up-interleaved", "gate and up are interleaved, as in the file" =>
                |c| order(c, GateUp::Interleaved);
            "gate-up-halves", "gate and up stand in halves, gate first" =>
                |c| order(c, GateUp::Halves);
            "gate-up-swapped-halves", "gate and up stand in halves, up first" =>
                |c| order(c, GateUp::SwappedHalves);
            "bias-on-every-rank", "w2's bias is on this rank as well: the sum of ranks adds it again" =>
                |c| c.bias_once = false;
            "padded-scales-nan", "the scales' padding is e8m0's NaN, which reaches the product" =>
                |c| c.padding = 0xff;
            "padded-scales-one", "the scales' padding is 2^0 where zero bytes belong" =>
                |c| c.padding = 0x7f;
            "rank-of-another", "these are the features of another rank" => |c| {
                let ranks = c.config.shard.tp_size;
                c.config.shard.tp_rank = (c.config.shard.tp_rank + 1) % ranks;
            };
            "halves-cut-by-rank", "w13 was cut as if gate and up stood in halves" => |c| {
                for weight in &mut c.w13 {
                    let intermediate = c.config.shard.intermediate_size;
                    let columns =
                        GateUp::Interleaved.columns_from(GateUp::Halves, intermediate);
                    if let Ok(read) = weight.gather_columns(&columns) {
                        *weight = read;
                    }
                }
            };
        }
    }
}
