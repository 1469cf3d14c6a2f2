//! Scaling of the rotary frequencies: none, or YaRN.

use serde_json::Value;

use super::Keys;
use crate::error::{GenerateError, Result};

/// YaRN: fast frequencies stay, slow ones are divided by a factor, those between are blended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Divisor of the slow frequencies.
    pub factor: f64,
    /// Turns within the original positions from which a frequency stays.
    pub beta_fast: f64,
    /// Turns up to which a frequency is divided.
    pub beta_slow: f64,
    /// Positions that the model was trained with.
    pub original_positions: usize,
    /// Whether the ends of the blend are rounded to whole frequencies.
    pub truncate: bool,
    /// Factor on cos and sin.
    pub attention_factor: f64,
    /// Factor on the scores of latent attention: the square of the `mscale_all_dim` term.
    pub score_factor: f64,
}

/// 0.1 · m · ln(factor) + 1.
fn mscale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * libm::log(factor) + 1.0 }
}

impl Yarn {
    fn read(section: &Value, max_positions: usize) -> Result<Self> {
        let keys = Keys(section);
        let original = keys.need("original_max_position_embeddings", 1 << 30)?;
        let factor = keys.positive("factor")?.unwrap_or(max_positions as f64 / original as f64);
        let term = |key| Ok(keys.number(key)?.filter(|m| *m != 0.0));
        let (one, all): (Result<_>, Result<_>) = (term("mscale"), term("mscale_all_dim"));
        let (one, all) = (one?, all?);
        let own = match (one, all) {
            (Some(one), Some(all)) => mscale(factor, one) / mscale(factor, all),
            _ => mscale(factor, 1.0),
        };
        let beta_fast = keys.positive("beta_fast")?.unwrap_or(32.0);
        let beta_slow = keys.positive("beta_slow")?.unwrap_or(1.0);
        Ok(Self {
            factor,
            beta_fast,
            beta_slow,
            original_positions: original,
            truncate: keys.flag("truncate", true)?,
            attention_factor: keys.positive("attention_factor")?.unwrap_or(own),
            score_factor: all.map_or(1.0, |m| mscale(factor, m) * mscale(factor, m)),
        })
    }

    /// The pairs where the blend begins and ends, of heads of `dim` rotated values.
    pub(crate) fn range(&self, theta: f64, dim: usize) -> [f64; 2] {
        let dim = dim as f64;
        let pair = |turns: f64| {
            let wavelength = self.original_positions as f64 / (turns * std::f64::consts::TAU);
            dim * libm::log(wavelength) / (2.0 * libm::log(theta))
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        [low, if low == high { high + 0.001 } else { high }]
    }
}

/// The error of a key inside `section`.
fn inside(section: &'static str, error: GenerateError) -> GenerateError {
    match error {
        GenerateError::Config { key, found, expected } => {
            GenerateError::config(section, format!("{key} {found}"), expected)
        }
        other => other,
    }
}

/// θ and the scaling, from `rope_theta` and `rope_scaling` or, as transformers 5 writes them,
/// `rope_parameters`.
pub(super) fn read(
    keys: &Keys<'_>,
    default: f64,
    max_positions: usize,
) -> Result<(f64, Option<Yarn>)> {
    let mut yarn = None;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(section) = keys.get(key) else { continue };
        if !section.is_object() {
            return Err(GenerateError::config(key, section, "an object or null"));
        }
        let kind = ["rope_type", "type"].into_iter().find_map(|k| section.get(k));
        match kind.map(|kind| kind.as_str()) {
            None | Some(Some("default")) => {}
            Some(Some("yarn")) => {
                let read = Yarn::read(section, max_positions);
                yarn = Some(read.map_err(|e| inside(key, e))?);
            }
            Some(_) => {
                let expected = "none, or the rope_type \"default\" or \"yarn\"";
                return Err(GenerateError::config(key, section, expected));
            }
        }
    }
    let theta = match keys.get("rope_parameters") {
        Some(section) => Keys(section).positive("rope_theta")?,
        None => None,
    };
    let theta = theta.or(keys.positive("rope_theta")?).unwrap_or(default);
    if yarn.is_some() && theta <= 1.0 {
        return Err(GenerateError::config("rope_theta", theta, "a number above 1"));
    }
    Ok((theta, yarn))
}
