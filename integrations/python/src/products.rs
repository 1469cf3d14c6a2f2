//! Products and layers of packed weights, by upstream's functions: the canonical arithmetic.

use marlinspike::layouts::marlin::{Activations, InputDtype, ScalePermutation, Stored};
use marlinspike::moe::Chain;
use marlinspike::moe::activation::{Activation, Definition};
use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::moe::sum::sum;
use marlinspike::num::array::{FloatView3, rows_of};
use marlinspike::num::dims::{GroupSize, LogicalK, Shape};
use marlinspike::num::scalar::{ScalarType, float_type};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::products::schedule::{Extras, Schedule};
use marlinspike::weight::{Groups, Weight};
use marlinspike::{Error, Result};
use numpy::ndarray::Array2;
use pyo3::prelude::*;

use crate::arrays::{Input, Output, output};
use crate::error::{Failed, raised};

/// The tensors of a packed matrix, or of a stack of them: weight, scales, zero points, `g_idx` and its
/// sort, bias, global scale.
#[derive(FromPyObject)]
pub(crate) struct Packed<'py>(
    Input<'py>,
    Input<'py>,
    Option<Input<'py>>,
    Option<(Input<'py>, Input<'py>)>,
    Option<Input<'py>>,
    Option<Input<'py>>,
);

/// The same in Rust; without an axis of experts for a single matrix.
pub(crate) struct Parts<'t> {
    weight: Tensor<'t>,
    scales: Tensor<'t>,
    zeros: Option<Tensor<'t>>,
    order: Option<[Tensor<'t>; 2]>,
    bias: Option<Tensor<'t>>,
    global_scale: Option<Tensor<'t>>,
}

impl Packed<'_> {
    pub(crate) fn parts(&self, name: &str) -> PyResult<Parts<'_>> {
        let named = |part: &str| format!("{name}.{part}");
        Ok(Parts {
            weight: self.0.tensor(&named("weight"))?,
            scales: self.1.tensor(&named("scales"))?,
            zeros: self.2.as_ref().map(|t| t.tensor(&named("zeros"))).transpose()?,
            order: match &self.3 {
                None => None,
                Some((g_idx, perm)) => {
                    Some([g_idx.tensor(&named("g_idx"))?, perm.tensor(&named("perm"))?])
                }
            },
            bias: self.4.as_ref().map(|t| t.tensor(&named("bias"))).transpose()?,
            global_scale: self.5.as_ref().map(|t| t.tensor(&named("global_scale"))).transpose()?,
        })
    }
}

impl<'t> Parts<'t> {
    /// One expert's part of a stack.
    fn expert(&'t self, expert: usize) -> Result<Self> {
        let part = |tensor: &'t Tensor<'t>| tensor.index0(expert);
        Ok(Self {
            weight: part(&self.weight)?,
            scales: part(&self.scales)?,
            zeros: self.zeros.as_ref().map(part).transpose()?,
            order: match &self.order {
                None => None,
                Some([g_idx, perm]) => Some([part(g_idx)?, part(perm)?]),
            },
            bias: self.bias.as_ref().map(part).transpose()?,
            global_scale: self.global_scale.as_ref().map(part).transpose()?,
        })
    }

    /// The weight that the packed bytes represent, and the order of its rows in the kernel.
    pub(crate) fn restore(
        self,
        name: String,
        ty: ScalarType,
        dtype: ScalarType,
        shape: Shape,
    ) -> Result<(Weight<'static>, Option<Vec<u32>>)> {
        let [groups, _] = self.scales.dims2()?;
        if groups == 0 || !shape.size_k.is_multiple_of(groups) {
            let expected = format!("a number of groups that divides size_k {}", shape.size_k);
            return Err(Error::shape(self.scales.name(), self.scales.shape(), expected));
        }
        let group_size = match groups {
            1 => GroupSize::Channel,
            groups => GroupSize::Of(shape.size_k / groups),
        };
        let permutation =
            ScalePermutation::choose(group_size, LogicalK(shape.size_k), Activations::Bits16);
        let order = self.order.as_ref().map(|[_, perm]| perm.elements::<u32>().into_owned());
        let global = self.global_scale.as_ref().map(one_float).transpose()?;
        let stored = Stored {
            name,
            ty,
            dtype,
            input_dtype: InputDtype::Model,
            shape,
            group_size,
            permutation,
            weight: self.weight,
            scales: self.scales,
            zeros: self.zeros,
            order: self.order,
            bias: self.bias,
            // The factor that the block scales took from the global scale stays in them.
            global: global.map(|scale| [scale, 1.0]),
        };
        let weight = stored.restore()?;
        let order = order.filter(|_| matches!(weight.groups, Groups::Indexed { .. }));
        Ok((weight, order))
    }
}

