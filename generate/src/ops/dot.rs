//! Sums in a fixed order.

/// Partial sums of a sum over k.
pub const LANES: usize = 16;

/// The lanes as one number: halves are added until one is left.
#[inline(always)]
pub fn tree(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Σ a·b over slices of one length.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a, tail_a) = a.as_chunks::<LANES>();
    let (b, tail_b) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for j in 0..LANES {
            lanes[j] = a[j].mul_add(b[j], lanes[j]);
        }
    }
    for (j, (a, b)) in tail_a.iter().zip(tail_b).enumerate() {
        lanes[j] = a.mul_add(*b, lanes[j]);
    }
    tree(lanes)
}

/// Σ a.
#[inline(always)]
pub fn sum(a: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, tail) = a.as_chunks::<LANES>();
    for a in chunks {
        for j in 0..LANES {
            lanes[j] += a[j];
        }
    }
    for (lane, a) in lanes.iter_mut().zip(tail) {
        *lane += a;
    }
    tree(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lane by lane with indices, as the module describes the order.
    fn by_indices(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        for k in 0..a.len() {
            lanes[k % LANES] = a[k].mul_add(b[k], lanes[k % LANES]);
        }
        let quarter = |i: usize| (lanes[i] + lanes[i + 8]) + (lanes[i + 4] + lanes[i + 12]);
        (quarter(0) + quarter(2)) + (quarter(1) + quarter(3))
    }

    #[test]
    fn the_order_of_additions_is_as_described() {
        let value = |k: usize| ((k * 2_654_435_761) % 1009) as f32 / 97.0 - 5.0;
        for len in [0, 1, 15, 16, 17, 31, 64, 100] {
            let a: Vec<f32> = (0..len).map(value).collect();
            let b: Vec<f32> = (0..len).map(|k| value(k + 7)).collect();
            assert_eq!(dot(&a, &b).to_bits(), by_indices(&a, &b).to_bits(), "{len}");
            let ones = vec![1.0; len];
            assert_eq!(sum(&a).to_bits(), by_indices(&a, &ones).to_bits(), "{len}");
        }
    }
}
