//! The part of gpt-oss's MXFP4 experts that a rank loads, padded for its kernel.

use serde_json::{Value, json};

use crate::Result;
use crate::formats::transposed;
use crate::judge::compare::Rows;
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::Operation;
use crate::ops::case::Case;
use crate::ops::computation::{
    Computation, Defined, Expected, Form, Mistake, codes, ids, in_lines, known,
};
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule};
use crate::ops::tensors::{U8, input, is, name_of, output, refused, whole};
use crate::prepare::gate_up::GateUp;
use crate::prepare::pad::PaddedKernel;
use crate::prepare::padded_shard::PaddedShard;
use crate::select::Platform;
use crate::weight::{Groups, Table, Weight};

const PLATFORMS: &[(&str, Platform)] =
    &[("cuda", Platform::Cuda), ("rocm", Platform::Rocm), ("xpu", Platform::Xpu)];

const ORDERS: &[(&str, GateUp)] = &[
    ("interleaved", GateUp::Interleaved),
    ("halves", GateUp::Halves),
    ("swapped_halves", GateUp::SwappedHalves),
];

/// Config of `load_weights_mxfp4` (`GptOssModel._load_weights_mxfp4`, and the rounding of sizes of
/// `mxfp4_round_up_hidden_size_and_intermediate_size`).
///
/// in, of the whole model: `w13_weight` `[E, 2I, H / 2]` uint8, gate and up interleaved,
/// `w13_weight_scale` `[E, 2I, H / 32]` e8m0, `w13_bias` `[E, 2I]` bfloat16; `w2_weight`
/// `[E, H, I / 2]`, `w2_weight_scale`, `w2_bias` `[E, H]`. out: the same of the rank, its sizes rounded
/// up for the kernel, gate and up in the order `gate_up`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadWeightsConfig {
    /// Experts.
    pub num_experts: usize,
    /// The rank: sizes of the model, `tp_size`, `tp_rank`, `backend`, `platform`.
    pub shard: PaddedShard,
    /// Order of gate and up in the kernel's w13: `interleaved`, `halves` or `swapped_halves`.
    pub gate_up: GateUp,
}

/// One matrix of an expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertMatrix {
    /// Prefix of its tensors.
    pub(crate) name: &'static str,
    /// N and K of the model.
    pub(crate) model: [usize; 2],
    /// N and K of the rank, rounded up.
    pub(crate) padded: [usize; 2],
}

impl LoadWeightsConfig {
    /// w13 and w2.
    ///
    /// # Errors
    /// As [`PaddedShard::sizes`].
    pub(crate) fn matrices(&self) -> Result<[ExpertMatrix; 2]> {
        let (h, i) = (self.shard.hidden_size, self.shard.intermediate_size);
        let [padded_h, padded_i] = self.shard.sizes()?;
        let (model, padded) = ([2 * i, h], [2 * padded_i, padded_h]);
        let w13 = ExpertMatrix { name: "w13", model, padded };
        let w2 = ExpertMatrix { name: "w2", model: [h, i], padded: [padded_h, padded_i] };
        Ok([w13, w2])
    }
}