/// The value of a tensor of one float.
fn one_float(tensor: &Tensor<'_>) -> Result<f32> {
    if tensor.len() != 1 {
        return Err(Error::shape(tensor.name(), tensor.shape(), "one value"));
    }
    match tensor.dtype() {
        DType::F32 => Ok(tensor.elements::<f32>()[0]),
        DType::F16 | DType::BF16 => {
            let ty = float_type(tensor.dtype()).unwrap_or(ScalarType::FLOAT16);
            Ok(ty.to_f64(tensor.elements::<u16>()[0].into()) as f32)
        }
        other => Err(Error::dtype(tensor.name(), other, "F32, F16 or BF16")),
    }
}

pub(crate) fn activation_named(name: &str) -> PyResult<Definition> {
    let named = Activation::NAMED.iter().find(|(known, _)| *known == name);
    named.map(|&(_, activation)| Definition::new(activation)).ok_or_else(|| {
        let known: Vec<_> = Activation::NAMED.iter().map(|(name, _)| *name).collect();
        raised(format!("activation: found {name}, expected one of {}", known.join(", ")))
    })
}

pub(crate) fn weight_type(name: &str) -> PyResult<ScalarType> {
    let known = [
        ScalarType::UINT4B8,
        ScalarType::UINT8B128,
        ScalarType::UINT4,
        ScalarType::UINT8,
        ScalarType::FLOAT8_E4M3FN,
        ScalarType::FLOAT4_E2M1F,
    ];
    known.into_iter().find(|ty| ty.name() == name).ok_or_else(|| {
        let known: Vec<_> = known.iter().map(|ty| ty.name()).collect();
        raised(format!("quant_type: found {name}, expected one of {}", known.join(", ")))
    })
}

/// The 16-bit type of activations.
pub(crate) fn half(tensor: &Tensor<'_>) -> Result<ScalarType> {
    tensor.expect_dtype(&[DType::F16, DType::BF16])?;
    Ok(float_type(tensor.dtype()).unwrap_or(ScalarType::FLOAT16))
}

/// The 16-bit type of that name.
pub(crate) fn half_named(dtype: &str) -> PyResult<ScalarType> {
    match dtype {
        "float16" => Ok(ScalarType::FLOAT16),
        "bfloat16" => Ok(ScalarType::BFLOAT16),
        _ => Err(raised(format!("dtype: found {dtype}, expected float16 or bfloat16"))),
    }
}

/// A product's activations, the parts of its weight, and the weight's type.
pub(crate) fn operands<'t>(
    a: &'t Input<'_>,
    packed: &'t Packed<'_>,
    quant_type: &str,
) -> PyResult<(Tensor<'t>, Parts<'t>, ScalarType)> {
    Ok((a.tensor("a")?, packed.parts("b")?, weight_type(quant_type)?))
}

/// The outputs of `schedule` for 16-bit activations `[M, K]`.
pub(crate) fn execute(
    schedule: &Schedule,
    a: &Tensor<'_>,
    weight: &Weight<'_>,
    extras: Extras<'_>,
) -> Result<Array2<u32>> {
    let [_, cols] = a.dims2()?;
    let size_k = weight.shape().size_k;
    if cols != size_k {
        return Err(Error::shape("a", a.shape(), format!("[size_m, {size_k}]")));
    }
    let x: Vec<u32> = a.elements::<u16>().iter().map(|&bits| bits.into()).collect();
    schedule.execute(rows_of("a", &x, cols)?, weight, extras)
}

/// y `[M, N]` of activations and a packed weight.
#[pyfunction]
pub(crate) fn marlin_gemm<'py>(
    py: Python<'py>,
    a: Input<'py>,
    packed: Packed<'py>,
    quant_type: &str,
    size_n: usize,
    size_k: usize,
) -> PyResult<Output<'py>> {
    let (a, parts, ty) = operands(&a, &packed, quant_type)?;
    let made = py.detach(|| -> Result<_> {
        let dtype = half(&a)?;
        let (weight, order) =
            parts.restore("b".to_owned(), ty, dtype, Shape::new(size_k, size_n))?;
        let schedule = Schedule::canonical(&weight, dtype, dtype)?;
        let extras = Extras { order: order.as_deref(), ..Extras::default() };
        let y = execute(&schedule, &a, &weight, extras)?;
        let bits = y.into_iter().map(|bits| bits as u16).collect();
        Tensor::from_vec("y", a.dtype(), vec![a.shape()[0], size_n], bits)
    });
    Ok(output(py, made.failed()?))
}

