//! Quantization arguments of a tensor (`QuantizationArgs` of the `compressed-tensors` package).

use serde_json::Value;

use crate::config::fp8::block;
use crate::config::json::Obj;
use crate::config::{ActOrder, ConfigError, ConfigResult};

/// Integer or floating-point codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CtType {
    /// `int`.
    Int,
    /// `float`.
    Float,
}

/// Granularity of a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CtStrategy {
    /// `tensor`.
    Tensor,
    /// `channel`.
    Channel,
    /// `group`.
    Group,
    /// `block`.
    Block,
    /// `token`.
    Token,
    /// `tensor_group`: groups with a global scale.
    TensorGroup,
    /// `attn_head`.
    AttnHead,
}

impl CtStrategy {
    /// Name as the config writes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::Channel => "channel",
            Self::Group => "group",
            Self::Block => "block",
            Self::Token => "token",
            Self::TensorGroup => "tensor_group",
            Self::AttnHead => "attn_head",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        use CtStrategy::*;
        [Tensor, Channel, Group, Block, Token, TensorGroup, AttnHead]
            .into_iter()
            .find(|s| s.name() == name)
    }

    const fn grouped(self) -> bool {
        matches!(self, Self::Group | Self::TensorGroup)
    }
}

/// When quantization parameters are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CtDynamic {
    /// `false`: all are in the file.
    Static,
    /// `true`: all at run time.
    Dynamic,
    /// `local`: the group scales at run time, the global scale in the file.
    Local,
}

impl CtDynamic {
    /// Whether the value is true in Python.
    pub const fn truthy(self) -> bool {
        !matches!(self, Self::Static)
    }
}

/// Quantization arguments of weights or activations, checked as the package checks them.
#[derive(Debug, Clone, PartialEq)]
pub struct CtArgs {
    /// Bits per value.
    pub num_bits: u32,
    /// Integer or float.
    pub ty: CtType,
    /// Whether zero points are absent.
    pub symmetric: bool,
    /// Granularity of scales; inferred from `group_size` if the file names none.
    pub strategy: CtStrategy,
    /// −1, 0 or the group, as configured.
    pub group_size: Option<i64>,
    /// `[rows, cols]` of [`CtStrategy::Block`].
    pub block_structure: Option<[usize; 2]>,
    /// When parameters are computed.
    pub dynamic: CtDynamic,
    /// Activation ordering.
    pub actorder: Option<ActOrder>,
    /// `scale_dtype` without its `torch.` prefix.
    pub scale_dtype: Option<String>,
}

const KEYS: &[&str] = &[
    "num_bits",
    "type",
    "symmetric",
    "group_size",
    "strategy",
    "block_structure",
    "dynamic",
    "actorder",
    "scale_dtype",
    "zp_dtype",
    "observer",
    "observer_kwargs",
];

impl CtArgs {
    /// Parses and checks one argument object.
    ///
    /// `actorder`: `group`, its alias `dynamic` and `true` mean [`ActOrder::Group`]; `weight`
    /// and its alias `static` mean [`ActOrder::Weight`]. (Releases of the package after
    /// August 2026 refuse the former; files written before carry them.)
    ///
    /// # Errors
    /// The named [`ConfigError`]; unknown keys are refused as the package refuses them.
    pub(in crate::config) fn parse(obj: &Obj<'_>) -> ConfigResult<Self> {
        obj.only(KEYS)?;
        let num_bits = match obj.opt_int(&["num_bits"])?.unwrap_or(8) {
            b @ 1..=32 => b as u32,
            b => return Err(ConfigError::bad(obj.path("num_bits"), b, "1 to 32")),
        };
        let ty = match lower(obj, "type")?.as_deref() {
            None | Some("int") => CtType::Int,
            Some("float") => CtType::Float,
            Some(t) => return Err(bad_name(obj, "type", t, "int or float")),
        };
        let group_size = obj.opt_int(&["group_size"])?;
        if let Some(g) = group_size.filter(|g| !(-1..=0x7fff_ffff).contains(g)) {
            let expected = "-1 or a positive 32-bit number";
            return Err(ConfigError::bad(obj.path("group_size"), g, expected));
        }
        let strategy = match (lower(obj, "strategy")?, group_size) {
            (Some(name), _) => CtStrategy::from_name(&name).ok_or_else(|| {
                let expected = "tensor, channel, group, block, token, tensor_group or attn_head";
                bad_name(obj, "strategy", &name, expected)
            })?,
            (None, None) => CtStrategy::Tensor,
            (None, Some(-1)) => CtStrategy::Channel,
            (None, Some(1..)) => CtStrategy::Group,
            (None, Some(g)) => {
                return Err(ConfigError::bad(obj.path("group_size"), g, "-1 or positive"));
            }
        };
        let args = Self {
            num_bits,
            ty,
            symmetric: obj.opt_bool("symmetric")?.unwrap_or(true),
            strategy,
            group_size,
            block_structure: block_structure(obj)?,
            dynamic: dynamic(obj)?,
            actorder: actorder(obj)?,
            scale_dtype: obj
                .opt_str("scale_dtype")?
                .map(|s| s.strip_prefix("torch.").unwrap_or(s).to_owned()),
        };
        args.check(obj)?;
        Ok(args)
    }

