//! The bounds of e4m3 products are sound: no simulated kernel exceeds them. `damage` prints a
//! table of the errors that they detect.

mod blocks;
mod checked;
mod classes;
mod damage;
mod data;
mod named;
mod never_passes;
mod simulated;
mod unit;
mod wide;
