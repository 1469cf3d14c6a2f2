//! Packed layers from the bytes of a file.

use std::borrow::Cow;

use super::{LinearDescription, MoeDescription};
use crate::Result;
use crate::container::Container;
use crate::num::tensor::DType;
use crate::w4a8::Linear;
use crate::w4a8::packed::{PackedRhs, PackedStack, RhsLayout};
use crate::w4a8::quantize::ActivationRounding;

/// The packed bytes of a tensor, which must have this shape.
fn packed<'a>(file: &Container<'a>, name: &str, shape: &[usize]) -> Result<Cow<'a, [u8]>> {
    let tensor = file.tensor(name)?;
    tensor.expect_dtype(&[DType::U8])?.expect_shape(shape)?;
    Ok(tensor.into_bytes())
}

/// The experts of `module`: description, w13 and w2, borrowed from the file's bytes.
///
/// # Errors
/// As [`MoeDescription::read`]; [`ContainerError`](crate::container::ContainerError), [`Error::Dtype`](crate::Error::Dtype) and [`Error::Shape`](crate::Error::Shape) naming
/// the tensor that is missing or does not match the description.
pub fn experts<'a>(
    file: &Container<'a>,
    module: &str,
) -> Result<(MoeDescription, PackedStack<'a>, PackedStack<'a>)> {
    let described = MoeDescription::read(file, module)?;
    let stack = |which: &str, layout: RhsLayout| {
        let name = format!("{module}.{which}_packed");
        let shape = [described.local_num_experts(), layout.packed_len()];
        PackedStack::new(&name, layout, packed(file, &name, &shape)?)
    };
    let w13 = stack("w13", described.w13_layout()?)?;
    let w2 = stack("w2", described.w2_layout()?)?;
    Ok((described, w13, w2))
}

/// The weight of the linear layer `module`, borrowed from the file's bytes.
///
/// # Errors
/// As [`LinearDescription::read`]; [`ContainerError`](crate::container::ContainerError), [`Error::Dtype`](crate::Error::Dtype) and [`Error::Shape`](crate::Error::Shape)
/// naming the tensor that is missing or does not match the description.
pub fn linear<'a>(file: &Container<'a>, module: &str) -> Result<PackedRhs<'a>> {
    let layout = LinearDescription::read(file, module)?.layout;
    let bytes = packed(file, &format!("{module}.rhs_packed"), &[layout.packed_len()])?;
    PackedRhs::new(layout, bytes)
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
