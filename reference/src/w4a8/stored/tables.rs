//! The tables that a description states.

use super::place;
use crate::layouts::cpu::CpuTables;
use crate::{Error, Result};

/// The tables that a description states, in versions from `since` on.
pub(super) fn tables(
    module: &str,
    found: [Option<bool>; 2],
    version: u32,
    since: u32,
) -> Result<CpuTables> {
    for (key, found) in ["zero_points", "act_order"].into_iter().zip(found) {
        match found {
            Some(found) if version < since => {
                let expected = format!("no such key before version {since}");
                return Err(Error::value(place(module, key), &[], found, expected));
            }
            None if version >= since => {
                return Err(Error::missing(place(module, key), format!("version {since}")));
            }
            _ => {}
        }
    }
    let [zero_points, act_order] = found.map(Option::unwrap_or_default);
    Ok(CpuTables { zero_points, act_order })
}
