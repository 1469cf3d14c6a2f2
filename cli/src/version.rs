//! What this program is: version, commit, features, the CPU's kernels, releases of vLLM.

use std::sync::LazyLock;

use marlinspike::layouts::CPU_FORMATS;
use marlinspike::select::Release;
use marlinspike::w4a8::experts;

static SHORT: LazyLock<String> = LazyLock::new(|| {
    let version = env!("CARGO_PKG_VERSION");
    match env!("MARLINSPIKE_COMMIT") {
        "" => version.to_owned(),
        commit => format!("{version} ({commit})"),
    }
});

static LONG: LazyLock<String> = LazyLock::new(|| {
    let features = [
        ("bench", cfg!(feature = "bench")),
        ("cuda", cfg!(feature = "cuda")),
        ("generate", cfg!(feature = "generate")),
    ];
    let named = |is_wanted: bool| {
        let names: Vec<_> =
            features.iter().filter(|(_, is)| *is == is_wanted).map(|(name, _)| *name).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    };
    let mut kernels: Vec<&str> =
        CPU_FORMATS.iter().flat_map(|f| experts::kernel_names(f)).collect();
    let mut seen = std::collections::BTreeSet::new();
    kernels.retain(|name| seen.insert(*name));
    let newer: Vec<_> = Release::ALL.iter().map(|release| release.name()).collect();
    format!(
        "{}\nfeatures: {} (without: {})\nint4 kernels of this CPU: {}\nvLLM: kernels and layouts of 0.21.0; \
         decisions of {} compared",
        *SHORT,
        named(true),
        named(false),
        kernels.join(", "),
        newer.join(", "),
    )
});

/// The version and the commit.
pub(crate) fn short() -> &'static str {
    &SHORT
}

/// With features, kernels and releases.
pub(crate) fn long() -> &'static str {
    &LONG
}
