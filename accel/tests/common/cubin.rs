//! Reads the attributes of a compiled module's (an ELF file's) entry point.

/// The little-endian number of `size` bytes at `at`.
fn number(bytes: &[u8], at: usize, size: usize) -> usize {
    bytes[at..at + size].iter().rev().fold(0, |value, &byte| value << 8 | byte as usize)
}

/// Contents of the section whose name begins so.
fn section<'a>(cubin: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let (headers, size) = (number(cubin, 40, 8), number(cubin, 58, 2));
    let header = |i: usize| headers + i * size;
    let names = number(cubin, header(number(cubin, 62, 2)) + 24, 8);
    (0..number(cubin, 60, 2)).map(header).find_map(|header| {
        let found = &cubin[names + number(cubin, header, 4)..];
        let contents = || &cubin[number(cubin, header + 24, 8)..][..number(cubin, header + 32, 8)];
        found.starts_with(name.as_bytes()).then(contents)
    })
}

/// Bytes of each argument of the module's one entry point, in order.
pub(crate) fn argument_sizes(cubin: &[u8]) -> Vec<usize> {
    /// An attribute with a size, and the one that describes an argument.
    const WITH_SIZE: u8 = 4;
    const ARGUMENT: u8 = 0x17;
    let info = section(cubin, ".nv.info.").expect("a module with an entry point");
    let (mut at, mut sizes) = (0, Vec::new());
    while at < info.len() {
        let size = if info[at] == WITH_SIZE { number(info, at + 2, 2) } else { 0 };
        if (info[at], info[at + 1]) == (WITH_SIZE, ARGUMENT) {
            // Index, ordinal and offset, then the size above flags of 18 bits.
            let (ordinal, size) = (number(info, at + 8, 2), number(info, at + 12, 4) >> 18);
            sizes.push((ordinal, size));
        }
        at += 4 + size;
    }
    sizes.sort_unstable();
    sizes.into_iter().map(|(_, size)| size).collect()
}
