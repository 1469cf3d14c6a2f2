//! Copies the model's other files, and checks each against its hash.

use std::io::Read as _;

use super::error::ConvertError;
use super::folder::Folder;
use super::inputs::Inputs;
use super::io::PartFile;
use super::side::SideFiles;
use crate::model::{Model, files};

impl Folder<'_> {
    /// Copies the model's other files that the folder does not have yet.
    ///
    /// # Errors
    /// [`ConvertError::InputChanged`] when a file is not the one that was hashed.
    pub fn copy(
        &mut self,
        side: &SideFiles,
        model: &Model<'_>,
        inputs: &Inputs,
    ) -> Result<(), ConvertError> {
        const CHUNK: usize = 1 << 20;
        for name in &side.copied {
            if self.has(name) {
                continue;
            }
            let path = model.dir.join(name);
            let (mut file, stamp) = files::open(&path)?;
            let part = self.create(name)?;
            let mut buffer = vec![0; stamp.len.clamp(1, CHUNK as u64) as usize];
            let mut at = 0;
            loop {
                let n = match file.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(n) => n,
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                    Err(e) => return Err(ConvertError::io(&path)(e)),
                };
                part.write_at(at, &buffer[..n]).map_err(ConvertError::io(part.path()))?;
                at += n as u64;
            }
            let finish =
                |part: &PartFile<'_>| part.finish().map_err(ConvertError::finish(part.path()));
            let (bytes, sha256) = finish(&part)?;
            if inputs.sha256(name) != Some(sha256.as_str()) {
                return Err(ConvertError::InputChanged { path, what: "its contents" });
            }
            self.record(name, bytes, sha256)?;
        }
        Ok(())
    }
}
