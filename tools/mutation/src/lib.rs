//! Mutation testing with one build.
//!
//! A copy of a package is rewritten so that every mutant is a branch that the environment variable `MUTANT` selects. One run
//! of each test records the places that it reaches; then each mutant runs only the tests that reach it. A mutant therefore
//! costs the time of a few tests and not that of a build.
//!
//! Mutants are those of cargo-mutants: another operator, a body that returns a default value, a deleted match arm or field,
//! a guard that is always true or false. Macros, patterns and types are left alone, and mutants of constant functions are
//! counted but not tested.

pub mod build;
pub mod report;
pub mod source;
pub mod trials;
mod values;
