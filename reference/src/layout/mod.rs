//! Kernel formats as objects: offset, pack, unpack, compare, locate.

pub mod marlin;
