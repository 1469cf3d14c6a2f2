//! Times of other kernels, read from a file that scripts/gpu_peers wrote.

use std::path::Path;

use anyhow::Result;
use marlinspike_bench::Workload;
use serde::Deserialize;

use crate::error::Explained;
use crate::program;

/// One time of another kernel.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Peer {
    /// Name of the kernel.
    pub(super) peer: String,
    /// In the syntax of `--shape`.
    shape: String,
    /// Rows of x.
    pub(super) tokens: usize,
    /// Median of the replays, in microseconds.
    pub(super) us: f64,
    /// The parsed `shape`.
    #[serde(skip)]
    pub(super) workload: Option<Workload>,
}

#[derive(Deserialize)]
struct File {
    results: Vec<Peer>,
}

/// Reads a file of times.
///
/// # Errors
/// Names the file and the invalid entry.
pub(super) fn read(path: &Path) -> Result<Vec<Peer>> {
    let help = "write the file with scripts/gpu_peers";
    let fail = |problem: String| Explained::new(format!("{}: {problem}", path.display()), help);
    let opened = program::open_regular(path).and_then(std::io::read_to_string);
    let text = opened.map_err(|e| fail(e.to_string()))?;
    let File { mut results } = serde_json::from_str(&text).map_err(|e| {
        fail(format!(
            "not a file of scripts/gpu_peers: \
            {e}"
        ))
    })?;
    for (i, peer) in results.iter_mut().enumerate() {
        let shape = peer.shape.parse::<Workload>();
        peer.workload = Some(shape.map_err(|e| fail(format!("results[{i}]: {e}")))?);
        if !(peer.us.is_finite() && peer.us > 0.0) {
            let found = peer.us;
            let problem = format!("results[{i}].us: found {found}, expected a positive number");
            return Err(fail(problem).into());
        }
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Vec<Peer>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("peers.json");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn figures_are_read_and_defects_named() {
        let one = r#"{"peer": "cublas", "shape": "64x96", "tokens": 3, "us": 2.5, "gbps": 7}"#;
        let peers = of(&format!(r#"{{"device": "x", "results": [{one}]}}"#)).unwrap();
        assert_eq!(peers[0].workload, Some(Workload::Dense { size_k: 64, size_n: 96 }));
        assert_eq!((peers[0].tokens, peers[0].us), (3, 2.5));
        for (text, expected) in [
            ("[]", "not a file of scripts/gpu_peers"),
            (r#"{"results": [{"peer": "x"}]}"#, "missing field `shape`"),
            (
                &one.replace("64x96", "64").replace('{', r#"{"results": [{"#).replace('}', "}]}"),
                "results[0]: \"64\"",
            ),
            (
                &one.replace("2.5", "-1").replace('{', r#"{"results": [{"#).replace('}', "}]}"),
                "results[0].us: found -1",
            ),
        ] {
            let error = of(text).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("peers.json"), "{error}");
        }
        assert!(read(Path::new("/nowhere/peers.json")).is_err());
    }
}
