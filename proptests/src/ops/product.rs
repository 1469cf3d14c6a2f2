//! Products with quantized matrices by the canonical schedule, which determines every bit for any M
//! and any division of the work.

mod bounds;
mod experts;

use std::fmt;

use marlinspike::Result;
use marlinspike::act_order;
use marlinspike::case::{
    CheckpointFormat, LinearConfig, ParallelStyle, QuantConfig, TensorParallel,
};
use marlinspike::formats;
use marlinspike::moe::layer::input_global_scale;
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule};
use marlinspike::vectors::{self, Rng};
use marlinspike::weight::{Groups, Weight};
use proptest::prelude::*;

use super::layer::activations;
use super::{Fill, dtype, finite_halves, one_of};
use crate::laws::{call, compare, expected, judged};
use crate::{Failure, Law, Operation, Subject};
use bounds::Matrix;
pub use experts::{ExpertInput, ExpertProduct};

/// The configuration of a product's matrices.
#[derive(Debug, Clone)]
pub struct ProductWeight {
    /// Format, types, groups, act-order, bias.
    pub quant: QuantConfig,
    /// K and N.
    pub shape: Shape,
}

/// Formats, each with a weight type.
fn forms() -> Vec<(CheckpointFormat, ScalarType)> {
    let of = |&format: &CheckpointFormat| format.weight_types().iter().map(move |&t| (format, t));
    formats::ALL.iter().flat_map(of).collect()
}

/// K of one chunk of the canonical schedule, of a part of one, and of two and more; includes odd
/// multiples of 64.
const SIZES_K: &[usize] = &[64, 128, 192, 256, 320, 512, 576, 1152];

impl ProductWeight {
    fn any() -> impl Strategy<Value = Self> {
        let groups = &[
            GroupSize::Channel,
            GroupSize::Of(16),
            GroupSize::Of(32),
            GroupSize::Of(64),
            GroupSize::Of(128),
        ];
        let inputs = &[None, None, None, Some(ScalarType::INT8), Some(ScalarType::FLOAT8_E4M3FN)];
        let flags = (any::<bool>(), any::<bool>(), one_of(inputs), any::<bool>());
        let kinds = (proptest::sample::select(forms()), dtype(), one_of(groups), flags);
        let sizes = (one_of(SIZES_K), one_of(&[64usize, 128, 192, 320]));
        (kinds, sizes).prop_map(|(kinds, (size_k, size_n))| {
            let ((checkpoint_format, weight_type), dtype, group_size, flags) = kinds;
            let (desc_act, has_bias, input_dtype, is_cut) = flags;
            let shape = Shape::new(size_k, size_n);
            let group_size = checkpoint_format.fixed_group().unwrap_or(group_size);
            // Codes whose values the 8-bit type can represent.
            let fits = |input: &ScalarType| match checkpoint_format {
                CheckpointFormat::Int(_) => weight_type.size_bits() == 4,
                CheckpointFormat::Block(format) => {
                    format.fp8_activations && *input == ScalarType::FLOAT8_E4M3FN
                }
                _ => false,
            };
            let input_dtype = input_dtype.filter(fits);
            // Groups of 8-bit products are separate sums, which sorted rows would cut.
            let desc_act = desc_act && input_dtype.is_none() && checkpoint_format.has_act_order();
            // A slice of K whose rows belong to groups of the whole matrix.
            let is_cut = is_cut && desc_act && group_size != GroupSize::Channel;
            let style = ParallelStyle::Row;
            let quant = QuantConfig {
                checkpoint_format,
                weight_type,
                dtype,
                input_dtype,
                group_size,
                desc_act,
                is_k_full: !is_cut,
                has_bias,
                tensor_parallel: is_cut.then_some(TensorParallel { size: 2, rank: 1, style }),
                convention: None,
            };
            Self { quant, shape }
        })
    }