impl Operation for LoadWeightsConfig {
    fn keys() -> &'static [&'static str] {
        &[
            "num_experts",
            "hidden_size",
            "intermediate_size",
            "gate_up",
            "backend",
            "platform",
            "tp_size",
            "tp_rank",
        ]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let shard = PaddedShard {
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
            tp_size: r.optional_size("tp_size")?.unwrap_or(1),
            tp_rank: r.index("tp_rank")?,
            backend: r.name("backend", &PaddedKernel::NAMED)?,
            platform: r.optional_name("platform", PLATFORMS)?.unwrap_or(Platform::Cuda),
        };
        whole(r, "hidden_size", shard.hidden_size, 32)?;
        let features = shard.features();
        let features =
            features.map_err(|e| refused(r, "intermediate_size", shard.intermediate_size, &e))?;
        if features.is_empty() {
            return Err(r.refuse("tp_rank", shard.tp_rank, "a rank that holds a block of 32"));
        }
        shard.sizes().map_err(|e| refused(r, "hidden_size", shard.hidden_size, &e))?;
        let gate_up = r.name("gate_up", ORDERS)?;
        Ok(Self { num_experts: r.size("num_experts")?, shard, gate_up })
    }

    fn json(&self) -> Value {
        let s = self.shard;
        json!({
            "num_experts": self.num_experts, "hidden_size": s.hidden_size,
            "intermediate_size": s.intermediate_size, "tp_size": s.tp_size, "tp_rank": s.tp_rank,
            "backend": name_of(&PaddedKernel::NAMED, &s.backend), "platform": name_of(PLATFORMS, &s.platform),
            "gate_up": name_of(ORDERS, &self.gate_up),
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let e = is(self.num_experts);
        let (e8m0, bf16) = ([DType::U8, DType::F8E8M0], [DType::BF16]);
        let mut rules = Vec::new();
        for ExpertMatrix { name, model: [n, k], padded: [padded_n, padded_k] } in self.matrices()? {
            let part = |part: &str| format!("{name}_{part}");
            rules.extend([
                input(&part("weight"), U8, &[e, is(n), is(k / 2)]),
                input(&part("weight_scale"), &e8m0, &[e, is(n), is(k / 32)]),
                input(&part("bias"), &bf16, &[e, is(n)]),
                output(&part("weight"), U8, &[e, is(padded_n), is(padded_k / 2)]),
                output(&part("weight_scale"), &e8m0, &[e, is(padded_n), is(padded_k / 32)]),
                output(&part("bias"), &bf16, &[e, is(padded_n)]),
            ]);
        }
        Ok(rules)
    }

    /// Any byte is valid, since the operation only moves bytes.
    fn check_inputs(&self, _inputs: &Inputs<'_>) -> Result<()> {
        Ok(())
    }

    /// The padding of every kernel, ranks with equal and with fewer blocks, and all orders of gate
    /// and up.
    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for (_, backend) in PaddedKernel::NAMED {
            for platform in [Platform::Cuda, Platform::Rocm, Platform::Xpu] {
                for gate_up in [GateUp::Interleaved, GateUp::Halves, GateUp::SwappedHalves] {
                    for (hidden_size, intermediate_size, tp_size) in
                        [(32, 32, 1), (96, 160, 1), (64, 128, 2), (64, 96, 2)]
                    {
                        for tp_rank in 0..tp_size {
                            let shard = PaddedShard {
                                hidden_size,
                                intermediate_size,
                                tp_size,
                                tp_rank,
                                backend,
                                platform,
                            };
                            all.push(LoadWeightsConfig { num_experts: 2, shard, gate_up });
                        }
                    }
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Loaded::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Loaded>()
    }
}

/// `load_weights_mxfp4`.
#[derive(Debug, Clone)]
struct Loaded {
    config: LoadWeightsConfig,
    w13: Vec<Weight<'static>>,
    w2: Vec<Weight<'static>>,
    /// How files store the scales.
    scale_type: DType,
    /// Padding value of the scales.
    padding: u32,
    /// Whether only the first rank has w2's bias.
    bias_once: bool,
}

impl Loaded {
    fn new(case: &Case<'_>, c: &LoadWeightsConfig) -> Result<Self> {
        let [w13, w2] = c.matrices()?;
        let stack = |ExpertMatrix { name, model: [size_n, size_k], .. }: ExpertMatrix| {
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
                let first = PaddedShard { tp_rank: 0, ..shard };
                made.bias = first.w2(w)?.bias;
            }
            Ok(made)
        });
        Ok([w13, w2.collect::<Result<_>>()?])
    }

    /// K and N without padding. In halves, each half of w13 is padded, so only the interleaved
    /// order has a single unpadded rectangle.
    fn inside(&self, which: usize, [size_n, size_k]: [usize; 2]) -> Result<[usize; 2]> {
        let (features, h) = (self.config.shard.features()?.len(), self.config.shard.hidden_size);
        Ok(match which {
            0 if self.config.gate_up == GateUp::Interleaved => [h, 2 * features],
            0 => [h, size_n],
            _ => [features.min(size_k), h],
        })
    }
}

impl Computation for Loaded {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let experts = self.config.num_experts;
        let mut all = Vec::new();
        let prepared = self.prepared()?;
        let matrices = self.config.matrices()?.into_iter().zip(prepared);
        for (which, (matrix, weights)) in matrices.enumerate() {
            let ExpertMatrix { name, padded, .. } = matrix;
            let [n, k] = padded;
            let inside = self.inside(which, padded)?;
            let (mut bytes, mut scales, mut bias) = (Vec::new(), Vec::new(), Vec::new());
            for weight in &weights {
                let words = transposed(weight.codes.words(), k / 8, n);
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
        fn order(c: &mut Loaded, order: GateUp) {
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
