//! Campaigns derived from another one: other configurations, another seed.

use marlinspike::case::CaseConfig;
use serde_json::{Map, Value};

use super::{Campaign, CampaignError};

impl Campaign {
    /// The same campaign with config keys changed before cases are drawn, for values that the lattice
    /// lacks. Configurations that the operation then refuses are dropped.
    ///
    /// # Errors
    /// [`CampaignError::Reference`] where no configuration is left.
    pub fn with_keys(self, keys: &Map<String, Value>) -> Result<Self, CampaignError> {
        let change = |config: &CaseConfig| {
            let mut map = config.to_json();
            map.extend(keys.clone());
            CaseConfig::from_json(config.op(), &map).ok()
        };
        Ok(Self { generator: self.generator.map(change)?, ..self })
    }

    /// The same campaign with config keys that every case gets. Numbers, such as `size_k`, change what is drawn:
    /// [`Campaign::with_keys`]. Other keys, such as `schedule`, are added to drawn cases: [`Campaign::set`].
    ///
    /// # Errors
    /// As [`Campaign::with_keys`].
    pub fn with_set(self, keys: Map<String, Value>) -> Result<Self, CampaignError> {
        let (sizes, set): (Map<_, _>, Map<_, _>) =
            keys.into_iter().partition(|(_, value)| value.is_number());
        let campaign = if sizes.is_empty() { self } else { self.with_keys(&sizes)? };
        Ok(Self { set, ..campaign })
    }

    /// The same campaign under another seed.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { generator: self.generator.with_seed(seed), ..self }
    }
}
