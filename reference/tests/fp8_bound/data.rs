//! Operands of the simulated products.

use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// Distribution of a test's codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Data {
    /// Approximately normal, like quantized activations and weights.
    Normal,
    /// All of one sign: truncation errors add up.
    OneSigned,
    /// Any codes.
    Wide,
    /// Pairs that cancel except for the last bits.
    Cancelling,
    /// Most of them subnormal.
    Subnormal,
    /// One large product in a block, the others small.
    Spiked,
}

pub(crate) const DATA: [Data; 6] =
    [Data::Normal, Data::OneSigned, Data::Wide, Data::Cancelling, Data::Subnormal, Data::Spiked];

pub(crate) fn normal(random: &mut Rng) -> f64 {
    let sum: f64 = (0..12).map(|_| f64::from(random.next_u32()) / f64::from(u32::MAX)).sum();
    sum - 6.0
}

fn any(random: &mut Rng) -> u32 {
    let code = random.next_u32() & 0xff;
    if code & 0x7f == 0x7f { code ^ 1 } else { code }
}

/// A code.
fn code(random: &mut Rng, data: Data) -> u32 {
    let x = match data {
        Data::Normal | Data::Cancelling => 110.0 * normal(random),
        Data::OneSigned => 60.0 * normal(random).abs() + 4.0,
        Data::Wide => return any(random),
        Data::Subnormal if random.chance(9, 10) => 0.006 * normal(random),
        Data::Subnormal => normal(random),
        Data::Spiked if random.chance(1, 40) => 440.0,
        Data::Spiked => normal(random),
    };
    E4M3.encode_rne(x.clamp(-448.0, 448.0))
}

/// Codes `[rows, size_k]` of activations, `[cols, size_k]` of weights.
pub(crate) fn operands(random: &mut Rng, data: Data, shape: [usize; 3]) -> [Vec<u32>; 2] {
    let [rows, cols, size_k] = shape;
    let mut a: Vec<u32> = (0..rows * size_k).map(|_| code(random, data)).collect();
    let mut w: Vec<u32> = (0..cols * size_k).map(|_| code(random, data)).collect();
    if data == Data::Cancelling {
        a.chunks_exact_mut(2).for_each(|pair| pair[1] = pair[0]);
        // The neighbour with the other sign.
        let other = |code: u32, flip: u32| {
            if code & 0x7f < 0x7e { code ^ 0x80 ^ flip } else { code ^ 0x80 }
        };
        w.chunks_exact_mut(2).for_each(|pair| pair[1] = other(pair[0], random.next_u32() & 1));
    }
    [a, w]
}

pub(crate) fn values(codes: &[u32]) -> Vec<f64> {
    codes.iter().map(|&c| E4M3.to_f64(c)).collect()
}
