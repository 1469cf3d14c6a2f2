//! A product of NVFP4 activations and an NVFP4 weight whose fused shards have separate global
//! scales.

use serde_json::{Value, json};

use crate::judge::compare::{Elements, Rows, elements};
use crate::judge::power::{Accepted, rejects_sample};
use crate::judge::{Declared, OutputReport};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::bounded::{self, BoundedProduct, every_bit};
use crate::ops::case::Case;
use crate::ops::computation::{
    Computation, Defined, Expected, Form, Mistake, bitwise, codes, ids, known,
};
use crate::ops::draw::Rng;
use crate::ops::draw::{any_bits, block_scales, positive_values};
use crate::ops::interleaving::{misread, of_next_row};
use crate::ops::schema::{
    CaseError, Demand, Inputs, Reader, TensorRule, e4m3_scales, positive, stored,
};
use crate::ops::tensors::{E4M3, F32, HALF, HALF_TYPES, U8, input, is, name_of, output, whole};
use crate::ops::{CaseConfig, Operation};
use crate::products::tensor_core::{Architecture, BlockScaledUnit, find_block_scaled};
use crate::products::{BlockScaledProduct, BlockScaledRows, Bounded};
use crate::weight::{Groups, Table, TableData, Weight};
use crate::{Error, Result};

/// Number of rows on which a missing half of k is tested.
const SAMPLE_ROWS: usize = 2;

/// Architectures whose block-scaled instructions a schedule may name.
const UNITS: &[(&str, Architecture)] =
    &[("blackwell", Architecture::Blackwell), ("rtx_blackwell", Architecture::RtxBlackwell)];

/// Config of `cutlass_scaled_fp4_mm`: a product of NVFP4 activations and an NVFP4 weight.
///
/// in: `a` `[M, K / 2]` uint8, `a_scale` `[M, K / 16]` e4m3, `a_global_scale` `[1]` (a multiplier);
/// `weight` `[N, K / 2]`, `weight_scale` `[N, K / 16]`, `weight_global_scale` `[shards]`, multipliers, one
/// for each of `logical_widths`. out: `y` `[M, N]`, where each shard's sums are multiplied by its own
/// global scale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fp4MmConfig {
    /// Type of y.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// Columns.
    pub size_n: usize,
    /// Multiple of 16.
    pub size_k: usize,
    /// `logical_widths`: columns of each fused shard; by default one shard of N columns.
    pub widths: Vec<usize>,
    /// `schedule` `{"architecture": …}`: one instruction after the other in ascending k, compared
    /// bit for bit.
    pub schedule: Option<Architecture>,
}

impl Fp4MmConfig {
    /// The unit of the declared schedule.
    pub fn unit(&self) -> Option<&'static BlockScaledUnit> {
        find_block_scaled(self.schedule?, ScalarType::FLOAT8_E4M3FN, 16)
    }

    /// The unit whose class bounds a product without a schedule; all architectures have the same
    /// class.
    pub(crate) fn any_unit(&self) -> Option<&'static BlockScaledUnit> {
        find_block_scaled(Architecture::Blackwell, ScalarType::FLOAT8_E4M3FN, 16)
    }
}

