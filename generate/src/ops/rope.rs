//! Rotary position embedding.

/// The frequencies of a model. Halves of a head are rotated against each other (element i with
/// i + `head_dim` / 2), as in Llama, Mixtral and Qwen checkpoints.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// θ^(−2i / `head_dim`), computed in f64 and rounded to f32, as models are trained with.
    inverse: Vec<f32>,
}

impl Rope {
    /// The frequencies of heads of `head_dim` values, which must be even.
    pub fn new(theta: f64, head_dim: usize) -> Self {
        let power = |i: usize| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            (1.0 / libm::pow(theta, f64::from(exponent))) as f32
        };
        Self { inverse: (0..head_dim / 2).map(power).collect() }
    }

    /// cos and sin of every frequency at `position`: `[2][head_dim / 2]`, appended to `table`.
    ///
    /// The angle is position · frequency in f32, as transformers and vLLM compute it. cos and sin are
    /// computed in f64 and rounded once.
    pub fn angles(&self, position: usize, table: &mut Vec<f32>) {
        let angles = self.inverse.iter().map(|&f| f64::from(position as f32 * f));
        table.extend(angles.clone().map(|a| libm::cos(a) as f32));
        table.extend(angles.map(|a| libm::sin(a) as f32));
    }

    /// Numbers that [`Rope::angles`] appends.
    pub fn table_len(&self) -> usize {
        2 * self.inverse.len()
    }
}

/// Rotates every head of a row by the angles of one position.
pub fn rotate(row: &mut [f32], table: &[f32]) {
    let half = table.len() / 2;
    let (cos, sin) = table.split_at(half);
    for head in row.chunks_exact_mut(2 * half) {
        let (first, second) = head.split_at_mut(half);
        for i in 0..half {
            let (a, b) = (first[i], second[i]);
            first[i] = a * cos[i] - b * sin[i];
            second[i] = b * cos[i] + a * sin[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_zero_is_the_identity_and_lengths_are_kept() {
        let rope = Rope::new(10_000.0, 8);
        let row: Vec<f32> = (0..16).map(|i| i as f32 - 7.5).collect();
        let (mut table, mut rotated) = (Vec::new(), row.clone());
        rope.angles(0, &mut table);
        rotate(&mut rotated, &table);
        assert_eq!(rotated, row);
        table.clear();
        rope.angles(5, &mut table);
        rotate(&mut rotated, &table);
        for (a, b) in row.chunks(8).zip(rotated.chunks(8)) {
            let norm = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>();
            assert!((norm(a) - norm(b)).abs() < 1e-4 && a != b);
        }
        // The fastest frequency turns by one radian for each position.
        let expected = f64::from(row[0]) * 5f64.cos() - f64::from(row[4]) * 5f64.sin();
        assert!((f64::from(rotated[0]) - expected).abs() < 1e-5);
    }
}
