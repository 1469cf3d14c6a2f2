//! GPTQ weights to Marlin's weight layout (upstream operator `gptq_marlin_repack`).

use crate::{
    device::Device, error::AccelError, nvrtc::Define, raw, registry::GPTQ_MARLIN_REPACK as ROW,
};

/// Checked arguments of [`gptq_marlin_repack`]: holding one proves that a launch with it stays
/// inside its buffers.
#[derive(Debug, Clone, Copy)]
pub struct RepackArgs<'a> {
    qweight: &'a [u32],
    perm: Option<&'a [u32]>,
    size_k: u32,
    size_n: u32,
    num_bits: u32,
    is_a_8bit: bool,
    words: u32,
}

impl<'a> RepackArgs<'a> {
    /// Checks the arguments against upstream's rules.
    ///
    /// - `qweight`: `[size_k / pack, size_n]`, pack = 32 / `num_bits` consecutive rows to a word
    /// - `perm`: `[size_k]`; row k of the result is row `perm[k]` of the checkpoint
    /// - `size_k`: a multiple of 16 (8-bit activations: 32); `size_n`: of 64
    /// - `num_bits`: 4 or 8
    /// - `is_a_8bit`: lay out for 8-bit activations
    ///
    /// # Errors
    /// [`AccelError::Argument`] naming the argument, what was found and what was expected.
    pub fn new(
        qweight: &'a [u32],
        perm: Option<&'a [u32]>,
        size_k: usize,
        size_n: usize,
        num_bits: u32,
        is_a_8bit: bool,
    ) -> Result<Self, AccelError> {
        if num_bits != 4 && num_bits != 8 {
            return Err(refuse("num_bits", num_bits, "4 or 8"));
        }
        let tile_k = if is_a_8bit { 32 } else { 16 };
        let (Ok(k), Ok(n)) = (u32::try_from(size_k), u32::try_from(size_n)) else {
            return Err(refuse("size_k, size_n", format!("{size_k}, {size_n}"), "below 2^32"));
        };
        if k == 0 || k % tile_k != 0 {
            return Err(refuse("size_k", k, format!("a positive multiple of {tile_k}")));
        }
        if n == 0 || n % 64 != 0 {
            return Err(refuse("size_n", n, "a positive multiple of 64"));
        }
        // A grid has fewer than 2^31 blocks of 256 threads; the word count is held to 2^32, as
        // upstream's 32-bit sizes are.
        let words = (k / (32 / num_bits)).checked_mul(n).ok_or_else(|| {
            refuse("size_k, size_n", format!("{k}, {n}"), "fewer than 2^32 packed words")
        })?;
        if u64::try_from(qweight.len()) != Ok(u64::from(words)) {
            let expected = format!("{words} words ([size_k / {}, size_n])", 32 / num_bits);
            return Err(refuse("qweight", format!("{} words", qweight.len()), expected));
        }
        if let Some(perm) = perm {
            if perm.len() != size_k {
                return Err(refuse("perm", format!("{} entries", perm.len()), size_k));
            }
            if let Some((i, row)) = perm.iter().enumerate().find(|&(_, &row)| row >= k) {
                return Err(refuse("perm", format!("{row} at [{i}]"), format!("below {k}")));
            }
        }
        Ok(Self { qweight, perm, size_k: k, size_n: n, num_bits, is_a_8bit, words })
    }

    /// The macros that the source takes for these arguments.
    pub fn defines(&self) -> [Define; 3] {
        [
            ("BITS", self.num_bits),
            ("HAS_PERM", u32::from(self.perm.is_some())),
            ("IS_A_8BIT", u32::from(self.is_a_8bit)),
        ]
    }

    pub(crate) fn qweight(&self) -> &'a [u32] {
        self.qweight
    }

    pub(crate) fn perm(&self) -> Option<&'a [u32]> {
        self.perm
    }

    pub(crate) fn size_k(&self) -> u32 {
        self.size_k
    }

    pub(crate) fn size_n(&self) -> u32 {
        self.size_n
    }

    /// Words of `qweight` and of the result.
    pub(crate) fn words(&self) -> u32 {
        self.words
    }
}

fn refuse(
    what: &'static str,
    found: impl std::fmt::Display,
    expected: impl std::fmt::Display,
) -> AccelError {
    AccelError::Argument {
        operation: ROW.name,
        what,
        found: found.to_string(),
        expected: expected.to_string(),
    }
}

/// Repacks on the device; returns `[size_k / 16, size_n * 16 / pack]`.
///
/// # Errors
/// [`AccelError::Capability`], [`AccelError::NvrtcMissing`] and [`AccelError::Compile`] from
/// preparing the kernel, [`AccelError::Driver`] from running it.
pub fn gptq_marlin_repack(device: &Device, args: &RepackArgs<'_>) -> Result<Vec<u32>, AccelError> {
    let function = device.function(&ROW, &args.defines())?;
    raw::repack::launch(device.stream(), &function, args)
        .map_err(|error| AccelError::Driver { call: ROW.name, reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The argument that `new` complains about.
    fn complaint(
        words: usize,
        perm: Option<&[u32]>,
        size_k: usize,
        size_n: usize,
        num_bits: u32,
        is_a_8bit: bool,
    ) -> &'static str {
        match RepackArgs::new(&vec![0; words], perm, size_k, size_n, num_bits, is_a_8bit) {
            Err(AccelError::Argument { what, .. }) => what,
            other => panic!("expected Argument, found {other:?}"),
        }
    }

    #[test]
    fn each_rule_is_checked() {
        let identity: Vec<u32> = (0..32).collect();
        assert!(RepackArgs::new(&[0; 4 * 64], Some(&identity), 32, 64, 4, true).is_ok());
        assert_eq!(complaint(4 * 64, None, 32, 64, 5, false), "num_bits");
        assert_eq!(complaint(5 * 64, None, 40, 64, 4, false), "size_k");
        assert_eq!(complaint(2 * 64, None, 16, 64, 4, true), "size_k");
        assert_eq!(complaint(0, None, 0, 64, 4, false), "size_k");
        assert_eq!(complaint(4 * 32, None, 32, 32, 4, false), "size_n");
        assert_eq!(complaint(0, None, 32, 0, 4, false), "size_n");
        assert_eq!(complaint(4 * 64 - 1, None, 32, 64, 4, false), "qweight");
        assert_eq!(complaint(4 * 64, None, 32, 64, 8, false), "qweight");
        assert_eq!(complaint(4 * 64, Some(&identity[1..]), 32, 64, 4, false), "perm");
        let beyond: Vec<u32> = (1..33).collect();
        assert_eq!(complaint(4 * 64, Some(&beyond), 32, 64, 4, false), "perm");
        assert_eq!(complaint(0, None, 1 << 20, 1 << 20, 8, false), "size_k, size_n");
    }

    #[test]
    fn macros_follow_the_arguments() {
        let args = RepackArgs::new(&[0; 8 * 64], None, 32, 64, 8, true).unwrap();
        assert_eq!(args.defines(), [("BITS", 8), ("HAS_PERM", 0), ("IS_A_8BIT", 1)]);
    }
}
