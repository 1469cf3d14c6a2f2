//! A stack of a folder that `convert` has written, read back from its config and tensors.

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::{Error, Result};
use serde_json::Value;

use crate::model::layers::Role;
use crate::model::{Model, ModelError, values};

/// One stack's entry in the `marlinspike` section of a converted config.
pub(crate) struct Entry<'m> {
    model: &'m Model<'m>,
    pub(crate) section: &'m Value,
    pub(crate) module: &'m str,
    pub(crate) layer: &'m Value,
    pub(crate) role: Role,
}

impl<'m> Entry<'m> {
    /// The entry of `role` in `module`.
    ///
    /// # Errors
    /// [`ModelError::Module`] where there is none.
    pub(crate) fn find(
        model: &'m Model<'m>,
        section: &'m Value,
        module: &'m str,
        role: Role,
    ) -> Result<Self, ModelError> {
        let name = format!("{module}.{}", role.prefix());
        let name = name.trim_end_matches(['.', '_']);
        match section["layers"].get(name) {
            Some(layer) => Ok(Self { model, section, module, layer, role }),
            None => Err(ModelError::module(module, "the converted model has no such layer")),
        }
    }

    /// The error of a key whose value cannot be used.
    pub(crate) fn bad(&self, key: &str, expected: &str) -> Error {
        let what = format!("config.json: marlinspike: {}: {key}", self.module);
        Error::size(what, &self.layer[key], expected)
    }

    /// A positive number.
    pub(crate) fn size(&self, key: &str) -> Result<usize> {
        let size = self.layer[key].as_u64().and_then(|n| usize::try_from(n).ok());
        size.filter(|&n| n > 0).ok_or_else(|| self.bad(key, "1 or more"))
    }

    /// The model's own size under `key`, if it was rounded up.
    pub(crate) fn unpadded(&self, key: &str) -> Result<Option<usize>> {
        let Some(own) = self.layer.get("padded_from") else { return Ok(None) };
        let size = own[key].as_u64().and_then(|n| usize::try_from(n).ok());
        let found = size.filter(|&n| n > 0);
        found.map(Some).ok_or_else(|| self.bad("padded_from", "sizes of 1 or more"))
    }

    /// Shape of each expert's matrix.
    pub(crate) fn shape(&self) -> Result<Shape> {
        Ok(Shape::new(self.size("size_k")?, self.size("size_n")?))
    }

    /// k per scale.
    pub(crate) fn group_size(&self) -> Result<GroupSize> {
        match self.layer["group_size"].as_i64() {
            Some(-1) => Ok(GroupSize::Channel),
            _ => Ok(GroupSize::Of(self.size("group_size")?)),
        }
    }

    /// The type of the codes.
    pub(crate) fn ty(&self) -> Result<ScalarType> {
        let ty = self.layer["weight_type"].as_str().and_then(ScalarType::from_name);
        ty.ok_or_else(|| self.bad("weight_type", "a type of codes"))
    }

    /// The whole tensor of a role; `None` if the layer has none.
    pub(crate) fn tensor(&self, role: &str) -> Result<Option<Tensor<'m>>> {
        let Some(name) = self.layer["tensors"][role].as_str() else { return Ok(None) };
        let found = self.model.tensor(name);
        found.map(Some).map_err(|e| Error::missing(name, e))
    }

    /// Like [`Self::tensor`], for a role that the layer must have.
    pub(crate) fn need(&self, role: &str) -> Result<Tensor<'m>> {
        self.tensor(role)?.ok_or_else(|| self.bad("tensors", role))
    }

    /// Number of experts, 1 for a linear layer; every tensor must have that many.
    pub(crate) fn experts(&self) -> Result<usize> {
        let experts = self.size("experts")?;
        for role in ["weight", "scales", "zeros", "g_idx", "g_idx_sort_indices", "bias"] {
            if self.role == Role::Dense {
                break;
            }
            if let Some(tensor) = self.tensor(role)?
                && tensor.shape().first() != Some(&experts)
            {
                return Err(Error::shape(
                    tensor.name(),
                    tensor.shape(),
                    format!("[{experts}, ...]"),
                ));
            }
        }
        Ok(experts)
    }

    /// The part of expert `e`.
    pub(crate) fn part(&self, role: &str, e: usize) -> Result<Option<Tensor<'static>>> {
        let Some(tensor) = self.tensor(role)? else { return Ok(None) };
        Ok(Some(match self.role {
            Role::Dense => tensor.into_owned(),
            _ => tensor.index0(e)?.into_owned(),
        }))
    }

    /// One f32 for each expert.
    pub(crate) fn floats(&self, role: &str, experts: usize) -> Result<Option<Vec<f32>>> {
        let Some(tensor) = self.tensor(role)? else { return Ok(None) };
        let values = values::floats(&tensor)?;
        match values.len() == experts {
            true => Ok(Some(values)),
            false => Err(Error::shape(tensor.name(), tensor.shape(), format!("[{experts}]"))),
        }
    }

    /// A string of the entry.
    pub(crate) fn text(&self, key: &str) -> Option<&'m str> {
        self.layer[key].as_str()
    }
}