    /// Draws `count` matrices, if the reference has a canonical product with them.
    fn draw(&self, rng: &mut Rng, count: usize) -> Option<Vec<Weight<'static>>> {
        let Self { quant, shape } = self;
        let is_row = |tp: &TensorParallel| tp.style == ParallelStyle::Row;
        let whole_k = shape.size_k * quant.tensor_parallel.filter(is_row).map_or(1, |tp| tp.size);
        let weights: Option<Vec<_>> = (0..count)
            .map(|e| vectors::weight(rng, &format!("w[{e}]"), quant, *shape, whole_k).ok())
            .collect();
        let first = weights.as_ref()?.first()?;
        Schedule::canonical(first, quant.dtype, self.input()).ok()?;
        weights
    }

    /// The type that enters the unit.
    fn input(&self) -> ScalarType {
        self.quant.input_dtype.unwrap_or(self.quant.dtype)
    }

    /// For 8-bit activations, a scale for each row.
    fn row_scales(&self, rng: &mut Rng, size_m: usize) -> Option<Vec<f32>> {
        let scale = |rng: &mut Rng| rng.between(1, 1 << 20) as f32 / (1 << 27) as f32;
        self.quant.input_dtype.map(|_| (0..size_m).map(|_| scale(rng)).collect())
    }

    /// The scales of rows as a schedule takes them. With int8 activations, group scales are integers,
    /// and their unit multiplies the activation scales.
    fn scales_of_rows(&self, weights: &[Weight<'static>], scales: &[f32]) -> Vec<f32> {
        let factor = match self.input() {
            ScalarType::INT8 => input_global_scale(weights),
            _ => 1.0,
        };
        scales.iter().map(|scale| scale * factor).collect()
    }

    fn rows(&self, rng: &mut Rng, size_m: usize) -> Vec<u16> {
        let (size_k, dtype) = (self.shape.size_k, self.quant.dtype);
        match self.quant.input_dtype {
            Some(ScalarType::INT8) => {
                return (0..size_m * size_k).map(|_| rng.between(0, 255) as u16).collect();
            }
            Some(_) => {
                // No NaN: magnitudes up to 448.
                let code = |rng: &mut Rng| rng.between(0, 1) << 7 | rng.between(0, 0x7e);
                return (0..size_m * size_k).map(|_| code(rng) as u16).collect();
            }
            None => {}
        }
        match rng.below(6) {
            // Sums that overflow, cancel and become subnormal.
            0 => finite_halves(Fill::Noise(rng.next_u64()), size_m * size_k, dtype),
            _ => activations(rng, dtype, size_m, size_k),
        }
    }
}

impl fmt::Display for ProductWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { quant: q, shape } = self;
        write!(
            f,
            "{} {} {} input {} {shape} group_size {} desc_act {} is_k_full {} bias {}",
            q.checkpoint_format,
            q.weight_type,
            q.dtype,
            self.input(),
            q.group_size,
            q.has_act_order(),
            q.is_k_full,
            q.has_bias
        )
    }
}

/// Row counts: one tile of eight, around tiles, around a block of 64, sometimes more.
fn size_m() -> impl Strategy<Value = usize> {
    prop_oneof![6 => 1usize..18, 2 => 31usize..34, 2 => 63usize..67, 1 => 127usize..131]
}

/// `marlin_gemm`, also for 8-bit activations: y = x · W, plus bias.
#[derive(Debug)]
pub struct DenseProduct;

/// Arguments of [`DenseProduct`].
#[derive(Clone)]
pub struct DenseInput {
    /// Configuration of the weight.
    pub form: ProductWeight,
    /// `[K, N]`.
    pub weight: Weight<'static>,
    /// `[M, K]`, bits of the form's `dtype` or zero-extended 8-bit codes, columns in the model's
    /// order.
    pub x: Vec<u16>,
    /// `[M]`: for 8-bit activations, the scale of each row.
    pub x_scales: Option<Vec<f32>>,
    /// A number from which a subject may derive its division of the work.
    pub choice: u64,
}

impl DenseInput {
    /// Draws `size_m` rows and a weight of `config`; `None` if its groups leave no canonical product.
    pub fn draw(config: &LinearConfig, seed: u64, size_m: usize) -> Option<Self> {
        let shape = Shape::new(config.size_k, config.size_n);
        let form = ProductWeight { quant: config.quant.clone(), shape };
        // With 8-bit activations and act-order, groups that cut an instruction have no product.
        (0..64).find_map(|attempt| {
            let mut rng = Rng::for_case(seed, attempt);
            let weight = form.draw(&mut rng, 1)?.pop()?;
            let x = form.rows(&mut rng, size_m);
            let x_scales = form.row_scales(&mut rng, size_m);
            let input = Self { form: form.clone(), weight, x, x_scales, choice: rng.next_u64() };
            DenseProduct::expected(&input).is_ok().then_some(input)
        })
    }

    /// Rows of x.
    pub fn size_m(&self) -> usize {
        self.x.len() / self.form.shape.size_k
    }

    /// The same input with the rows `rows` of x, in that order.
    pub fn with_rows(&self, rows: &[usize]) -> Self {
        let size_k = self.form.shape.size_k;
        let x = rows.iter().flat_map(|&m| self.x[m * size_k..][..size_k].iter().copied()).collect();
        let pick = |scales: &Vec<f32>| rows.iter().map(|&m| scales[m]).collect();
        Self { x, x_scales: self.x_scales.as_ref().map(pick), ..self.clone() }
    }

    /// A permutation that sorts the weight's `g_idx`, under act-order.
    pub fn order(&self) -> Option<Vec<u32>> {
        match &self.weight.groups {
            Groups::Indexed { g_idx, .. } => Some(act_order::sort(g_idx).perm),
            Groups::Uniform(_) => None,
        }
    }

