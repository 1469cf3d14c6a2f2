//! Names and caches of the machine, as reported by the system.

use std::fs;

/// The CPU's name; "unknown" where the system does not report it.
pub fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let arm = || Some(format!("implementer {} part {}", field("CPU impl")?, field("CPU part")?));
    field("model name").or_else(arm).unwrap_or_else(|| "unknown".to_owned())
}

/// The largest data cache of the first CPU, in bytes; 0 where the system does not report it.
pub fn last_level_cache() -> usize {
    let size = |index| {
        let folder = "/sys/devices/system/cpu/cpu0/cache";
        bytes(&fs::read_to_string(format!("{folder}/index{index}/size")).ok()?)
    };
    (0..8).filter_map(size).max().unwrap_or(0)
}

/// "32768K" in bytes.
fn bytes(text: &str) -> Option<usize> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    number.parse::<usize>().ok()?.checked_shl(shift)
}

/// Bytes of available memory; absent where the system does not report it.
pub fn available_memory() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Bytes of weights to alternate between so that none is in a cache when it is used again: 160 MB,
/// or twice the last-level cache.
pub fn cold_bytes() -> usize {
    (2 * last_level_cache()).max(160_000_000)
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_as_the_system_writes_them() {
        assert_eq!(bytes("32768K\n"), Some(32 << 20));
        assert_eq!(bytes("36M"), Some(36 << 20));
        assert_eq!(bytes("512"), Some(512));
        assert_eq!(bytes("K"), None);
        assert_eq!(bytes("1X"), None);
    }
}
