//! Modifies case files byte by byte and runs the program on them.
//!
//! Positions are computed here from the published description of the formats (vLLM 0.21.0
//! `marlin_utils.py`), not with the library under test.

// Each test program uses a part of this module.
#![allow(dead_code)]

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A golden case with 4-bit weights in groups.
pub(crate) const LINEAR: &str = "linear-f16_u4b8_g128_act0";
/// A golden case all of whose outputs are checked.
pub(crate) const PASSING: &str = "int4_fp8_preprocess-gptq";

pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// A golden case by name.
pub(crate) fn golden(name: &str) -> PathBuf {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/cases");
    cases.join(format!("{name}.safetensors"))
}

/// Text without line breaks and indents, independent of its wrapping.
pub(crate) fn unwrapped(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The bytes of a case file and the positions of its tensors.
pub(crate) struct CaseFile {
    pub(crate) bytes: Vec<u8>,
    header: Value,
    data: usize,
}

impl CaseFile {
    pub(crate) fn golden(name: &str) -> Self {
        let bytes = std::fs::read(golden(name)).unwrap();
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&bytes[8..data]).unwrap();
        Self { bytes, header, data }
    }

    /// Shape of a tensor, named in full.
    pub(crate) fn shape(&self, tensor: &str) -> Vec<usize> {
        let shape = self.header[tensor]["shape"].as_array().unwrap();
        shape.iter().map(|d| d.as_u64().unwrap() as usize).collect()
    }

    pub(crate) fn range(&self, tensor: &str) -> Range<usize> {
        let at = |i: usize| self.header[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
        self.data + at(0)..self.data + at(1)
    }

    /// The elements of an int32 tensor.
    pub(crate) fn words(&self, tensor: &str) -> Vec<u32> {
        let bytes = self.bytes[self.range(tensor)].chunks_exact(4);
        bytes.map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub(crate) fn set_words(&mut self, tensor: &str, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let range = self.range(tensor);
        self.bytes[range].copy_from_slice(&bytes);
    }

    /// The elements of a tensor of 16-bit values.
    pub(crate) fn halves(&self, tensor: &str) -> Vec<u16> {
        let bytes = self.bytes[self.range(tensor)].chunks_exact(2);
        bytes.map(|b| u16::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub(crate) fn set_halves(&mut self, tensor: &str, values: &[u16]) {
        let bytes: Vec<u8> = values.iter().flat_map(|w| w.to_le_bytes()).collect();
        let range = self.range(tensor);
        self.bytes[range].copy_from_slice(&bytes);
    }

    /// Replaces text in the header by text of the same length.
    pub(crate) fn rename(&mut self, from: &str, to: &str) {
        assert_eq!(from.len(), to.len());
        let header = std::str::from_utf8(&self.bytes[8..self.data]).unwrap().replacen(from, to, 1);
        self.bytes[8..self.data].copy_from_slice(header.as_bytes());
    }

    pub(crate) fn write(&self, folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(format!("{name}.safetensors"));
        std::fs::write(&path, &self.bytes).unwrap();
        path
    }
}

/// The position of a 4-bit value in a Marlin weight for 16-bit activations.
#[derive(Debug, PartialEq)]
pub(crate) struct Position {
    pub(crate) k: usize,
    pub(crate) n: usize,
    pub(crate) tile: (usize, usize),
    pub(crate) lane: usize,
    pub(crate) register: usize,
}

/// The value at nibble `nibble` of word `word` in row `tile_k` of a packed 4-bit weight.
///
/// Each 1024 values of a row hold 16 k by 64 n. 32 lanes hold 32 values each, as four times two
/// column pairs of a 16x8 `mma` B fragment: lane l has column l / 4 and rows 2 (l % 4), + 1, + 8, +
/// 9. The eight values of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7.
pub(crate) fn marlin_position(tile_k: usize, word: usize, nibble: usize) -> Position {
    let tile_n = word * 8 / 1024;
    let in_tile = word * 8 % 1024 + [0, 2, 4, 6, 1, 3, 5, 7][nibble];
    let (lane, pair, value) = (in_tile / 32, in_tile % 32 / 8, in_tile % 8);
    let row = 2 * (lane % 4) + value % 2 + 8 * (value % 4 / 2);
    Position {
        k: 16 * tile_k + row,
        n: 64 * tile_n + 16 * pair + 8 * (value / 4) + lane / 4,
        tile: (tile_k, tile_n),
        lane,
        register: value % 4 / 2,
    }
}

/// The logical column that the grouped scale permutation stores at column `s`.
pub(crate) fn grouped_column(s: usize) -> usize {
    let (block, at) = (s / 64 * 64, s % 64);
    block + at / 8 + 8 * (at % 8)
}

/// The logical column that the single (channel-wise) scale permutation stores at column `s`.
pub(crate) fn single_column(s: usize) -> usize {
    let (block, at) = (s / 32 * 32, s % 32);
    block + 2 * (at / 8) + [0, 1, 8, 9, 16, 17, 24, 25][at % 8]
}

/// A case whose packed weight has one wrong nibble: word 250 of row 3, nibble 3.
pub(crate) fn flipped() -> CaseFile {
    let mut case = CaseFile::golden(LINEAR);
    let at = 3 * case.shape("out.marlin_qweight")[1] + 250;
    let mut words = case.words("out.marlin_qweight");
    words[at] ^= 0x5000;
    case.set_words("out.marlin_qweight", &words);
    case
}

/// A case with scale columns 17 and 42 exchanged.
pub(crate) fn swapped_columns() -> CaseFile {
    let mut case = CaseFile::golden(LINEAR);
    let columns = case.shape("out.marlin_scales")[1];
    let mut scales = case.halves("out.marlin_scales");
    scales.chunks_exact_mut(columns).for_each(|row| row.swap(17, 42));
    case.set_halves("out.marlin_scales", &scales);
    case
}

/// The output of `marlinspike` with these arguments.
pub(crate) fn run<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Output {
    command().args(arguments).output().unwrap()
}

pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_marlinspike"));
    command.env_remove("NO_COLOR").env_remove("MARLINSPIKE_GOLDEN");
    command
}

pub(crate) fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

pub(crate) fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// Exit code and lines of `check --json` on these paths.
pub(crate) fn check_json(arguments: &[&Path]) -> (i32, Vec<Value>) {
    let output = command().args(["check", "--json"]).args(arguments).output().unwrap();
    assert_eq!(stderr(&output), "");
    let lines = stdout(&output).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    (output.status.code().unwrap(), lines)
}

/// The named output of a case's line.
pub(crate) fn output<'v>(case: &'v Value, name: &str) -> &'v Value {
    let outputs = case["outputs"].as_array().unwrap();
    outputs.iter().find(|o| o["name"] == name).unwrap()
}
