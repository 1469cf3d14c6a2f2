//! Texts that users read: the documents, README's table, the page of `schema`, the formats in help texts.
#![allow(missing_docs)]

mod coverage;
mod first_hour;
mod formats;
mod pages;
mod readme;
mod replay;
mod schema_command;

#[path = "../schema/mod.rs"]
mod schema;
#[path = "../support/mod.rs"]
mod support;
