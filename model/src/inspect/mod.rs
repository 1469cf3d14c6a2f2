//! `inspect`: lists every quantized layer of a model folder, whether Marlin takes it, and the
//! kernel that upstream selects for its experts.

mod converted;
pub mod experts;
pub mod releases;
pub mod routing;
pub mod verdicts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::select::{Capability, MoeDesc, Release, Selection};

use crate::convert::config::weight_type;
use crate::convert::parallel::Ranks;
use crate::convert::settings::Settings;
use crate::convert::stack::info::several_sizes;
use crate::convert::target::marlin;
use crate::convert::verdict;
use crate::model::bind::{self, Bound};
use crate::model::fused::Fused;
use crate::model::layers::{Layers, Role, Stack};
use crate::model::{Model, ModelError, ModelFiles};
use experts::Kernels;
use releases::UpstreamChange;
use routing::LayerRouting;
use verdicts::Verdict;

/// Options of an inspection.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// The GPU.
    pub device: Capability,
    /// Tensor-parallel ranks.
    pub tp_size: usize,
    /// A JSON file with the routing rule, instead of the family's.
    pub routing: Option<PathBuf>,
    /// The release of vLLM whose decisions are compared with those of 0.21.0.
    pub release: Release,
}

impl Default for Options {
    /// Compute capability 9.0, one rank, the newest known release.
    fn default() -> Self {
        let device = Capability::cuda(9, 0);
        Self { device, tp_size: 1, routing: None, release: Release::NEWEST }
    }
}

/// One stack: a linear layer, or w13 or w2 of an experts layer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Layer {
    /// The module; for experts followed by `w13` or `w2`.
    pub module: String,
    /// Which matrices.
    pub role: Role,
    /// Their storage format.
    pub format: String,
    /// The meaning of a code.
    pub weight_type: String,
    /// Bits of a code.
    pub bits: Option<u32>,
    /// k per scale.
    pub group_size: GroupSize,
    /// Whether a `g_idx` assigns rows to groups.
    pub act_order: bool,
    /// Shape of the whole layer's matrix.
    pub shape: Shape,
    /// Number of experts; 1 for a linear layer.
    pub experts: usize,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// The Marlin kernel that takes it.
    pub chosen: Option<&'static str>,
    /// The reasons why no kernel takes it.
    pub reasons: Vec<String>,
}

/// A folder that `convert` wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted {
    /// The kernel format.
    pub layout: String,
    /// The program that wrote it, with its version.
    pub producer: String,
    /// The tensor-parallel rank of this part.
    pub tp: Ranks,
    /// The expert-parallel rank of these experts.
    pub ep: Ranks,
}

/// The result of an inspection.
#[derive(Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// The quantization method in its config.
    pub quant_method: String,
    /// Set if `convert` wrote the folder.
    pub converted: Option<Converted>,
    /// The quantized layers.
    pub layers: Vec<Layer>,
    /// Verdicts on the layers: one per format that `convert` writes, and one for this project's
    /// CUDA kernels.
    pub verdicts: Vec<Verdict>,
    /// Upstream's kernel for the experts of each scheme.
    pub kernels: Vec<Kernels>,
    /// What the release of the options decides differently.
    pub upstream_changes: Vec<UpstreamChange>,
    /// Routing of the experts layers.
    pub routing: Vec<LayerRouting>,
    /// Experts in unsupported storage forms.
    pub fused: Vec<Fused>,
    /// Modules of experts with 16 or 32 bits, which `run` computes and `convert` copies.
    pub plain: Vec<String>,
    /// Quantized modules that are refused and have no layer above, with the reasons.
    pub refused: BTreeMap<String, Vec<String>>,
    /// Unquantized modules, by reason.
    pub unquantized: BTreeMap<String, Vec<String>>,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// safetensors files.
    pub files: usize,
}

