//! Loops compiled for wider vectors than the target's baseline.
#![cfg_attr(target_arch = "x86_64", allow(unsafe_code))]

/// A loop to be compiled more than once.
pub trait Loop {
    /// Runs the loop. Implementations and the functions that they call are `#[inline(always)]`, and
    /// use no closures for heavy work: code that is not inlined is compiled for the baseline.
    fn run(self);
}

/// Runs `work` compiled for the widest vectors of this CPU. The bits are the same for every width,
/// because no operation is reordered or fused.
#[inline]
pub fn wide<L: Loop>(work: L) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn avx512<L: Loop>(work: L) {
            work.run();
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2<L: Loop>(work: L) {
            work.run();
        }
        let narrow = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        if narrow
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the condition above detected every feature that `avx512` needs.
            return unsafe { avx512(work) };
        }
        if narrow {
            // SAFETY: the condition above detected both features that `avx2` needs.
            return unsafe { avx2(work) };
        }
    }
    work.run();
}
