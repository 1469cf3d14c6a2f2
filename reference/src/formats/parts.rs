//! Helpers shared by the formats: sizes, scale tables, zero points, groups, biases.

use crate::formats::values::expect_finite;
use crate::formats::words::columns_from_codes;
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::{ScalarType, float_type, stored_type};
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Groups, Table, TableData, Weight};
use crate::{Error, Result};

/// Element types of real-valued scales and biases.
pub(super) const FLOATS: &[DType] = &[DType::F16, DType::BF16, DType::F32];

/// `suffix` of module `name`.
pub(super) fn full(name: &str, suffix: &str) -> String {
    if name.is_empty() { suffix.to_owned() } else { format!("{name}.{suffix}") }
}

/// 4 or 8 bits per code.
pub(super) fn check_bits(format: &str, bits: u32) -> Result<()> {
    if matches!(bits, 4 | 8) {
        return Ok(());
    }
    Err(Error::size(format!("{format} bits"), bits, "4 or 8"))
}

/// The two dimensions of a weight tensor, neither of them zero.
pub(super) fn sizes(tensor: &Tensor<'_>) -> Result<[usize; 2]> {
    let dims = tensor.dims2()?;
    if dims.contains(&0) {
        return Err(Error::shape(tensor.name(), &dims, "no dimension of 0"));
    }
    Ok(dims)
}

/// `stored · factor`, a dimension in codes; an error on overflow.
pub(super) fn unpacked(tensor: &Tensor<'_>, stored: usize, factor: usize) -> Result<usize> {
    stored.checked_mul(factor).ok_or_else(|| {
        Error::shape(tensor.name(), tensor.shape(), format!("sizes whose {factor}-fold is a size"))
    })
}

/// Finite scales `[groups, size_n]`; `None` accepts any number of groups except 0.
pub(super) fn scale_table(
    tensor: &Tensor<'_>,
    groups: Option<usize>,
    size_n: usize,
) -> Result<Table> {
    finite_table(tensor, [groups, Some(size_n)])
}

/// Finite scales stored `[size_n, groups]`, as `[groups, size_n]`.
pub(super) fn scale_columns(
    tensor: &Tensor<'_>,
    groups: Option<usize>,
    size_n: usize,
) -> Result<Table> {
    finite_table(tensor, [Some(size_n), groups]).map(|t| t.transposed())
}

/// A table of finite values of these sizes; `None` accepts any size except 0.
fn finite_table(tensor: &Tensor<'_>, sizes: [Option<usize>; 2]) -> Result<Table> {
    let ty = float_scales(tensor)?;
    let dims = tensor.dims2()?;
    let fits = |(&dim, size): (&usize, Option<usize>)| size.map_or(dim > 0, |size| dim == size);
    if !dims.iter().zip(sizes).all(fits) {
        let [rows, cols] = sizes.map(|s| s.map_or("1 or more".to_owned(), |s| s.to_string()));
        return Err(Error::shape(tensor.name(), &dims, format!("[{rows}, {cols}]")));
    }
    Table::from_tensor(tensor, ty)
}

/// The type of finite real-valued scales.
pub(super) fn float_scales(tensor: &Tensor<'_>) -> Result<ScalarType> {
    tensor.expect_dtype(FLOATS)?;
    let Some(ty) = float_type(tensor.dtype()) else {
        return Err(Error::dtype(tensor.name(), tensor.dtype(), "a floating-point type"));
    };
    expect_finite(tensor, ty)?;
    Ok(ty)
}

/// Scales stored `[size_n, blocks]` as bytes of type `ty`, as `[blocks, size_n]`.
pub(super) fn byte_scales(
    tensor: &Tensor<'_>,
    dtypes: &[DType],
    ty: ScalarType,
    shape: [usize; 2],
) -> Result<Table> {
    tensor.expect_dtype(dtypes)?.expect_shape(&shape)?;
    expect_finite(tensor, ty)?;
    Ok(Table::from_tensor(tensor, ty)?.transposed())
}

/// A bias `[size_n]` as a table of one row.
pub(super) fn bias_table(bias: Option<&Tensor<'_>>, size_n: usize) -> Result<Option<Table>> {
    let Some(bias) = bias else { return Ok(None) };
    let ty = float_scales(bias)?;
    bias.expect_shape(&[size_n])?;
    Table::from_tensor(bias, ty).map(Some)
}

/// A table as the tensor `suffix` of module `name`, under its type's own stored type.
pub(super) fn float_tensor(name: &str, suffix: &str, table: &Table) -> Result<Tensor<'static>> {
    let Some(dtype) = stored_type(table.ty()) else {
        let what = format!("{} of type {}", full(name, suffix), table.ty());
        return Err(Error::unsupported(what, "scales and biases are floating-point"));
    };
    table.to_tensor(full(name, suffix), dtype)
}

