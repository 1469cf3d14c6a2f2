//! Campaigns over cases, and the fuzzers' entry points on their corpora.
#![allow(missing_docs)]

mod bug_bank;
mod cases;
mod corpus;
mod filters;
mod findings;
mod golden_corpus;
mod merge;