/// y `[M, H]` of a layer of packed experts.
#[pyfunction]
pub(crate) fn fused_marlin_moe<'py>(
    py: Python<'py>,
    hidden_states: Input<'py>,
    w1: Packed<'py>,
    w2: Packed<'py>,
    topk_weights: Input<'py>,
    topk_ids: Input<'py>,
    quant_type: &str,
    activation: &str,
    intermediate_size: usize,
    num_experts: usize,
    expert_map: Option<Input<'py>>,
    apply_router_weight_on_input: bool,
) -> PyResult<Output<'py>> {
    let x = hidden_states.tensor("hidden_states")?;
    let (w1, w2) = (w1.parts("w1")?, w2.parts("w2")?);
    let (weights, ids) = (topk_weights.tensor("topk_weights")?, topk_ids.tensor("topk_ids")?);
    let map = expert_map.as_ref().map(|map| map.tensor("expert_map")).transpose()?;
    let ty = weight_type(quant_type)?;
    let definition = activation_named(activation)?;
    let made = py.detach(|| -> Result<_> {
        let dtype = half(&x)?;
        let [size_m, hidden_size] = x.dims2()?;
        let stack = |name: &str, parts: &Parts<'_>, shape: Shape| -> Result<_> {
            let [experts, ..] = parts.weight.dims3()?;
            let mut weights = Vec::new();
            let mut orders = Vec::new();
            for e in 0..experts {
                let (weight, order) =
                    parts.expert(e)?.restore(format!("{name}[{e}]"), ty, dtype, shape)?;
                weights.push(weight);
                orders.extend(order);
            }
            Ok((weights, (orders.len() == experts).then_some(orders)))
        };
        let width = definition.width_in(intermediate_size);
        let (w13, order13) = stack("w1", &w1, Shape::new(hidden_size, width))?;
        let (w2, order2) = stack("w2", &w2, Shape::new(intermediate_size, hidden_size))?;
        ids.expect_dtype(&[DType::I32])?;
        weights.expect_dtype(&[DType::F32])?;
        let map = match &map {
            None => None,
            Some(map) => Some(map.expect_dtype(&[DType::I32])?.elements::<i32>()),
        };
        let layer = Layer {
            w13: &w13,
            w2: &w2,
            orders: [order13.as_deref(), order2.as_deref()],
            num_experts,
            expert_map: map.as_deref(),
            activation: definition,
            dtype,
            input_dtype: None,
            router_weight_on_input: apply_router_weight_on_input,
        };
        let [_, top_k] = ids.dims2()?;
        let (topk_ids, topk_weights) = (ids.elements::<i32>(), weights.elements::<f32>());
        let routed = Routed::from_rows(top_k, &topk_ids, &topk_weights)?;
        let stages = layer.forward(x.float_view2()?, routed, &layer.canonical()?)?;
        Tensor::from_vec("y", x.dtype(), vec![size_m, hidden_size], stages.y.into_bits())
    });
    Ok(output(py, made.failed()?))
}

/// The activation of rows `[M, width]`.
#[pyfunction]
pub(crate) fn moe_activation<'py>(
    py: Python<'py>,
    gate_up: Input<'py>,
    activation: &str,
) -> PyResult<Output<'py>> {
    let gate_up = gate_up.tensor("gate_up")?;
    let definition = activation_named(activation)?;
    let made = py.detach(|| -> Result<_> {
        half(&gate_up)?;
        let [size_m, width] = gate_up.dims2()?;
        let y = definition.apply(gate_up.float_view2()?, Chain::Canonical)?.into_bits();
        let columns = width / definition.width_in(1);
        Tensor::from_vec("y", gate_up.dtype(), vec![size_m, columns], y)
    });
    Ok(output(py, made.failed()?))
}

/// The sum over the slots of each token: `[M, H]` of `[M, top_k, H]`.
#[pyfunction]
pub(crate) fn moe_sum<'py>(py: Python<'py>, down: Input<'py>) -> PyResult<Output<'py>> {
    let down = down.tensor("input")?;
    let made = py.detach(|| -> Result<_> {
        let (ty, [size_m, top_k, size_n]) = (half(&down)?, down.dims3()?);
        let bits = down.elements::<u16>();
        let view = FloatView3::from_bits("input", ty, [size_m, top_k, size_n], &bits)?;
        let y = sum(view, Chain::Canonical)?.into_bits();
        Tensor::from_vec("y", down.dtype(), vec![size_m, size_n], y)
    });
    Ok(output(py, made.failed()?))
}