    /// The rules between fields.
    fn check(&self, obj: &Obj<'_>) -> ConfigResult<()> {
        let refuse = |what: &str, reason: &str| {
            Err(ConfigError::refused(format!("{}: {what}", obj.path("strategy")), reason))
        };
        let (strategy, group) = (self.strategy, self.group_size);
        if strategy == CtStrategy::Token && !self.dynamic.truthy() {
            return refuse("token with dynamic=false", "token quantization is dynamic");
        }
        if strategy.grouped() && group.is_none_or(|g| g <= 0) {
            return refuse(strategy.name(), "it requires a positive group_size");
        }
        if group.is_some_and(|g| g > 0) && !strategy.grouped() {
            return refuse(strategy.name(), "a positive group_size requires strategy group");
        }
        match (strategy == CtStrategy::Block, self.block_structure) {
            (true, None) => return refuse("block", "it requires block_structure"),
            (false, Some(_)) => {
                return refuse(strategy.name(), "block_structure requires strategy block");
            }
            _ => {}
        }
        let may_be_dynamic =
            strategy.grouped() || matches!(strategy, CtStrategy::Token | CtStrategy::Tensor);
        if self.dynamic.truthy() && !may_be_dynamic {
            return refuse(
                strategy.name(),
                "dynamic quantization requires token, tensor, group or tensor_group",
            );
        }
        if self.dynamic == CtDynamic::Local && strategy != CtStrategy::TensorGroup {
            return refuse(strategy.name(), "dynamic=local requires tensor_group");
        }
        if self.actorder == Some(ActOrder::Group) && strategy != CtStrategy::Group {
            return refuse(strategy.name(), "actorder=group requires strategy group");
        }
        Ok(())
    }

    /// One line for messages.
    pub fn summary(&self) -> String {
        let ty = if self.ty == CtType::Int { "int" } else { "float" };
        format!(
            "{ty}{} {} group_size={} symmetric={} dynamic={}",
            self.num_bits,
            self.strategy.name(),
            self.group_size.map_or("none".to_owned(), |g| g.to_string()),
            self.symmetric,
            match self.dynamic {
                CtDynamic::Static => "false",
                CtDynamic::Dynamic => "true",
                CtDynamic::Local => "local",
            },
        )
    }
}

fn bad_name(obj: &Obj<'_>, key: &str, found: &str, expected: &str) -> ConfigError {
    let found: String = found.chars().take(60).collect();
    ConfigError::bad(obj.path(key), format!("{found:?}"), expected)
}

fn lower(obj: &Obj<'_>, key: &str) -> ConfigResult<Option<String>> {
    Ok(obj.opt_str(key)?.map(str::to_ascii_lowercase))
}

fn dynamic(obj: &Obj<'_>) -> ConfigResult<CtDynamic> {
    match obj.get("dynamic") {
        None | Some(Value::Bool(false)) => Ok(CtDynamic::Static),
        Some(Value::Bool(true)) => Ok(CtDynamic::Dynamic),
        Some(Value::String(s)) if s.eq_ignore_ascii_case("local") => Ok(CtDynamic::Local),
        Some(other) => Err(obj.wrong("dynamic", other, "a boolean or \"local\"")),
    }
}

fn actorder(obj: &Obj<'_>) -> ConfigResult<Option<ActOrder>> {
    match obj.get("actorder") {
        None | Some(Value::Bool(false)) => Ok(None),
        Some(Value::Bool(true)) => Ok(Some(ActOrder::Group)),
        Some(Value::String(s)) => match s.to_ascii_lowercase().as_str() {
            "group" | "dynamic" => Ok(Some(ActOrder::Group)),
            "weight" | "static" => Ok(Some(ActOrder::Weight)),
            other => {
                Err(bad_name(obj, "actorder", other, "group, dynamic, weight, static or null"))
            }
        },
        Some(other) => Err(obj.wrong("actorder", other, "a boolean or a string")),
    }
}

/// `[rows, cols]`, or `"128x128"` as older files write it.
fn block_structure(obj: &Obj<'_>) -> ConfigResult<Option<[usize; 2]>> {
    let path = obj.path("block_structure");
    match obj.get("block_structure") {
        None => Ok(None),
        Some(Value::String(s)) => {
            let side = |t: &str| t.trim().parse::<u32>().ok().filter(|&n| n > 0);
            match s.split_once('x').map(|(a, b)| (side(a), side(b))) {
                Some((Some(n), Some(k))) => Ok(Some([n as usize, k as usize])),
                _ => Err(bad_name(obj, "block_structure", s, "two positive numbers \"NxK\"")),
            }
        }
        Some(value) => block(path, value).map(Some),
    }
}