    /// Rows `rows` of an output.
    fn rows_of(&self, y: &[u16], rows: impl IntoIterator<Item = usize>) -> Vec<u16> {
        let n = self.form.shape.size_n;
        rows.into_iter().flat_map(|m| y[m * n..][..n].iter().copied()).collect()
    }
}

/// Omits the data, which the seed reproduces.
impl fmt::Debug for DenseInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&DenseProduct::describe(self))
    }
}

impl Operation for DenseProduct {
    const NAME: &'static str = "marlin_gemm";
    type Input = DenseInput;
    type Element = u16;

    fn inputs() -> BoxedStrategy<DenseInput> {
        (ProductWeight::any(), size_m(), any::<u64>(), any::<u64>())
            .prop_filter_map("a canonical product", |(form, size_m, seed, choice)| {
                let mut rng = Rng::new(seed);
                let weight = form.draw(&mut rng, 1)?.pop()?;
                let x = form.rows(&mut rng, size_m);
                let x_scales = form.row_scales(&mut rng, size_m);
                Some(DenseInput { form, weight, x, x_scales, choice })
            })
            .boxed()
    }

    fn expected(i: &DenseInput) -> Result<Vec<u16>> {
        let (dtype, input) = (i.form.quant.dtype, i.form.input());
        let x: Vec<u32> = i.x.iter().map(|&bits| bits.into()).collect();
        let order = i.order();
        let weights = std::slice::from_ref(&i.weight);
        let scales: Option<Vec<f32>> =
            i.x_scales.as_ref().map(|scales| i.form.scales_of_rows(weights, scales));
        let extras = Extras {
            order: order.as_deref(),
            activation_scales: scales.as_deref(),
            ..Extras::default()
        };
        let x = rows_of("x", &x, i.form.shape.size_k)?;
        let y = Schedule::canonical(&i.weight, dtype, input)?.execute(x, &i.weight, extras)?;
        Ok(y.into_iter().map(|bits| bits as u16).collect())
    }

    fn len(i: &DenseInput) -> Result<usize> {
        Ok(i.size_m() * i.form.shape.size_n)
    }

    fn out_of_bounds(i: &DenseInput, found: &[u16]) -> Result<Option<Vec<usize>>> {
        let order = i.order();
        let matrix = Matrix { form: &i.form, weight: &i.weight, order: order.as_deref() };
        matrix.outside(&i.x, i.x_scales.as_deref(), None, found).map(Some)
    }

    fn place(i: &DenseInput, element: usize, _bit: u32) -> String {
        let n = i.form.shape.size_n;
        format!("row {} column {}", element / n, element % n)
    }

    fn describe(i: &DenseInput) -> String {
        format!("M {} {} choice {:#x}", i.size_m(), i.form, i.choice)
    }

    fn own_laws() -> Vec<Law<Self>> {
        vec![
            Law { name: "a row alone is as right as among others", check: row_alone },
            Law { name: "rows in another order are as right", check: rows_reversed },
            Law { name: "another division of the work is as right", check: divided },
        ]
    }
}

/// Compares `found`, an output of `i`, with what the same kernel gave for these rows elsewhere; without a
/// claim of bits, with the reference.
fn same_rows(
    s: &dyn Subject<DenseProduct>,
    i: &DenseInput,
    elsewhere: impl FnOnce() -> Result<Vec<u16>, Failure>,
    what: &str,
) -> Result<(), Failure> {
    let found = call(s, i, 0xff)?;
    match s.claims_bits() {
        true => compare::<DenseProduct>(i, &elsewhere()?, &found, what),
        false => judged::<DenseProduct>(i, &expected::<DenseProduct>(i)?, &found, what),
    }
}

fn row_alone(s: &dyn Subject<DenseProduct>, i: &DenseInput) -> Result<(), Failure> {
    let m = i.choice as usize % i.size_m();
    let among = || Ok(i.rows_of(&call(s, i, 0)?, [m]));
    same_rows(s, &i.with_rows(&[m]), among, "a row alone")
}

fn rows_reversed(s: &dyn Subject<DenseProduct>, i: &DenseInput) -> Result<(), Failure> {
    let order: Vec<usize> = (0..i.size_m()).rev().collect();
    let reversed = i.with_rows(&order);
    same_rows(s, &reversed, || Ok(i.rows_of(&call(s, i, 0)?, order)), "reversed rows")
}

fn divided(s: &dyn Subject<DenseProduct>, i: &DenseInput) -> Result<(), Failure> {
    (1..4).try_for_each(|turn| {
        let other = DenseInput { choice: i.choice.rotate_left(16 * turn), ..i.clone() };
        same_rows(s, &other, || call(s, i, 0), "another division of the work")
    })
}
