//! The page for browsers: the verdict on a case file, and the values of a layout.
//!
//! `site/` holds the page. It calls [`abi`] in WebAssembly; nothing leaves the browser.

pub mod abi;
mod requests;

pub use requests::{MAX_FILE, MAX_WORK, check, layouts, positions};