impl Operation for Fp4MmConfig {
    fn keys() -> &'static [&'static str] {
        &["dtype", "size_m", "size_n", "size_k", "logical_widths", "schedule", "convention"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let schedule = match r.object("schedule", "schedule.", &["architecture"])? {
            Some(schedule) => Some(schedule.name("architecture", UNITS)?),
            None => None,
        };
        let size_n = r.size("size_n")?;
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.count("size_m")?,
            size_n,
            size_k: r.size("size_k")?,
            widths: r.sizes("logical_widths")?.unwrap_or_else(|| vec![size_n]),
            schedule,
        };
        whole(r, "size_k", config.size_k, 16)?;
        let sum = config.widths.iter().try_fold(0usize, |sum, &w| sum.checked_add(w));
        if sum != Some(size_n) {
            let expected = format!("widths that add up to size_n {size_n}");
            return Err(r.refuse("logical_widths", format!("{:?}", config.widths), expected));
        }
        Ok(config)
    }

    fn json(&self) -> Value {
        let architecture = |a: Architecture| json!({"architecture": name_of(UNITS, &a)});
        json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_n": self.size_n,
            "size_k": self.size_k, "logical_widths": self.widths,
            "schedule": self.schedule.map(architecture),
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, n, k) = (is(self.size_m), is(self.size_n), self.size_k);
        Ok(vec![
            input("a", U8, &[m, is(k / 2)]),
            input("a_scale", E4M3, &[m, is(k / 16)]),
            input("a_global_scale", F32, &[is(1)]),
            input("weight", U8, &[n, is(k / 2)]),
            input("weight_scale", E4M3, &[n, is(k / 16)]),
            input("weight_global_scale", F32, &[is(self.widths.len())]),
            output("y", &[stored(self.dtype)], &[m, n]),
        ])
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        for name in ["a_scale", "weight_scale"] {
            e4m3_scales(&inputs[name])?;
        }
        positive(&inputs["a_global_scale"])?;
        positive(&inputs["weight_global_scale"])
    }

    /// Includes K that does not fill whole instructions of 64, and several shards.
    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for dtype in HALF {
            for (size_m, size_k) in [(1, 16), (3, 64), (5, 80), (17, 192)] {
                for widths in [vec![8], vec![16, 16], vec![32, 8, 8]] {
                    for schedule in
                        [None, Some(Architecture::Blackwell), Some(Architecture::RtxBlackwell)]
                    {
                        let size_n = widths.iter().sum();
                        let widths = widths.clone();
                        all.push(Fp4MmConfig { dtype, size_m, size_n, size_k, widths, schedule });
                    }
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Fp4Mm::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Fp4Mm>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let (m, n, k) = (self.size_m, self.size_n, self.size_k);
        case.add_input("a", any_bits(rng, DType::U8, vec![m, k / 2])?);
        case.add_input("a_scale", block_scales(rng, vec![m, k / 16])?);
        case.add_input("a_global_scale", positive_values(rng, vec![1])?);
        case.add_input("weight", any_bits(rng, DType::U8, vec![n, k / 2])?);
        case.add_input("weight_scale", block_scales(rng, vec![n, k / 16])?);
        case.add_input("weight_global_scale", positive_values(rng, vec![self.widths.len()])?);
        Ok(())
    }

    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        let product = Demand::product(self.size_m, self.size_n, self.size_k);
        Ok(case.output("y").map(|_| product).into_iter().collect())
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        judge(case, &Fp4Mm::new(case, self)?)
    }

    fn fixes_every_bit(&self) -> bool {
        self.schedule.is_some()
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        Some((Self { size_m: 1, ..self.clone() }.into(), &["a", "a_scale"]))
    }
}

/// `cutlass_scaled_fp4_mm`.
#[derive(Debug, Clone)]
struct Fp4Mm {
    config: Fp4MmConfig,
    a: Vec<u8>,
    /// `[M, K / 16]`.
    a_scale: Table,
    a_global: f32,
    /// The whole matrix, without a global scale.
    weight: Weight<'static>,
    /// Multipliers, one for each shard.
    globals: Vec<f32>,
}

impl Fp4Mm {
    fn new(case: &Case<'_>, c: &Fp4MmConfig) -> Result<Self> {
        let e4m3 = ScalarType::FLOAT8_E4M3FN;
        let values = |name: &str| Ok::<_, Error>(case.input(name)?.elements::<f32>().into_owned());
        let scales = |name: &str| Table::from_tensor(case.input(name)?, e4m3);
        let nibbles = case.input("a")?.bytes().iter().flat_map(|b| [b & 15, b >> 4]);
        let weight = Weight {
            name: "in.weight".to_owned(),
            ty: ScalarType::FLOAT4_E2M1F,
            codes: codes(case.input("weight")?, 4, Shape::new(c.size_k, c.size_n))?,
            scales: scales("weight_scale")?.transposed(),
            zeros: None,
            groups: Groups::Uniform(GroupSize::Of(16)),
            global_scale: None,
            bias: None,
        };
        Ok(Self {
            config: c.clone(),
            a: nibbles.collect(),
            a_scale: scales("a_scale")?,
            a_global: values("a_global_scale")?[0],
            weight,
            globals: values("weight_global_scale")?,
        })
    }

