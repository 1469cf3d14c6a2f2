use crate::{Result, tensor::Tensor, weight::*};
pub fn unpack_codes(_t: &Tensor<'_>, _bits: u32) -> Result<Codes<'static>> {
    unimplemented!()
}
pub fn unpack_zeros(_t: &Tensor<'_>, _bits: u32) -> Result<Table> {
    unimplemented!()
}
