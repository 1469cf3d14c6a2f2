//! The weights of a decoder, found by name in a folder.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use marlinspike::case::ActivationRounding;
use marlinspike::container::Container;
use marlinspike::moe::families::{Renormalize, RoutingRule};
use marlinspike::num::dims::Shape;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::w4a8::experts;
use marlinspike::w4a8::linears::{self, LinearLayer, LinearOptions};
use marlinspike::w4a8::moe::{ExpertLayer, ExpertOptions, Mode};
use marlinspike::w4a8::stored::{self, Description};
use marlinspike_model::convert::settings::Format;
use marlinspike_model::convert::target::int4;
use marlinspike_model::model::{Model, values};
use marlinspike_model::run::pack::Packer;

use crate::config::Config;
use crate::error::{GenerateError, Result};
use crate::ops::dense::Dense;
use crate::ops::norm::RmsNorm;

/// How activations round, as KleidiAI's current kernels do.
const ROUNDING: ActivationRounding = ActivationRounding::HalfAway;

/// How packed linear layers run.
const LINEAR: LinearOptions<'static> = LinearOptions { rounding: ROUNDING, kernel: None };

/// How packed experts run.
const EXPERTS: ExpertOptions<'static> =
    ExpertOptions { rounding: ROUNDING, mode: Mode::Extended, kernel: None };

/// Ends of the names of tensors that only configure a quantizer or repeat a constant.
const HARMLESS: &[&str] = &[".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale"];

