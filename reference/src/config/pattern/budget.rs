//! The shared budget of all patterns of one config.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::class::Class;
use crate::config::limits::{BASE_STEPS, MAX_PROGRAMS, STEPS_PER_BYTE};
use crate::config::{ConfigError, ConfigResult};

/// Counts the size of compiled patterns and the steps of matching them.
///
/// Steps depend only on patterns and names, so a config is refused on every machine or on none. The
/// patterns of one config share one budget.
#[derive(Default)]
pub struct PatternBudget {
    size: AtomicU64,
    steps: AtomicU64,
    name_bytes: AtomicU64,
    classes: Mutex<HashMap<(String, bool), Arc<Class>>>,
}

/// Omits the counts, so the output of a config does not depend on earlier lookups.
impl fmt::Debug for PatternBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PatternBudget")
    }
}

impl PatternBudget {
    /// An unused budget.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Adds the steps for a lookup of `name`.
    pub(in super::super) fn ask(&self, name: &str) {
        self.name_bytes.fetch_add(name.len() as u64, Ordering::Relaxed);
    }

    /// Takes `size` instructions for `rule`.
    pub(super) fn grow(&self, rule: &str, size: usize) -> ConfigResult<()> {
        let size = size as u64;
        if self.size.fetch_add(size, Ordering::Relaxed) + size <= MAX_PROGRAMS {
            return Ok(());
        }
        Err(Self::exceeded(rule, "compiled instructions", MAX_PROGRAMS))
    }

    /// Takes `steps` for `rule`.
    pub(super) fn spend(&self, rule: &str, steps: u64) -> ConfigResult<()> {
        let bytes = self.name_bytes.load(Ordering::Relaxed);
        let limit = BASE_STEPS.saturating_add(bytes.saturating_mul(STEPS_PER_BYTE));
        if self.steps.fetch_add(steps, Ordering::Relaxed).saturating_add(steps) <= limit {
            return Ok(());
        }
        Err(Self::exceeded(rule, "matching steps", limit))
    }

    fn exceeded(rule: &str, what: &'static str, limit: u64) -> ConfigError {
        ConfigError::PatternBudget { rule: rule.chars().take(200).collect(), what, limit }
    }

    /// The class of this text, built by `make` on first use; most rules share a few classes.
    pub(super) fn class(
        &self,
        text: &str,
        casei: bool,
        make: impl FnOnce() -> Result<Class, String>,
    ) -> Result<(Arc<Class>, usize), String> {
        let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(class) = classes.get(&(text.to_owned(), casei)) {
            return Ok((Arc::clone(class), 0));
        }
        let class = Arc::new(make()?);
        let size = class.len() / 2 + text.len() / 16 + 1;
        classes.insert((text.to_owned(), casei), Arc::clone(&class));
        Ok((class, size))
    }
}