    /// Combines the results of `make` for each shard to `[M, N]`.
    fn shards<T: Copy>(
        &self,
        make: impl Fn(&BlockScaledProduct<'_>) -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        let scales = self.a_scale.iter_bits().map(|b| b as u8).collect();
        let rows = BlockScaledRows::new(self.config.size_k, self.a.clone(), scales, self.a_global)?;
        let mut shards = Vec::new();
        let mut start = 0;
        for (&width, &global) in self.config.widths.iter().zip(&self.globals) {
            let weight = self.weight.slice_columns(start..start + width)?;
            let weight = Weight { global_scale: Some(global), ..weight };
            shards
                .push((width, make(&BlockScaledProduct::new(&rows, &weight, self.config.dtype)?)?));
            start += width;
        }
        let row =
            |m: usize| shards.iter().flat_map(move |(width, all)| &all[m * width..][..*width]);
        Ok((0..self.config.size_m).flat_map(row).copied().collect())
    }

    fn unit(&self) -> Result<&'static BlockScaledUnit> {
        let unit = self.config.unit().or(self.config.any_unit());
        unit.ok_or_else(|| Error::unsupported("block-scaled e2m1", "no unit for it is known"))
    }

    fn bits(&self) -> Result<Elements> {
        let unit = self.unit()?;
        self.shards(|product| product.in_order(unit))
    }

    /// Whether `found` equals the result of instructions in ascending k bit for bit. The other rows
    /// are computed only if the first row matches.
    fn is_in_order(&self, found: &[u32]) -> Result<bool> {
        let c = &self.config;
        let scales = self.a_scale.iter_bits().take(c.size_k / 16).map(|b| b as u8).collect();
        let first = Self {
            config: Fp4MmConfig { size_m: 1, ..c.clone() },
            a: self.a[..c.size_k].to_vec(),
            a_scale: Table::new(self.a_scale.ty(), 1, c.size_k / 16, TableData::B8(scales))?,
            ..self.clone()
        };
        Ok(first.bits()? == found[..c.size_n] && self.bits()? == found)
    }
}

impl BoundedProduct for Fp4Mm {
    const CLASS: &'static str = "block-scaled-any-order";

    fn dtype(&self) -> ScalarType {
        self.config.dtype
    }

    fn size_n(&self) -> usize {
        self.config.size_n
    }

    fn bounds(&self) -> Result<Vec<Bounded>> {
        let unit = self.unit()?;
        self.shards(|product| product.bounds(&product.class(unit)?))
    }

    fn rejects_half_k(&self, accepted: &[Accepted]) -> Result<Option<bool>> {
        let c = &self.config;
        let rows = c.size_m.min(SAMPLE_ROWS);
        let mut half = self.clone();
        half.config.size_m = rows;
        half.a.truncate(rows * c.size_k);
        half.a_scale = self.a_scale.slice_rows(0..rows)?;
        half.a.chunks_exact_mut(c.size_k).for_each(|row| row[..c.size_k / 2].fill(0));
        let made = half.bounds()?;
        let made = made.iter().map(Accepted::from);
        Ok(rejects_sample(c.dtype, made.zip(accepted.iter().copied())))
    }
}

