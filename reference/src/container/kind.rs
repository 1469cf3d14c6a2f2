//! What a file is by its first bytes, for the errors of files that are not safetensors.

/// A kind of file that is often given instead of a safetensors file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// No bytes.
    Empty,
    /// The text that git holds instead of a large file.
    LfsPointer,
    /// ggml's format.
    Gguf,
    /// numpy's archive, or another ZIP file that holds `.npy` members.
    Npz,
    /// numpy's array.
    Npy,
    /// A PyTorch file, which is a ZIP archive of pickles.
    TorchArchive,
    /// A Python pickle: PyTorch's older files.
    Pickle,
    /// HDF5: Keras' weights.
    Hdf5,
    /// A compressed file.
    Compressed,
    /// A shared library or program.
    Executable,
    /// A web page, as downloads give in place of a file.
    Html,
    /// A JSON document.
    Json,
    /// Other text, such as Python.
    Text,
}

/// First bytes and the kind that they show.
const MAGIC: &[(&[u8], FileKind)] = &[
    (b"version https://git-lfs", FileKind::LfsPointer),
    (b"GGUF", FileKind::Gguf),
    (b"\x93NUMPY", FileKind::Npy),
    (b"\x89HDF\r\n", FileKind::Hdf5),
    (b"\x1f\x8b", FileKind::Compressed),
    (b"\x28\xb5\x2f\xfd", FileKind::Compressed),
    (b"BZh", FileKind::Compressed),
    (b"\xfd7zXZ", FileKind::Compressed),
    (b"\x7fELF", FileKind::Executable),
    (b"\xcf\xfa\xed\xfe", FileKind::Executable),
    (b"MZ", FileKind::Executable),
    (b"<!DOCTYPE", FileKind::Html),
    (b"<!doctype", FileKind::Html),
    (b"<html", FileKind::Html),
];

impl FileKind {
    /// Bytes from a file's start that [`FileKind::of`] looks at.
    pub const BYTES: usize = 512;

    /// The kind of a file by its first bytes; `None` for one that is not recognized, safetensors
    /// included.
    pub fn of(start: &[u8]) -> Option<Self> {
        let start = &start[..start.len().min(Self::BYTES)];
        if start.is_empty() {
            return Some(Self::Empty);
        }
        if let Some((_, kind)) = MAGIC.iter().find(|(magic, _)| start.starts_with(magic)) {
            return Some(*kind);
        }
        if start.starts_with(b"PK\x03\x04") {
            let named = |name: &[u8]| start.windows(name.len()).any(|window| window == name);
            return Some(if named(b".npy") { Self::Npz } else { Self::TorchArchive });
        }
        // Protocols 2 to 5 begin with their number.
        if let [0x80, 2..=5, ..] = start {
            return Some(Self::Pickle);
        }
        // The first eight bytes of a safetensors file are a small length, thus zeros at its end.
        let text = match std::str::from_utf8(start) {
            Ok(text) => text,
            Err(e) if e.valid_up_to() + 4 > start.len() => {
                std::str::from_utf8(&start[..e.valid_up_to()]).unwrap_or("")
            }
            Err(_) => return None,
        };
        let is_text = |c: char| !c.is_control() || matches!(c, '\n' | '\r' | '\t');
        match text.trim_start().chars().next() {
            _ if !text.chars().all(is_text) => None,
            Some('{' | '[') => Some(Self::Json),
            _ => Some(Self::Text),
        }
    }

    /// What the file is.
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "an empty file",
            Self::LfsPointer => "a pointer of Git LFS",
            Self::Gguf => "a GGUF file",
            Self::Npz => "a numpy archive (npz)",
            Self::Npy => "a numpy array (npy)",
            Self::TorchArchive => "a ZIP archive, such as a PyTorch file",
            Self::Pickle => "a Python pickle, such as a PyTorch file",
            Self::Hdf5 => "an HDF5 file",
            Self::Compressed => "a compressed file",
            Self::Executable => "a program or library",
            Self::Html => "a web page",
            Self::Json => "a JSON document",
            Self::Text => "a text file",
        }
    }

    /// How to get a safetensors file from it.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Empty | Self::Html => "download or write the file again",
            Self::LfsPointer => {
                "the file's contents were not downloaded: run `git lfs pull` in its repository, or download \
                 it again"
            }
            Self::Gguf => "give the safetensors checkpoint that the GGUF file was made from",
            Self::Npz | Self::Npy => {
                "write the arrays with `safetensors.numpy.save_file`, or a case with \
                 `marlinspike.Case(...).write(path)`"
            }
            Self::TorchArchive | Self::Pickle | Self::Hdf5 => {
                "write the tensors with `safetensors.torch.save_file`"
            }
            Self::Compressed => "decompress the file first",
            Self::Executable => {
                "kernels in libraries and programs are run by `marlinspike fuzz --lib` or `--cmd`"
            }
            Self::Json | Self::Text => {
                "give the safetensors file; kernels in Python are run by `marlinspike fuzz --cmd` or pytest"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_show_the_kind() {
        let npz = b"PK\x03\x04\x14\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x05\0\0\0a.npy";
        for (start, kind) in [
            (&b""[..], Some(FileKind::Empty)),
            (
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
                Some(FileKind::LfsPointer),
            ),
            (b"GGUF\x03\0\0\0", Some(FileKind::Gguf)),
            (npz, Some(FileKind::Npz)),
            (b"PK\x03\x04\x14\0archive/data.pkl", Some(FileKind::TorchArchive)),
            (b"\x80\x02}q\0", Some(FileKind::Pickle)),
            (b"import numpy as np\n", Some(FileKind::Text)),
            (b"  {\"a\": 1}", Some(FileKind::Json)),
            ("größer".as_bytes(), Some(FileKind::Text)),
            // A header of 0x2a bytes, and random bytes.
            (b"\x2a\0\0\0\0\0\0\0{\"x\":{\"dtype\"", None),
            (b"\x07\x80\xff\x01\x02\x03\x04\x05\x06", None),
        ] {
            assert_eq!(FileKind::of(start), kind, "{start:?}");
        }
        // A character that the window cuts is no reason against text.
        let mut long = vec![b'x'; FileKind::BYTES - 1];
        long.extend("é".as_bytes());
        assert_eq!(FileKind::of(&long), Some(FileKind::Text));
    }
}
