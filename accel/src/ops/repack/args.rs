//! Arguments of repacking, checked.

use marlinspike::num::dims::Shape;

use super::ALONG_K;
use crate::{error::AccelError, nvrtc::Parameter};

/// Sizes of a stack of packed matrices.
#[derive(Debug, Clone, Copy)]
pub struct RepackSizes {
    /// Number of matrices, 1 to 65535.
    pub experts: usize,
    /// Shape of each.
    pub shape: Shape,
    /// 4 or 8.
    pub num_bits: u32,
    /// Lay out for 8-bit activations.
    pub is_a_8bit: bool,
}

/// Checked arguments of [`gptq_marlin_repack`](super::gptq_marlin_repack): holding one proves that a launch with it stays
/// inside its buffers.
#[derive(Debug, Clone, Copy)]
pub struct RepackArgs<'a> {
    pub(super) qweight: &'a [u32],
    pub(super) perm: Option<&'a [u32]>,
    pub(super) size_k: u32,
    pub(super) size_n: u32,
    pub(super) num_bits: u32,
    pub(super) is_a_8bit: bool,
    pub(super) experts: u32,
}

impl<'a> RepackArgs<'a> {
    /// Arguments of one matrix: [`RepackArgs::stack`] of one expert.
    ///
    /// # Errors
    /// As [`RepackArgs::stack`].
    pub fn new(
        qweight: &'a [u32],
        perm: Option<&'a [u32]>,
        size_k: usize,
        size_n: usize,
        num_bits: u32,
        is_a_8bit: bool,
    ) -> Result<Self, AccelError> {
        Self::stack(qweight, perm, 1, size_k, size_n, num_bits, is_a_8bit)
    }

    /// Checks the arguments of a stack of experts against upstream's rules.
    ///
    /// - `qweight`: `[experts, size_k / pack, size_n]`, pack = 32 / `num_bits` consecutive rows to a
    ///   word
    /// - `perm`: `[experts, size_k]`; row k of the result is row `perm[k]` of the checkpoint
    /// - `experts`: 1 to 65535
    /// - `size_k`: a multiple of 16 (8-bit activations: 32); `size_n`: of 64
    /// - `num_bits`: 4 or 8
    /// - `is_a_8bit`: lay out for 8-bit activations
    ///
    /// # Errors
    /// [`AccelError::Argument`] naming the argument, what was found and what was expected.
    pub fn stack(
        qweight: &'a [u32],
        perm: Option<&'a [u32]>,
        experts: usize,
        size_k: usize,
        size_n: usize,
        num_bits: u32,
        is_a_8bit: bool,
    ) -> Result<Self, AccelError> {
        let Checked { k, n, words, experts } =
            Checked::new(experts, size_k, size_n, num_bits, is_a_8bit)?;
        let all = u64::from(experts) * u64::from(words);
        if u64::try_from(qweight.len()) != Ok(all) {
            let expected = format!("{all} words ([{experts}, {k} / {}, {n}])", 32 / num_bits);
            return Err(refuse("qweight", format!("{} words", qweight.len()), expected));
        }
        if let Some(perm) = perm {
            let entries = experts as usize * size_k;
            if perm.len() != entries {
                return Err(refuse("perm", format!("{} entries", perm.len()), entries));
            }
            if let Some((i, row)) = perm.iter().enumerate().find(|&(_, &row)| row >= k) {
                return Err(refuse("perm", format!("{row} at [{i}]"), format!("below {k}")));
            }
        }
        Ok(Self { qweight, perm, size_k: k, size_n: n, num_bits, is_a_8bit, experts })
    }

    /// The source's parameters for these arguments.
    pub fn parameters(&self) -> [Parameter; 3] {
        [
            ("BITS", self.num_bits),
            ("HAS_PERM", u32::from(self.perm.is_some())),
            ("IS_A_8BIT", u32::from(self.is_a_8bit)),
        ]
    }
}

/// Sizes that the kernel takes.
pub(super) struct Checked {
    pub(super) k: u32,
    pub(super) n: u32,
    pub(super) words: u32,
    pub(super) experts: u32,
}

impl Checked {
    pub(super) fn new(
        experts: usize,
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
        let Some(experts) = u32::try_from(experts).ok().filter(|e| (1..=65535).contains(e)) else {
            return Err(refuse("experts", experts, "1 to 65535"));
        };
        Ok(Self { k, n, words, experts })
    }
}

pub(super) fn refuse(
    what: &'static str,
    found: impl std::fmt::Display,
    expected: impl std::fmt::Display,
) -> AccelError {
    ALONG_K.refuse(what, found, expected)
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
        let stack = |experts| RepackArgs::stack(&[0; 8 * 64], None, experts, 32, 64, 4, false);
        assert!(stack(2).is_ok());
        for experts in [0, 1, 3, 65536] {
            assert!(matches!(stack(experts), Err(AccelError::Argument { .. })), "{experts}");
        }
        assert_eq!(complaint(0, None, 1 << 20, 1 << 20, 8, false), "size_k, size_n");
    }

    #[test]
    fn parameters_follow_the_arguments() {
        let args = RepackArgs::new(&[0; 8 * 64], None, 32, 64, 8, true).unwrap();
        assert_eq!(args.parameters(), [("BITS", 8), ("HAS_PERM", 0), ("IS_A_8BIT", 1)]);
    }
}
