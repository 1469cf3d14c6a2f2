//! The pseudorandom numbers behind generated cases.

/// SplitMix64 (Steele, Lea, Flood 2014): turns any 64-bit number into well mixed ones.
#[derive(Debug, Clone)]
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// xoshiro256** (Blackman, Vigna 2018), seeded through SplitMix64.
///
/// Only integer arithmetic: a seed gives the same numbers on every platform and in every version,
/// so a printed seed stays useful.
#[derive(Debug, Clone)]
pub struct Rng {
    state: [u64; 4],
    hard: bool,
    calm: u32,
}

impl Rng {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        let mut mix = SplitMix64(seed);
        Self { state: std::array::from_fn(|_| mix.next()), hard: false, calm: 0 }
    }

    /// The same stream, from which operations draw more of the inputs that few kernels get wrong:
    /// sums that overflow, and ties. The usual inputs of a seed never change.
    #[must_use]
    pub fn hard(self, hard: bool) -> Self {
        Self { hard, ..self }
    }

    /// The same stream, from which operations draw smaller numbers: the largest activations, scales
    /// and biases are `powers` powers of two below those that are usual, so that products stay
    /// finite. 0: as drawn without it.
    #[must_use]
    pub(crate) fn calm(self, powers: u32) -> Self {
        Self { calm: powers, ..self }
    }

    /// The powers of two of [`Rng::calm`].
    pub(crate) fn calmness(&self) -> u32 {
        self.calm
    }

    /// Whether the stream is [`Rng::hard`].
    pub fn is_hard(&self) -> bool {
        self.hard
    }

    /// The stream of case `index` under `seed`. Streams of two cases are independent, so a case can
    /// be regenerated without those before it.
    pub fn for_case(seed: u64, index: u64) -> Self {
        let seed = SplitMix64(seed).next();
        let index = SplitMix64(index ^ 0x6d61_726c_696e_7370).next();
        Self::new(seed ^ index.rotate_left(32))
    }

    /// 64 uniform bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// 32 uniform bits.
    pub fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    /// A number below `n` (0 when `n` is 0), uniform up to a bias below n / 2^64.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }

    /// A number from `low` to `high`, both included; `low` when the range is empty.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        low + self.below(high.saturating_sub(low) as usize + 1) as u32
    }

    /// Whether an event of probability `times / of` happens.
    pub fn chance(&mut self, times: usize, of: usize) -> bool {
        self.below(of) < times
    }

    /// One of `items`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// Puts `items` in a uniformly random order (Fisher-Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.below(i + 1);
            items.swap(i, j);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs of the authors' own C programs: SplitMix64 from seed 1234567, and
    /// xoshiro256** from state [1, 2, 3, 4].
    #[test]
    fn published_sequences() {
        let mut mix = SplitMix64(1_234_567);
        assert_eq!(
            [mix.next(), mix.next(), mix.next()],
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
        let mut rng = Rng { state: [1, 2, 3, 4], hard: false, calm: 0 };
        let first: [u64; 5] = std::array::from_fn(|_| rng.next_u64());
        assert_eq!(
            first,
            [11520, 0, 1_509_978_240, 1_215_971_899_390_074_240, 1_216_172_134_540_287_360]
        );
    }

    #[test]
    fn ranges_are_reached_and_kept() {
        let mut rng = Rng::new(1);
        let mut seen = [false; 7];
        for _ in 0..200 {
            seen[rng.below(7)] = true;
            assert!((3..=5).contains(&rng.between(3, 5)));
        }
        assert_eq!(seen, [true; 7]);
        assert_eq!(rng.below(0), 0);
        let mut items: Vec<u32> = (0..50).collect();
        rng.shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort_unstable();
        assert!(items.iter().copied().eq(0..50));
    }
}
