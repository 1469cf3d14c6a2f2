//! Shared by the tests of Blackwell's layouts: golden tensors and their inputs.

// Each test file uses a part of this module.
#![allow(dead_code)]

use marlinspike::container::Container;
use marlinspike::num::tensor::Tensor;
use marlinspike_golden::Manifest;
use serde_json::Value;

/// `tables/flashinfer_layouts`.
pub(crate) struct Golden(Vec<u8>);

impl Golden {
    pub(crate) fn load() -> Self {
        let manifest = Manifest::load().expect("the golden manifest");
        let table = manifest.tables().iter().find(|t| t.name == "flashinfer_layouts");
        let path = manifest.path(&table.expect("the table").path);
        Self(std::fs::read(path).expect("the table's file"))
    }

    pub(crate) fn get(&self, name: &str) -> Option<Tensor<'static>> {
        let container = Container::parse(&self.0).expect("safetensors");
        container.get(name)?;
        Some(container.tensor(name).expect("a tensor").into_owned())
    }

    pub(crate) fn tensor(&self, name: &str) -> Tensor<'static> {
        self.get(name).unwrap_or_else(|| panic!("no golden tensor {name}"))
    }
}

pub(crate) fn facts() -> Value {
    serde_json::from_str(include_str!("../../data/flashinfer_facts.json")).expect("the facts")
}

/// The producer's inputs (`stream` in scripts/gen/flashinfer_layouts.py): SplitMix64 started at the
/// FNV-1a hash of a name.
pub(crate) struct Stream(u64);

impl Stream {
    pub(crate) fn new(name: &str) -> Self {
        let step = |seed: u64, byte: u8| (seed ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        Self(name.bytes().fold(0xcbf2_9ce4_8422_2325, step))
    }

    fn bits(&self, index: usize) -> u64 {
        let z = self.0.wrapping_add((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn byte(&self, index: usize) -> u8 {
        (self.bits(index) >> 56) as u8
    }

    pub(crate) fn word(&self, index: usize) -> u32 {
        (self.bits(index) >> 32) as u32
    }

    pub(crate) fn bf16(&self, index: usize) -> u16 {
        0x3c00 + (self.bits(index) >> 54) as u16
    }

    pub(crate) fn e4m3(&self, index: usize) -> u8 {
        ((self.bits(index) >> 57) % 127) as u8
    }
}
