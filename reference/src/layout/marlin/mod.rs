//! The Marlin kernel format.
