//! Loops compiled for wider vectors than the target's baseline.
#![cfg_attr(target_arch = "x86_64", allow(unsafe_code))]

/// `body`, compiled for the widest vectors that this CPU has. It pays where `body` and all that it
/// calls is inlined (`#[inline(always)]`); the bits are the same in any case, since no operation is
/// reordered or fused for it.
#[inline]
pub(super) fn wide<R>(body: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn avx512<R>(body: impl FnOnce() -> R) -> R {
            body()
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2<R>(body: impl FnOnce() -> R) -> R {
            body()
        }
        let narrow = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        if narrow
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: every feature that `avx512` needs was found just above (cached loads).
            return unsafe { avx512(body) };
        }
        if narrow {
            // SAFETY: both features that `avx2` needs were found just above.
            return unsafe { avx2(body) };
        }
    }
    body()
}
