//! The weights of a decoder, found by name in a folder.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use marlinspike::case::ActivationRounding;
use marlinspike::container::Container;
use marlinspike::num::dims::Shape;
use marlinspike::num::tensor::Tensor;
use marlinspike::w4a8::moe::{Mode, MoeLayer};
use marlinspike::w4a8::stored::{self, Description};
use marlinspike::w4a8::{self, fastest};
use marlinspike_model::convert::settings::Format;
use marlinspike_model::convert::target::int4;
use marlinspike_model::model::{Model, values};
use marlinspike_model::run::pack::Packer;

use crate::error::{GenerateError, Result};
use crate::ops::dense::Dense;
use crate::ops::norm::RmsNorm;

/// How activations round, as KleidiAI's current kernels do.
const ROUNDING: ActivationRounding = ActivationRounding::HalfAway;

/// Ends of the names of tensors that only configure a quantizer or repeat a constant.
const HARMLESS: &[&str] = &[".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale"];

/// A matrix, by the arithmetic of its products.
#[derive(Debug)]
pub(crate) enum Linear<'f> {
    /// 4-bit weights times activations quantized to 8 bits.
    Int4(Box<w4a8::Linear<'f>>),
    /// Weights that are not quantized.
    Dense(Dense<'f>),
}

/// Where quantized layers come from.
#[derive(Debug)]
enum Packed<'m, 'f> {
    /// A converted folder: its files, and the file of each module.
    Files(Vec<Container<'f>>, BTreeMap<String, usize>),
    /// A checkpoint with quantized layers, packed into memory.
    Checkpoint(Box<Packer<'m, 'f>>),
    /// No layer is quantized.
    None,
}

/// A folder's tensors, each marked as it is used.
#[derive(Debug)]
pub(crate) struct Weights<'m, 'f> {
    model: &'m Model<'f>,
    packed: Packed<'m, 'f>,
    used: RefCell<BTreeSet<String>>,
}

impl<'m, 'f> Weights<'m, 'f> {
    /// The tensors of `model`.
    ///
    /// # Errors
    /// [`GenerateError::Converted`] for a folder of another target; errors of headers and configs.
    pub(crate) fn new(model: &'m Model<'f>) -> Result<Self> {
        let packed = match model.config.get("marlinspike") {
            Some(section) => {
                let format = Format::of_section(section);
                if format != Some(int4::FORMAT) {
                    let found = format.map_or("an unknown format", |f| f.name()).to_owned();
                    let (dir, expected) = (model.dir.clone(), int4::FORMAT.name());
                    return Err(GenerateError::Converted { dir, found, expected });
                }
                let files: Vec<_> =
                    model.shards.iter().map(|s| s.container()).collect::<Result<_, _>>()?;
                let modules = |(i, file)| stored::modules(file).map(move |m| (m.to_owned(), i));
                let modules = files.iter().enumerate().flat_map(modules).collect();
                Packed::Files(files, modules)
            }
            None if model.quant.is_some() => Packed::Checkpoint(Box::new(Packer::new(model)?)),
            None => Packed::None,
        };
        Ok(Self { model, packed, used: RefCell::default() })
    }

    /// Bytes that loading allocates for packed layers.
    pub(crate) fn packed_bytes(&self) -> u64 {
        match &self.packed {
            Packed::Checkpoint(packer) => packer.bytes(),
            _ => 0,
        }
    }

    /// The folder.
    pub(crate) fn model(&self) -> &'m Model<'f> {
        self.model
    }

    /// Whether the folder has a tensor.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.model.entry(name).is_some()
    }

    /// A tensor.
    fn tensor(&self, name: &str) -> Result<Tensor<'f>> {
        if !self.has(name) {
            let (name, dir) = (name.to_owned(), self.model.dir.clone());
            return Err(GenerateError::MissingTensor { name, dir });
        }
        self.used.borrow_mut().insert(name.to_owned());
        Ok(self.model.tensor(name)?)
    }

    /// Marks a tensor as used.
    pub(crate) fn mark(&self, name: String) {
        self.used.borrow_mut().insert(name);
    }

    /// A tensor `[size_n, size_k]` that is not quantized.
    pub(crate) fn dense(&self, name: &str, size_n: usize, size_k: usize) -> Result<Dense<'f>> {
        Ok(Dense::new(self.tensor(name)?, size_n, size_k)?)
    }

    /// A norm of rows of `size` values.
    pub(crate) fn norm(&self, module: &str, size: usize, eps: f32) -> Result<RmsNorm> {
        let tensor = self.tensor(&format!("{module}.weight"))?;
        tensor.expect_shape(&[size])?;
        Ok(RmsNorm::new(values::floats(&tensor)?, eps))
    }

    /// The matrix of `module`, `[K, N]`, with a bias if `has_bias`.
    pub(crate) fn linear(&self, module: &str, shape: Shape, has_bias: bool) -> Result<Linear<'f>> {
        let (found, linear) = match &self.packed {
            Packed::Files(files, modules) => match modules.get(module) {
                Some(&i) => {
                    self.mark(format!("{module}.rhs_packed"));
                    let linear = w4a8::Linear::load(&files[i], module, ROUNDING)?;
                    (linear.weight().layout().shape(), linear)
                }
                None => return self.plain(module, shape, has_bias),
            },
            Packed::Checkpoint(packer) => {
                let refused = packer.refused().iter().filter(|r| r.module == module);
                let refused: Vec<_> = refused.cloned().collect();
                if !refused.is_empty() {
                    return Err(packer.refusal(refused).into());
                }
                match packer.description(module) {
                    Ok(Description::Linear(described)) => {
                        let linear = packer.linear(module, ROUNDING, fastest())?;
                        (described.layout.shape(), linear)
                    }
                    _ => return self.plain(module, shape, has_bias),
                }
            }
            Packed::None => return self.plain(module, shape, has_bias),
        };
        if found != shape {
            let found = [found.size_k, found.size_n];
            let expected = format!("[{}, {}]", shape.size_k, shape.size_n);
            return Err(marlinspike::Error::shape(module, &found, expected).into());
        }
        Ok(Linear::Int4(Box::new(linear)))
    }

    fn plain(&self, module: &str, shape: Shape, has_bias: bool) -> Result<Linear<'f>> {
        let dense = self.dense(&format!("{module}.weight"), shape.size_n, shape.size_k)?;
        if !has_bias {
            return Ok(Linear::Dense(dense));
        }
        let name = format!("{module}.bias");
        let bias = values::floats(&self.tensor(&name)?)?;
        Ok(Linear::Dense(dense.with_bias(&name, bias)?))
    }

    /// The quantized experts of `module`; `None` if they are not quantized.
    pub(crate) fn experts(&self, module: &str) -> Result<Option<MoeLayer<'f>>> {
        let layer = match &self.packed {
            Packed::Files(files, modules) => {
                let Some(&i) = modules.get(module) else { return Ok(None) };
                self.mark(format!("{module}.w13_packed"));
                self.mark(format!("{module}.w2_packed"));
                MoeLayer::load(&files[i], module, ROUNDING, Mode::Extended)?
            }
            Packed::Checkpoint(packer) => {
                let named = |r: &str| r.split(' ').next() == Some(module);
                let refused = packer.refused().iter().filter(|r| named(&r.module));
                let refused: Vec<_> = refused.cloned().collect();
                if !refused.is_empty() {
                    return Err(packer.refusal(refused).into());
                }
                match packer.description(module) {
                    Ok(Description::Moe(_)) => packer.experts(module, ROUNDING, fastest())?,
                    _ => return Ok(None),
                }
            }
            Packed::None => return Ok(None),
        };
        if layer.config().expert_map.is_some() {
            return Err(GenerateError::Rank { module: module.to_owned() });
        }
        Ok(Some(layer))
    }

    /// Fails if the folder has tensors that were not used.
    pub(crate) fn expect_all_used(&self, model_type: &str) -> Result<()> {
        let used = self.used.borrow();
        let owned = |name: &str| match &self.packed {
            Packed::Checkpoint(packer) => packer.owns(name),
            _ => false,
        };
        let harmless = |name: &str| HARMLESS.iter().any(|end| name.ends_with(end));
        let names = self.model.entries().map(|e| e.name());
        let mut unused = names.filter(|n| !used.contains(*n) && !owned(n) && !harmless(n));
        let Some(first) = unused.next() else { return Ok(()) };
        let (first, more) = (first.to_owned(), unused.count());
        Err(GenerateError::UnusedTensor { first, more, model_type: model_type.to_owned() })
    }
}
