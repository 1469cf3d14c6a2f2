//! Parameters of the products' sources, and sizes that follow from parameters.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{LazyLock, Mutex, PoisonError},
};

use crate::error::AccelError;

/// Declares the values of a parameter in the order of the enumerators that they have in the sources.
macro_rules! enumerators {
    ($(#[$about:meta])* $name:ident { $($(#[$note:meta])* $variant:ident = $enumerator:literal),* $(,)? }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub(crate) enum $name {
            $($(#[$note])* $variant),*
        }

        #[cfg(test)]
        impl $name {
            const ENUMERATORS: &'static [(u32, &'static str)] = &[$((Self::$variant as u32, $enumerator)),*];
        }
    };
}

enumerators! {
    /// The parameter `CODES` (`formats/types.cuh`).
    Codes {
        Uint4b8 = "UINT4B8",
        Uint4 = "UINT4",
        Uint8b128 = "UINT8B128",
        E2m1 = "E2M1",
        E4m3 = "E4M3",
    }
}

enumerators! {
    /// The parameter `SCALES` (`formats/types.cuh`).
    Scales {
        Bits16 = "BITS16",
        E8m0 = "E8M0",
        Ue4m3 = "UE4M3",
        E8m0Wide = "E8M0_WIDE",
        Bits16BelowHalf = "BITS16_BELOW_HALF",
        Bits16Below32nd = "BITS16_BELOW_32ND",
    }
}

enumerators! {
    /// The parameter `PRODUCT` (`gemm_sizes.cuh`).
    Product {
        Dense = "DENSE",
        Experts = "EXPERTS",
        /// With the activation of gate and up in two halves of the columns.
        ExpertsGateUpHalves = "EXPERTS_GATE_UP_HALVES",
        /// With the activation of gate and up in alternating columns.
        ExpertsGateUpPairs = "EXPERTS_GATE_UP_PAIRS",
        /// f32 sums of a rank's part of k.
        DensePart = "DENSE_PART",
    }
}

/// Results of an evaluation, kept for each key. Sizes of thread blocks are evaluated from a source's constants once for
/// each set of parameters, and not on every launch.
pub(crate) struct Memo<K, V>(LazyLock<Mutex<HashMap<K, V>>>);

impl<K: Eq + Hash, V: Copy> Memo<K, V> {
    pub(crate) const fn new() -> Self {
        Self(LazyLock::new(Mutex::default))
    }

    /// The value of `key`. An error is not kept.
    pub(crate) fn get<E: Into<AccelError>>(
        &self,
        key: K,
        evaluate: impl FnOnce() -> Result<V, E>,
    ) -> Result<V, AccelError> {
        // A panic elsewhere cannot leave the map half changed, so a poisoned lock is still good.
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        if let Some(value) = known {
            return Ok(value);
        }
        let value = evaluate().map_err(Into::into)?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key, value);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use marlinspike_kernels::constant;

    use super::*;

    #[test]
    fn values_are_those_of_the_sources() {
        let same = |source, all: &[(u32, &str)]| {
            for &(value, name) in all {
                assert_eq!(constant(source, name, &[]), Ok(value), "{source}: {name}");
            }
        };
        for source in ["marlin_gemm", "marlin_gemm_wgmma", "marlin_gemm_a8"] {
            same(source, Codes::ENUMERATORS);
            same(source, Scales::ENUMERATORS);
        }
        same("marlin_gemm", Product::ENUMERATORS);
    }

    #[test]
    fn a_constant_is_evaluated_once_and_one_without_a_value_is_an_error_that_names_it() {
        let (memo, calls) = (Memo::new(), Cell::new(0));
        let get = |name: &'static str| {
            memo.get(name, || {
                calls.set(calls.get() + 1);
                constant("marlin_gemm", name, &[])
            })
        };
        assert_eq!((get("STAGE_K"), get("STAGE_K"), calls.get()), (Ok(64), Ok(64), 1));
        for (name, missing) in [("ABSENT", "ABSENT"), ("SHARED_BYTES", "RANKS")] {
            for _ in 0..2 {
                let error = get(name).unwrap_err().to_string();
                assert!(error.contains("`marlin_gemm`") && error.contains(missing), "{error}");
            }
        }
        assert_eq!(calls.get(), 5);
    }
}
