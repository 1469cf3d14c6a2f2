//! Checks the values of inputs. Outputs are not checked here: a wrong output gives a verdict, not
//! an error.

use std::collections::BTreeMap;

use crate::formats::{self, unflatten};
use crate::num::tensor::{DType, Tensor};
use crate::{Error, Result};

/// Inputs by bare name.
pub(crate) type Inputs<'a> = BTreeMap<String, Tensor<'a>>;

/// A scale that is NaN or infinite makes every product with it meaningless.
pub(crate) fn finite(tensor: &Tensor<'_>) -> Result<()> {
    let ty = match tensor.dtype() {
        // A scale stored as a byte is a power of two.
        DType::U8 => crate::num::scalar::ScalarType::FLOAT8_E8M0FNU,
        other => match formats::float_type(other) {
            Some(ty) => ty,
            None => return Ok(()),
        },
    };
    formats::expect_finite(tensor, ty)
}

/// Requires positive finite f32 scales, which multiply or divide everything.
pub(crate) fn positive(tensor: &Tensor<'_>) -> Result<()> {
    let values = tensor.elements::<f32>();
    match values.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
        None => Ok(()),
        Some(i) => {
            let at = unflatten(tensor.shape(), i);
            Err(Error::value(tensor.name(), &at, values[i], "a positive finite scale"))
        }
    }
}

/// Requires finite f32 scales that are not negative.
pub(crate) fn not_negative(tensor: &Tensor<'_>) -> Result<()> {
    let values = tensor.elements::<f32>();
    match values.iter().position(|s| !(s.is_finite() && *s >= 0.0)) {
        None => Ok(()),
        Some(i) => {
            let at = unflatten(tensor.shape(), i);
            Err(Error::value(tensor.name(), &at, values[i], "a finite scale of 0 or more"))
        }
    }
}

/// Requires e4m3 block scales without sign and NaN: units ignore the sign, and a NaN would make
/// every result NaN.
pub(crate) fn e4m3_scales(tensor: &Tensor<'_>) -> Result<()> {
    match tensor.bytes().iter().position(|&b| b > 0x7e) {
        None => Ok(()),
        Some(i) => {
            let (at, found) = (unflatten(tensor.shape(), i), format!("{:#x}", tensor.bytes()[i]));
            Err(Error::value(tensor.name(), &at, found, "0 or more, no NaN"))
        }
    }
}

/// Requires global expert ids; −1 is no expert.
pub(crate) fn expert_ids(tensor: &Tensor<'_>, num_experts: usize) -> Result<()> {
    in_range(tensor, -1, num_experts, "an expert, or -1,")
}

/// Requires i32 values from `low` to below `high`.
pub(crate) fn in_range(tensor: &Tensor<'_>, low: i32, high: usize, what: &str) -> Result<()> {
    let values = tensor.elements::<i32>();
    match values.iter().position(|&v| v < low || i64::from(v) >= high as i64) {
        None => Ok(()),
        Some(i) => Err(Error::value(
            tensor.name(),
            &unflatten(tensor.shape(), i),
            values[i],
            format!("{what} from {low} below {high}"),
        )),
    }
}

/// Global to local ids: −1, or each local id once, from 0 to `local` (where known) without holes.
pub(crate) fn expert_map(map: &Tensor<'_>, local: Option<usize>) -> Result<()> {
    let values = map.elements::<i32>();
    let here = values.iter().filter(|&&v| v >= 0).count();
    in_range(map, -1, local.unwrap_or(here), "a local expert")?;
    let mut seen = vec![false; local.unwrap_or(here)];
    for (i, &v) in values.iter().enumerate() {
        let Ok(v) = usize::try_from(v) else { continue };
        if std::mem::replace(&mut seen[v], true) {
            return Err(Error::value(map.name(), &[i], v, "each local expert once"));
        }
    }
    match (local, seen.iter().position(|s| !s)) {
        (Some(local), Some(absent)) => {
            let found = format!("no entry {absent}");
            Err(Error::value(map.name(), &[], found, format!("all {local} local experts")))
        }
        _ => Ok(()),
    }
}
