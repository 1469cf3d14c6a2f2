//! Whether a checkpoint's `g_idx` orders rows.

use std::borrow::Cow;

use marlinspike::config::Scheme;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::tensor::DType;

use crate::model::layers::Stack;
use crate::model::{Model, ModelError};

/// The stack without act-order if its `g_idx` states uniform groups.
///
/// # Errors
/// [`ModelError`] for an index that cannot be read.
pub(super) fn unordered<'s>(
    model: &Model<'_>,
    stack: &'s Stack,
) -> Result<Cow<'s, Stack>, ModelError> {
    let Scheme::Wna16(w) = &stack.scheme else { return Ok(Cow::Borrowed(stack)) };
    let GroupSize::Of(group) = w.group_size else { return Ok(Cow::Borrowed(stack)) };
    if !w.desc_act {
        return Ok(Cow::Borrowed(stack));
    }
    for matrix in stack.experts.iter().flatten() {
        let names = ["g_idx", "weight_g_idx"].map(|s| format!("{}{s}", matrix.prefix));
        let Some(name) = names.iter().find(|name| model.entry(name).is_some()) else {
            return Ok(Cow::Borrowed(stack));
        };
        let g_idx = model.tensor(name)?;
        g_idx.expect_dtype(&[DType::I32]).map_err(|e| ModelError::module(&stack.module, e))?;
        if g_idx.elements::<i32>().iter().enumerate().any(|(k, &g)| g != (k / group) as i32) {
            return Ok(Cow::Borrowed(stack));
        }
    }
    let uniform = marlinspike::config::Wna16Scheme { desc_act: false, actorder: None, ..w.clone() };
    Ok(Cow::Owned(Stack { scheme: Scheme::Wna16(uniform), ..stack.clone() }))
}
