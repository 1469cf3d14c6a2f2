//! Commands whose cargo feature this build lacks. They parse any arguments and return an error that
//! names the feature.

use crate::error::Explained;

/// The error for `what`, which needs the cargo feature `feature`.
pub(crate) fn feature(what: &str, feature: &str) -> anyhow::Error {
    let message = format!("{what}: this program was built without the feature `{feature}`");
    let help = format!(
        "build it with the feature: `cargo install --locked --path cli --features {feature}` in the \
         repository"
    );
    Explained::new(message, help).into()
}

macro_rules! absent {
    ($name:ident, $feature:literal, run($($argument:ty),*)) => {
        pub(crate) mod $name {
            /// The command's arguments, which are ignored.
            #[derive(Debug, clap::Args)]
            #[command(disable_help_flag = true)]
            pub struct Args {
                #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
                arguments: Vec<std::ffi::OsString>,
            }

            /// # Errors
            /// Always; the error names the feature to build with.
            pub(crate) fn run(_: &Args $(, _: $argument)*) -> anyhow::Result<crate::Outcome> {
                Err(super::feature(concat!("`", stringify!($name), "`"), $feature))
            }
        }
    };
}

#[cfg(not(feature = "bench"))]
absent!(bench, "bench", run(crate::style::ColorChoice));
#[cfg(not(feature = "generate"))]
absent!(generate, "generate", run());
#[cfg(not(feature = "cuda"))]
absent!(warm, "cuda", run());
