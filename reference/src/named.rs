//! Enums whose variants have names in files.

/// An enum whose variants have names in files.
macro_rules! named {
    ($(#[$doc:meta])* $ty:ident { $($(#[$vdoc:meta])* $variant:ident $name:tt),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $ty { $($(#[$vdoc])* $variant),+ }

        impl $ty {
            /// Every value with its name in files.
            pub const NAMED: &'static [(&'static str, Self)] = &[$(($name, Self::$variant)),+];

            /// The name in files.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            /// The value of this name.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::NAMED.iter().find(|(n, _)| *n == name).map(|&(_, v)| v)
            }
        }

        impl std::fmt::Display for $ty {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
pub(crate) use named;
