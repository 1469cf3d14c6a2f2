//! Shared by the tests of the config parsers.

use marlinspike::config::{ConfigError, QuantConfig, Scheme, Wna16Scheme};
use marlinspike::select::Capability;
use serde_json::{Value, json};

pub(crate) const H100: Capability = Capability::cuda(9, 0);

pub(crate) fn gptq(extra: Value) -> Value {
    let mut config = json!({
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true, "sym": true,
    });
    for (k, v) in extra.as_object().unwrap() {
        config[k] = v.clone();
    }
    config
}

pub(crate) fn parse(config: Value) -> Result<QuantConfig, ConfigError> {
    QuantConfig::from_value(&config)
}

pub(crate) fn scheme(config: &QuantConfig, module: &str) -> Scheme {
    config.scheme_for(module).unwrap()
}

pub(crate) fn wna16(config: &QuantConfig, module: &str) -> Wna16Scheme {
    match scheme(config, module) {
        Scheme::Wna16(w) => w,
        other => panic!("{module}: {other:?}"),
    }
}

pub(crate) fn unquantized(config: &QuantConfig, module: &str) -> bool {
    matches!(scheme(config, module), Scheme::Unquantized { .. })
}
