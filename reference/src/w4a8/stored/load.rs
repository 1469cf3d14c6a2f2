//! Packed layers from the bytes of a file.

use std::borrow::Cow;

use super::{LinearDescription, MoeDescription};
use crate::container::Container;
use crate::layouts::CPU_INT4;
use crate::layouts::cpu::CpuSizes;
use crate::num::tensor::DType;
use crate::w4a8::Linear;
use crate::w4a8::packed::{PackedRhs, PackedStack, RhsLayout};
use crate::w4a8::quantize::ActivationRounding;
use crate::{Error, Result};

/// The packed bytes of a tensor, which must have this shape.
fn packed<'a>(file: &Container<'a>, name: &str, shape: &[usize]) -> Result<Cow<'a, [u8]>> {
    let tensor = file.tensor(name)?;
    tensor.expect_dtype(&[DType::U8])?.expect_shape(shape)?;
    Ok(tensor.into_bytes())
}

/// The experts of `module` in any format: description, and the bytes of w13 and w2, borrowed from the
/// file's.
///
/// # Errors
/// As [`MoeDescription::read`]; [`ContainerError`](crate::container::ContainerError), [`Error::Dtype`] and [`Error::Shape`] naming
/// the tensor that is missing or does not match the description.
pub fn expert_bytes<'a>(
    file: &Container<'a>,
    module: &str,
) -> Result<(MoeDescription, [Cow<'a, [u8]>; 2])> {
    let described = MoeDescription::read(file, module)?;
    let bytes = |which: &str, sizes: CpuSizes| {
        let name = format!("{module}.{which}_packed");
        packed(file, &name, &[described.local_num_experts(), sizes.packed_len])
    };
    let [w13, w2] = described.sizes()?;
    let bytes = [bytes("w13", w13)?, bytes("w2", w2)?];
    Ok((described, bytes))
}

/// The int4 experts of `module`: description, w13 and w2, borrowed from the file's bytes.
///
/// # Errors
/// As [`expert_bytes`]; [`Error::Unsupported`] for another format.
pub fn experts<'a>(
    file: &Container<'a>,
    module: &str,
) -> Result<(MoeDescription, PackedStack<'a>, PackedStack<'a>)> {
    let (described, [w13, w2]) = expert_bytes(file, module)?;
    if *described.format != CPU_INT4 {
        let what = format!("{module}: {} experts", described.format.name);
        return Err(Error::unsupported(what, "expected int4"));
    }
    let stack = |which: &str, layout: RhsLayout, bytes| {
        PackedStack::new(&format!("{module}.{which}_packed"), layout, bytes)
    };
    let w13 = stack("w13", described.w13_layout()?, w13)?;
    let w2 = stack("w2", described.w2_layout()?, w2)?;
    Ok((described, w13, w2))
}

/// The linear layer `module` in any format: description and bytes, borrowed from the file's.
///
/// # Errors
/// As [`LinearDescription::read`]; [`ContainerError`](crate::container::ContainerError), [`Error::Dtype`] and [`Error::Shape`]
/// naming the tensor that is missing or does not match the description.
pub fn linear_bytes<'a>(
    file: &Container<'a>,
    module: &str,
) -> Result<(LinearDescription, Cow<'a, [u8]>)> {
    let described = LinearDescription::read(file, module)?;
    let shape = [described.sizes()?.packed_len];
    Ok((described, packed(file, &format!("{module}.rhs_packed"), &shape)?))
}

/// The int4 weight of the linear layer `module`, borrowed from the file's bytes.
///
/// # Errors
/// As [`linear_bytes`]; [`Error::Unsupported`] for another format.
pub fn linear<'a>(file: &Container<'a>, module: &str) -> Result<PackedRhs<'a>> {
    let (described, bytes) = linear_bytes(file, module)?;
    PackedRhs::new(described.int4_layout()?, bytes)
}

impl<'a> Linear<'a> {
    /// The linear layer `module` of a packed file, run by the fastest kernel of this CPU. The weight
    /// borrows the file's bytes.
    ///
    /// # Errors
    /// As [`linear`].
    pub fn load(file: &Container<'a>, module: &str, rounding: ActivationRounding) -> Result<Self> {
        Ok(Self::new(linear(file, module)?, rounding))
    }
}