impl Computation for Fp4Mm {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let (m, n, dtype) = (self.config.size_m, self.config.size_n, self.config.dtype);
        Ok(vec![Expected {
            name: "y".to_owned(),
            dtype: if dtype == ScalarType::FLOAT16 { DType::F16 } else { DType::BF16 },
            shape: vec![m, n],
            elements: self.bits()?,
            form: Form::lines(Rows::List, [n, m], 16, None),
        }])
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "first-global-scale", "the first shard's global scale was taken for all of them" =>
                |c| {
                    let first = c.globals[0];
                    c.globals.fill(first);
                };
            "global-scales-exchanged", "the shards' global scales are exchanged" =>
                |c| c.globals.reverse();
            "global-scale-inverted", "the weight's global scale divides where it multiplies" =>
                |c| c.globals.iter_mut().for_each(|g| *g = 1.0 / *g);
            "global-scale-missing", "the weight's global scale was not applied" =>
                |c| c.globals.fill(1.0);
            "activation-global-scale-inverted",
            "the activations' global scale divides where it multiplies" =>
                |c| c.a_global = 1.0 / c.a_global;
            "activation-global-scale-missing", "the activations' global scale was not applied" =>
                |c| c.a_global = 1.0;
            "scales-not-swizzled", "the weight's scales were read as interleaved and are not" =>
                |c| if let Some(read) = misread(&c.weight.scales) {
                    c.weight.scales = read;
                };
            "activation-scales-not-swizzled",
            "the activations' scales were read as interleaved and are not" =>
                |c| if let Some(read) = misread(&c.a_scale.transposed()) {
                    // With few rows, only zeros of the padding may be read: as a sum without these k.
                    let own = c.a_scale.transposed();
                    let mut pairs = read.iter_bits().zip(own.iter_bits());
                    if pairs.any(|(read, own)| read != 0 && read != own) {
                        c.a_scale = read.transposed();
                    }
                };
            "nibble-order", "the nibbles of one operand are exchanged: even k in the high nibble" =>
                |c| {
                    let shape = c.weight.shape();
                    let word = |w: &u32| (w & 0x0f0f_0f0f) << 4 | w >> 4 & 0x0f0f_0f0f;
                    let words: Vec<u32> = c.weight.codes.words().iter().map(word).collect();
                    if let Ok(codes) = crate::weight::Codes::from_words(4, shape, words) {
                        c.weight.codes = codes;
                    }
                };
            "weight-signs-lost", "the signs of the weight's codes were lost" => |c| {
                let shape = c.weight.shape();
                let words = c.weight.codes.words().iter().map(|w| w & 0x7777_7777).collect::<Vec<_>>();
                if let Ok(codes) = crate::weight::Codes::from_words(4, shape, words) {
                    c.weight.codes = codes;
                }
            };
            "activation-signs-lost", "the signs of the activations' codes were lost" =>
                |c| c.a.iter_mut().for_each(|code| *code &= 7);
            "group-scale-of-next-group", "each group of the weight has the next one's scale" =>
                |c| c.weight.scales = of_next_row(&c.weight.scales);
            "activation-scale-of-next-group", "each group of the activations has the next one's scale" =>
                |c| c.a_scale = of_next_row(&c.a_scale.transposed()).transposed();
            "halves-swapped", "the halves of N are exchanged" => |c| {
                let n = c.config.size_n;
                let columns: Vec<usize> = (0..n).map(|i| (i + n / 2) % n).collect();
                if let Ok(weight) = c.weight.gather_columns(&columns) {
                    c.weight = weight;
                }
            };
        }
    }
}

/// Judges `y` bit for bit if a schedule is declared or ascending order gives it, otherwise by the
/// bound of a block-scaled unit in any order.
fn judge(case: &Case<'_>, mm: &Fp4Mm) -> Result<Vec<OutputReport>> {
    let Some(found) = case.output("y") else { return Ok(Vec::new()) };
    if mm.config.schedule.is_some() {
        let mut reports = bitwise(case, mm)?;
        for report in &mut reports {
            report.note = Some("compared for every bit with the declared schedule".to_owned());
        }
        return Ok(reports);
    }
    let bits = elements(found);
    if mm.is_in_order(&bits)? {
        let how = "a known schedule gives it: block-scaled instructions, k ascending";
        return Ok(vec![every_bit(bits.len(), how)]);
    }
    Ok(vec![bounded::judge(mm, found)?])
}
