//! Writes one output file: the header first, then each piece to its place, from any thread.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use marlinspike::container::{ContainerWriter, TensorSpec};

use super::error::ConvertError;
use super::folder::Place;
use super::io::PartFile;
use super::plan::{ShardPlan, Source};

/// A file under its temporary name. Clones write to the same file.
#[derive(Debug, Clone)]
pub struct ShardWriter<'s>(Arc<Inner<'s>>);

#[derive(Debug)]
struct Inner<'s> {
    file: PartFile<'s>,
    /// Where each item's data begins, in the order of the items.
    offsets: Vec<u64>,
    /// The same, by source.
    places: HashMap<Source, u64>,
}

/// The header of a shard and where the data of each item begins, from the start of the file.
fn header(plan: &ShardPlan, path: &Path) -> Result<(Vec<u8>, Vec<u64>, u64), ConvertError> {
    let specs: Vec<TensorSpec> = plan.items.iter().map(|i| i.spec.clone()).collect();
    let mut head = Vec::new();
    ContainerWriter::new(&mut head, &specs, &plan.metadata)
        .map_err(|source| ConvertError::Header { path: path.to_owned(), source })?;
    let mut at = head.len() as u64;
    let mut offsets = Vec::with_capacity(specs.len());
    for spec in &specs {
        offsets.push(at);
        // The header writer has refused what overflows.
        at += spec.byte_len().unwrap_or(0);
    }
    Ok((head, offsets, at))
}

impl<'s> ShardWriter<'s> {
    /// Creates the file under a temporary name, with its final length and its header.
    ///
    /// # Errors
    /// [`ConvertError::Io`] or [`ConvertError::Header`].
    pub fn create(place: &Place<'s>, plan: &ShardPlan) -> Result<Self, ConvertError> {
        let path = place.dir.join(&plan.name);
        let (head, offsets, len) = header(plan, &path)?;
        let file = PartFile::create(place.storage, &place.dir, &plan.name)
            .map_err(ConvertError::io(&path))?;
        file.set_len(len).map_err(ConvertError::io(&path))?;
        file.write_at(0, &head).map_err(ConvertError::io(&path))?;
        let places = plan.items.iter().zip(&offsets);
        let places = places.filter(|(i, _)| i.source != Source::Copy);
        let places = places.map(|(i, &at)| (i.source, at)).collect();
        Ok(Self(Arc::new(Inner { file, offsets, places })))
    }

    /// Writes `bytes` at `offset` of item `item`'s data.
    ///
    /// # Errors
    /// [`ConvertError::Io`].
    pub fn write_item(&self, item: usize, offset: u64, bytes: &[u8]) -> Result<(), ConvertError> {
        self.write_at(self.0.offsets[item] + offset, bytes)
    }

    /// Writes `bytes` at `offset` of a stack's output, which must be in this file.
    ///
    /// # Errors
    /// [`ConvertError::Io`].
    pub fn write(&self, source: Source, offset: u64, bytes: &[u8]) -> Result<(), ConvertError> {
        match self.0.places.get(&source) {
            Some(at) => self.write_at(at + offset, bytes),
            None => {
                let what = format!("{source:?} is not in this file's plan");
                Err(ConvertError::io(self.0.file.path())(io::Error::other(what)))
            }
        }
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<(), ConvertError> {
        self.0.file.write_at(at, bytes).map_err(ConvertError::io(self.0.file.path()))
    }

    /// Verifies the file, makes it durable and gives it its final name. Returns its length and
    /// SHA-256.
    ///
    /// # Errors
    /// [`ConvertError::Io`], [`ConvertError::ReadBack`].
    pub fn finish(&self) -> Result<(u64, String), ConvertError> {
        self.0.file.finish().map_err(ConvertError::finish(self.0.file.path()))
    }
}
