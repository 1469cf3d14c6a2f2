//! The bounds of e4m3 products are sound: no simulated kernel leaves them. They have power: see the
//! table that `damage` prints.

mod checked;
mod classes;
mod damage;
mod data;
mod simulated;
mod unit;