/// Inspects the model in `dir`. Reads headers and configs but no weights.
///
/// # Errors
/// [`ModelError`] for an unreadable folder.
pub fn inspect(dir: &Path, options: &Options) -> Result<Inspection, ModelError> {
    let files = ModelFiles::open(dir)?.with_routing(options.routing.as_deref())?;
    let model = Model::new(&files)?;
    if let Some(section) = model.config.get("marlinspike") {
        return converted::inspection(&model, section);
    }
    let mut groups = Layers::group(&model)?;
    let tp = Ranks { size: options.tp_size, rank: 0 };
    let settings = Settings { tp, device: options.device, ..Settings::new(marlin::FORMAT) };
    let mut layers = Vec::with_capacity(groups.stacks.len());
    let mut bound = Vec::with_capacity(groups.stacks.len());
    for stack in std::mem::take(&mut groups.stacks) {
        match layer(&model, &groups, &stack, &settings) {
            Ok(layer) => layers.push(layer),
            // What is refused anyway may also lack a tensor.
            Err(_) if groups.refused.contains_key(&stack.module) => continue,
            Err(error) => return Err(error),
        }
        bound.push(stack);
    }
    groups.stacks = bound;
    let verdicts = verdicts::all(&model, &groups, &layers, options);
    let mut unquantized: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for u in &groups.unquantized {
        unquantized.entry(u.reason.clone()).or_default().push(u.module.clone());
    }
    let stacks = groups.stacks.iter().zip(&layers);
    let w13 = stacks.filter(|(s, _)| s.role == Role::W13).map(|(s, l)| {
        let halves = if s.has_gate() { 2 } else { 1 };
        let inner = l.shape.size_n / halves / options.tp_size;
        (&s.scheme, MoeDesc::new(l.shape.size_k, inner))
    });
    Ok(Inspection {
        quant_method: model.quant.as_ref().map_or("none", |q| q.method()).to_owned(),
        kernels: experts::kernels(w13, &options.device),
        converted: None,
        layers,
        verdicts,
        upstream_changes: releases::of(&model, &groups.stacks, &settings, options.release)?,
        routing: routing::of(&model, &groups),
        unquantized,
        bytes: model.entries().map(|e| e.byte_len()).sum(),
        files: model.shards.len(),
        refused: groups
            .refused
            .into_iter()
            .filter(|(module, _)| groups.stacks.iter().all(|s| s.module != *module))
            .collect(),
        fused: groups.fused.into_iter().filter(|f| !groups.plain.contains(&f.module)).collect(),
        plain: groups.plain,
    })
}

/// Binds a stack and selects a kernel for the part of rank 0.
fn layer(
    model: &Model<'_>,
    groups: &Layers,
    stack: &Stack,
    settings: &Settings,
) -> Result<Layer, ModelError> {
    let mut bytes = 0;
    let mut whole: Option<Shape> = None;
    let alike = several_sizes(model, stack)?.is_none();
    for row in &stack.experts {
        let bound: Vec<_> =
            row.iter().map(|m| Bound::find(model, &stack.scheme, m)).collect::<Result<_, _>>()?;
        bytes += bound.iter().map(|b| b.bytes).sum::<u64>();
        let size_n = bound.iter().map(|b| b.shape.size_n).sum();
        let shape = Shape::new(bound[0].shape.size_k, size_n);
        if alike && whole.is_some_and(|w| w != shape) {
            let found = format!("`{}` makes {shape}", bound[0].name);
            let expected = whole.unwrap_or(shape);
            let reason = format!("{found}, expected {expected} as the first expert");
            return Err(ModelError::module(&stack.module, reason));
        }
        whole = Some(shape);
    }
    let shape = whole.unwrap_or(Shape::new(0, 0));
    let (selection, mut reasons) = marlin::ask(model, stack, settings)?;
    let chosen = selection.as_ref().and_then(|s: &Selection| s.chosen).map(|b| b.name());
    if let Some(s) = &selection {
        reasons.extend(verdict::against(s));
    }
    if let Some(refused) = groups.refused.get(&stack.module) {
        reasons.clone_from(refused);
    }
    let suffix = stack.role.prefix().trim_end_matches('_');
    let module = match stack.role {
        Role::Dense => stack.module.clone(),
        _ => format!("{}.{suffix}", stack.module),
    };
    Ok(Layer {
        module,
        role: stack.role,
        format: stack.scheme.label(),
        weight_type: weight_type(&stack.scheme).to_owned(),
        bits: stack.scheme.bits(),
        group_size: bind::group_size(&stack.scheme, shape.size_k),
        act_order: bind::act_order(&stack.scheme),
        shape,
        experts: stack.experts.len(),
        bytes,
        chosen: if reasons.is_empty() { chosen } else { None },
        reasons,
    })
}
