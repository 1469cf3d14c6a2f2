//! Element types of stored tensors.

use std::fmt;

macro_rules! dtypes {
    ($($variant:ident $name:literal $bits:literal),+ $(,)?) => {
        /// Element type of a stored tensor, by its safetensors name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs, non_camel_case_types)]
        pub enum DType { $($variant),+ }

        impl DType {
            /// Every element type.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// safetensors name, for example `F8_E4M3`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            /// Bits per element.
            pub const fn bits(self) -> usize {
                match self { $(Self::$variant => $bits),+ }
            }

            /// The element type of this safetensors name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

dtypes! {
    Bool "BOOL" 8, U8 "U8" 8, I8 "I8" 8, F8E5M2 "F8_E5M2" 8, F8E4M3 "F8_E4M3" 8,
    F8E8M0 "F8_E8M0" 8, I16 "I16" 16, U16 "U16" 16, F16 "F16" 16, BF16 "BF16" 16,
    I32 "I32" 32, U32 "U32" 32, F32 "F32" 32, I64 "I64" 64, U64 "U64" 64, F64 "F64" 64,
}

impl DType {
    /// Bytes per element; every supported type fills whole bytes.
    pub const fn bytes(self) -> usize {
        self.bits() / 8
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