/// A matrix, by the arithmetic of its products.
#[derive(Debug)]
pub(crate) enum Linear<'f> {
    /// Packed weights times activations quantized to 8 bits.
    Packed(Box<dyn LinearLayer + 'f>),
    /// Weights that are not quantized.
    Dense(Dense<'f>),
}

/// Where quantized layers come from.
#[derive(Debug)]
enum Packed<'m, 'f> {
    /// A converted folder: its files, and the file of each module.
    Files(Vec<Container<'f>>, BTreeMap<String, usize>),
    /// A checkpoint with quantized layers, packed into memory.
    Checkpoint(Box<Packer<'m, 'm>>),
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

/// Routing of packed experts: the decoder routes each token itself, by any rule, and calls the layer
/// with the result.
static ROUTED_OUTSIDE: RoutingRule = RoutingRule::softmax(1, Renormalize::Never);

/// The model whose experts are packed without regard to its router.
pub(crate) fn for_packing<'f>(model: &Model<'f>) -> Model<'f> {
    let mut packing = model.clone();
    packing.stated_routing = Some(&ROUTED_OUTSIDE);
    packing
}

impl<'m, 'f> Weights<'m, 'f> {
    /// The tensors of `model`. `packing` is [`for_packing`] of it.
    ///
    /// # Errors
    /// [`GenerateError::Converted`] for a folder of another target; errors of headers and configs.
    pub(crate) fn new(model: &'m Model<'f>, packing: &'m Model<'m>) -> Result<Self> {
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
            None if model.quant.is_some() => Packed::Checkpoint(Box::new(Packer::new(packing)?)),
            None => Packed::None,
        };
        Ok(Self { model, packed, used: RefCell::default() })
    }

    /// Bytes that loading allocates for packed layers.
    pub(crate) fn packed_bytes(&self) -> u64 {
        match &self.packed {
            Packed::Checkpoint(packer) => packer.bytes(|module| !self.has_blocks(module)),
            _ => 0,
        }
    }

    /// Bytes that [`Weights::expanded`] allocates for the latents' quantized up-projections.
    pub(crate) fn expanded_bytes(&self, config: &Config) -> u64 {
        let Some(latent) = &config.latent else { return 0 };
        let name = |i| format!("model.layers.{i}.self_attn.kv_b_proj.weight");
        let layers = (0..config.num_layers).filter(|&i| !self.has(&name(i))).count();
        let heads = config.num_heads * (latent.nope_dim + latent.v_dim);
        let values = [layers, heads, latent.kv_rank, size_of::<f32>()];
        values.into_iter().map(|n| n as u64).fold(1, u64::saturating_mul)
    }

    /// The folder.
    pub(crate) fn model(&self) -> &'m Model<'f> {
        self.model
    }

    /// Whether the folder has a tensor.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.model.entry(name).is_some()
    }

    /// Whether the experts of `module` are stored in blocks, which run as they are.
    pub(crate) fn has_blocks(&self, module: &str) -> bool {
        self.has(&format!("{module}.gate_up_proj_blocks"))
    }

    /// Fails unless the folder has a tensor.
    fn expect(&self, name: &str) -> Result<()> {
        if self.has(name) {
            return Ok(());
        }
        let (name, dir) = (name.to_owned(), self.model.dir.clone());
        Err(GenerateError::MissingTensor { name, dir })
    }

    /// A tensor.
    fn tensor(&self, name: &str) -> Result<Tensor<'f>> {
        self.expect(name)?;
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

    /// A vector of `size` values.
    pub(crate) fn vector(&self, name: &str, size: usize) -> Result<Vec<f32>> {
        let tensor = self.tensor(name)?;
        tensor.expect_shape(&[size])?;
        Ok(values::floats(&tensor)?)
    }

    /// The values of a matrix, row-major.
    pub(crate) fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Vec<f32>> {
        let tensor = self.tensor(name)?;
        tensor.expect_shape(&shape)?;
        Ok(values::floats(&tensor)?)
    }

    /// A tensor of bytes of this shape, borrowed from the file.
    pub(crate) fn bytes(&self, name: &str, shape: &[usize]) -> Result<Cow<'f, [u8]>> {
        let tensor = self.tensor(name)?;
        tensor.expect_dtype(&[DType::U8])?;
        tensor.expect_shape(shape)?;
        Ok(tensor.into_bytes())
    }

    /// A norm of rows of `size` values.
    pub(crate) fn norm(&self, module: &str, size: usize, eps: f32) -> Result<RmsNorm> {
        Ok(RmsNorm::new(self.vector(&format!("{module}.weight"), size)?, eps))
    }

    /// The matrix of `module` in floats: the stored one, or the values of its 4-bit codes in f32.
    pub(crate) fn expanded(&self, module: &str, shape: Shape) -> Result<Dense<'f>> {
        let linear = match self.linear(module, shape, false)? {
            Linear::Dense(dense) => return Ok(dense),
            Linear::Packed(linear) => linear,
        };
        let floats = linear.dequantized();
        let (size_n, size_k) = (shape.size_n, shape.size_k);
        let tensor = Tensor::from_vec(module, DType::F32, vec![size_n, size_k], floats)?;
        Ok(Dense::new(tensor, size_n, size_k)?)
    }

    /// The matrix of `module`, `[K, N]`, with a bias if `has_bias`.
    pub(crate) fn linear(&self, module: &str, shape: Shape, has_bias: bool) -> Result<Linear<'f>> {
        let linear = match &self.packed {
            Packed::Files(files, modules) => match modules.get(module) {
                Some(&i) => {
                    self.mark(format!("{module}.rhs_packed"));
                    linears::load(&files[i], module, LINEAR)?
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
                    Ok(Description::Linear(_)) => {
                        if has_bias {
                            self.expect(&format!("{module}.bias"))?;
                        }
                        packer.linear(module, LINEAR)?
                    }
                    _ => return self.plain(module, shape, has_bias),
                }
            }
            Packed::None => return self.plain(module, shape, has_bias),
        };
        if linear.shape() != shape {
            let found = [linear.shape().size_k, linear.shape().size_n];
            let expected = format!("[{}, {}]", shape.size_k, shape.size_n);
            return Err(marlinspike::Error::shape(module, &found, expected).into());
        }
        Ok(Linear::Packed(linear))
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
    pub(crate) fn experts(&self, module: &str) -> Result<Option<Box<dyn ExpertLayer + 'f>>> {
        let layer = match &self.packed {
            Packed::Files(files, modules) => {
                let Some(&i) = modules.get(module) else { return Ok(None) };
                self.mark(format!("{module}.w13_packed"));
                self.mark(format!("{module}.w2_packed"));
                experts::load(&files[i], module, EXPERTS)?
            }
            Packed::Checkpoint(packer) => {
                let named = |r: &str| r.split(' ').next() == Some(module);
                let refused = packer.refused().iter().filter(|r| named(&r.module));
                let refused: Vec<_> = refused.cloned().collect();
                if !refused.is_empty() {
                    return Err(packer.refusal(refused).into());
                }
                match packer.description(module) {
                    Ok(Description::Moe(_)) => packer.experts(module, EXPERTS)?,
                    _ => return Ok(None),
                }
            }
            Packed::None => return Ok(None),
        };
        if layer.expert_map().is_some() {
            return Err(GenerateError::Rank { module: module.to_owned() });
        }
        Ok(Some(layer))
    }

    /// Fails if the folder has tensors that were not used.
    ///
    /// Layers from `num_layers` on that predict further tokens, `next_layers` of them, may stay unused.
    pub(crate) fn expect_all_used(&self, config: &Config) -> Result<()> {
        let next: Vec<String> = (0..config.next_layers)
            .map(|i| format!("model.layers.{}.", config.num_layers + i))
            .collect();
        let predicts = |name: &str| next.iter().any(|layer| name.starts_with(layer));
        let used = self.used.borrow();
        let owned = |name: &str| match &self.packed {
            Packed::Checkpoint(packer) => packer.owns(name),
            _ => false,
        };
        let harmless = |name: &str| HARMLESS.iter().any(|end| name.ends_with(end));
        let names = self.model.entries().map(|e| e.name());
        let mut unused =
            names.filter(|n| !used.contains(*n) && !owned(n) && !harmless(n) && !predicts(n));
        let Some(first) = unused.next() else { return Ok(()) };
        let (first, more) = (first.to_owned(), unused.count());
        let model_type = config.architecture.model_type.to_owned();
        Err(GenerateError::UnusedTensor { first, more, model_type })
    }
}