/// The bias as a tensor `[size_n]`.
pub(super) fn bias_tensor(name: &str, bias: Option<&Table>) -> Result<Option<Tensor<'static>>> {
    let Some(bias) = bias else { return Ok(None) };
    let t = float_tensor(name, "bias", bias)?;
    Tensor::new(full(name, "bias"), t.dtype(), vec![bias.cols()], t.bytes().to_vec()).map(Some)
}

/// Zero points `[groups, size_n]` as codes.
pub(super) fn zero_table(
    ty: ScalarType,
    groups: usize,
    size_n: usize,
    codes: Vec<u8>,
) -> Result<Table> {
    Table::new(ty, groups, size_n, TableData::B8(codes))
}

/// The codes of a weight's zero points, which are required.
pub(super) fn zero_codes<'w>(name: &str, zeros: Option<&'w Table>) -> Result<&'w [u8]> {
    match zeros.map(Table::data) {
        Some(TableData::B8(codes)) => Ok(codes),
        Some(_) => {
            Err(Error::unsupported(format!("{name}: zero points wider than a byte"), "codes"))
        }
        None => Err(Error::missing(full(name, "zeros"), "an asymmetric type")),
    }
}

/// Groups from a `g_idx` tensor `[size_k]` and `groups` scale rows. A `g_idx` that equals k /
/// group_size throughout is not act-order.
pub(super) fn groups_from(
    g_idx: &Tensor<'_>,
    shape: Shape,
    groups: usize,
    group_size: GroupSize,
) -> Result<Groups> {
    g_idx.expect_dtype(&[DType::I32])?.expect_shape(&[shape.size_k])?;
    let values = g_idx.elements::<i32>();
    let below = |&v: &i32| usize::try_from(v).is_ok_and(|v| v < groups);
    if let Some(k) = values.iter().position(|v| !below(v)) {
        let expected = format!("a group from 0 below {groups}");
        return Err(Error::value(g_idx.name(), &[k], values[k], expected));
    }
    let rows = group_size.rows(shape.k());
    let uniform = group_size.groups(shape.k()) == Ok(groups);
    if uniform && values.iter().enumerate().all(|(k, &v)| v as usize == k / rows) {
        return Ok(Groups::Uniform(group_size));
    }
    Ok(Groups::Indexed { g_idx: values.iter().map(|&v| v as u32).collect(), group_size })
}

/// Every row's group as an int32 tensor `[size_k]`.
pub(super) fn g_idx_tensor(
    name: String,
    groups: &Groups,
    size_k: usize,
) -> Result<Tensor<'static>> {
    let values: Vec<i32> = (0..size_k).map(|k| groups.group_of(k) as i32).collect();
    Tensor::from_vec(name, DType::I32, vec![size_k], values)
}

/// Returns an error for a weight that `format` cannot store.
pub(super) fn expect_type(
    format: &str,
    name: &str,
    ty: ScalarType,
    allowed: &[ScalarType],
) -> Result<()> {
    if allowed.contains(&ty) {
        return Ok(());
    }
    let names: Vec<_> = allowed.iter().map(|t| t.name()).collect();
    let reason = format!("{format} holds {}", names.join(" or "));
    Err(Error::unsupported(format!("{name}: type {ty}"), reason))
}

/// Returns an error unless the weight has scales of type `scale` for each `block` k.
pub(super) fn expect_blocks(
    format: &str,
    weight: &Weight<'_>,
    block: usize,
    scale: ScalarType,
) -> Result<()> {
    weight.validate()?;
    if weight.groups == Groups::Uniform(GroupSize::Of(block)) && weight.scales.ty() == scale {
        return Ok(());
    }
    let (found, group) = (weight.scales.ty(), weight.groups.group_size());
    let what = format!("{}: {found} scales in groups of {group}", weight.name);
    Err(Error::unsupported(what, format!("{format} has {scale} scales for each {block} k")))
}

/// The scales as `[size_n, blocks]` of element type `dtype`.
pub(super) fn block_scales(weight: &Weight<'_>, dtype: DType) -> Result<Tensor<'static>> {
    weight.scales.transposed().to_tensor(full(&weight.name, "weight_scale"), dtype)
}

/// The logical shape of `[size_n, size_k / 2]` bytes, and the number of blocks along K.
pub(super) fn nibble_shape(weight: &Tensor<'_>, block: usize) -> Result<(Shape, usize)> {
    weight.expect_dtype(&[DType::U8])?;
    let [size_n, bytes] = sizes(weight)?;
    let shape = Shape::new(unpacked(weight, bytes, 2)?, size_n);
    let groups = GroupSize::Of(block).groups(shape.k())?;
    // Blocks of 16 fill whole words, so this holds wherever the line above does.
    shape.k().packed(4)?;
    Ok((shape, groups))
}

/// The codes as `[size_n, size_k / 2]` bytes.
pub(super) fn nibble_tensor(weight: &Weight<'_>) -> Result<Tensor<'static>> {
    let Shape { size_k, size_n } = weight.shape();
    let columns = columns_from_codes(&weight.codes);
    let name = full(&weight.name, "weight");
    Tensor::from_vec(name, DType::U8, vec![size_n, size_k / 2], columns)
}
