//! Known mistakes in quantizing, packing and multiplying.

type Packed<'c> = Vec<Candidate<'c, Vec<u8>>>;

use super::bytes::{Candidate, Sources};
use crate::num::scalar::{ScalarType, bf16_to_f32, f32_to_bf16_rtz};
use crate::w4a8::packed::{
    CHUNK, Columns, Factors, LhsLayout, PIECE, QuantizedRows, padded_k, segment_sums,
};
use crate::w4a8::quantize::{self, ActivationRounding, quantize_with};
use crate::w4a8::scalar::{self, Narrow, Steps, product_with};

const HALF_EVEN: &str = "halves are rounded to even, declared is away from zero";
const HALF_AWAY: &str = "halves are rounded away from zero, declared is to even";

fn other(rounding: ActivationRounding) -> (ActivationRounding, &'static str, &'static str) {
    match rounding {
        ActivationRounding::HalfAway => {
            (ActivationRounding::HalfEven, "rounding-half-even", HALF_EVEN)
        }
        ActivationRounding::HalfEven => {
            (ActivationRounding::HalfAway, "rounding-half-away", HALF_AWAY)
        }
    }
}

impl Sources<'_> {
    fn requantized(&self, steps: quantize::Steps) -> Option<QuantizedRows> {
        quantize_with(self.x.as_ref()?, self.config.size_k, steps).ok()
    }

    /// Wrong quantizations: id, text, rows.
    fn quantizations(&self) -> [(&'static str, &'static str, quantize::Steps); 3] {
        let rounding = self.config.activation_rounding;
        let right = quantize::Steps { rounding, by_reciprocal: false, range_over_255: false };
        let (rounding, id, text) = other(rounding);
        [
            (id, text, quantize::Steps { rounding, ..right }),
            (
                "quotient-by-reciprocal",
                "codes are x divided by the stored reciprocal, not x times the scale",
                quantize::Steps { by_reciprocal: true, ..right },
            ),
            (
                "reciprocal-of-range",
                "the stored reciprocal is range / 255, not the reciprocal of 255 / range",
                quantize::Steps { range_over_255: true, ..right },
            ),
        ]
    }

    pub(crate) fn lhs_candidates<'c>(&'c self, rows: &'c QuantizedRows) -> Packed<'c> {
        let layout = self.lhs_layout;
        let pack = move |rows: &QuantizedRows| Some(layout.pack(rows).ok()?.bytes().to_vec());
        let changed = move |change: &dyn Fn(&mut QuantizedRows)| {
            let mut wrong = rows.clone();
            change(&mut wrong);
            pack(&wrong)
        };
        let mut all: Packed<'c> = self
            .quantizations()
            .into_iter()
            .map(|(id, text, steps)| {
                Candidate::of(id, text, move || pack(&self.requantized(steps)?))
            })
            .collect();
        let size_k = layout.size_k();
        let padded = move |fill: fn(&QuantizedRows, usize) -> i8| {
            changed(&|wrong| {
                for m in 0..wrong.size_m {
                    let fill = fill(rows, m);
                    wrong.codes[m * padded_k(size_k)..][..padded_k(size_k)][size_k..].fill(fill);
                }
            })
        };
        all.push(Candidate::of(
            "padding-zero",
            "codes past K are 0, not those of the last activation",
            move || padded(|_, _| 0),
        ));
        all.push(Candidate::of(
            "padding-zero-point",
            "codes past K are the zero point, not those of the last activation",
            move || padded(|rows, m| -rows.negated_zero_points[m] as i8),
        ));
        all.push(Candidate::of(
            "zero-point-not-negated",
            "the zero points are stored, not their negatives",
            move || changed(&|w| w.negated_zero_points.iter_mut().for_each(|z| *z = -*z)),
        ));
        all.push(Candidate::of(
            "scale-for-reciprocal",
            "the scales are stored, not their reciprocals",
            move || changed(&|w| w.reciprocals.iter_mut().for_each(|r| *r = 1.0 / *r)),
        ));
        for (id, text, piece) in [
            ("k-interleave-4", "rows are interleaved by 4 k, not 8", 4),
            ("k-interleave-16", "rows are interleaved by 16 k, not 8", 16),
            ("rows-not-interleaved", "the rows of a block follow each other whole", usize::MAX),
        ] {
            all.push(Candidate::of(id, text, move || interleaved(layout, rows, piece)));
        }
        all
    }

    pub(crate) fn rhs_candidates(&self) -> Packed<'_> {
        let layout = self.rhs_layout;
        let columns = &self.columns;
        let pack = move |columns: &Columns| Some(layout.pack(columns).ok()?.bytes().to_vec());
        // Code bytes changed, regardless of their meaning.
        let bytes = move |change: fn(u8) -> u8| {
            let mut bytes = pack(columns)?;
            for block in bytes.chunks_exact_mut(layout.block_bytes()) {
                for g in 0..layout.groups() {
                    let codes = layout.nr() * layout.padded_group() / 2;
                    for byte in &mut block[g * layout.group_bytes()..][..codes] {
                        *byte = change(*byte);
                    }
                }
            }
            Some(bytes)
        };
        // Source of the code in slot k of the layout; `None` past K.
        let moved = move |from: fn(usize) -> usize| {
            let size_k = layout.shape().size_k;
            let code = |k: usize, n: usize| columns.column(n).get(from(k)).copied().unwrap_or(0);
            // A layout that moves codes into the padding of K cannot be expressed in columns.
            let inside = (size_k..padded_k(size_k)).all(|k| from(k) >= size_k);
            inside.then(|| pack(&columns.with_codes(code)))?
        };
        let mut all: Packed<'_> = vec![
            Candidate::of("nibbles-exchanged", "high and low nibbles are exchanged", move || {
                bytes(|b| b.rotate_left(4))
            }),
            Candidate::of("nibbles-unsigned", "nibbles hold the code + 8", move || {
                bytes(|b| b ^ 0x88)
            }),
            Candidate::of(
                "k-pairs-exchanged",
                "each even k and the next are exchanged",
                move || moved(|k| k ^ 1),
            ),
            Candidate::of(
                "k-interleave-adjacent",
                "a byte holds neighbouring k, not k and k + 16",
                move || {
                    // Byte j of segment s holds 16s + 2j and 16s + 2j + 1.
                    moved(|k| {
                        let (high, s, j) = (k % CHUNK / 16, k % 16 / PIECE, k % PIECE);
                        k / CHUNK * CHUNK + 16 * s + 2 * j + high
                    })
                },
            ),
            Candidate::of(
                "k-interleave-8",
                "a byte holds k and k + 8, not k and k + 16",
                move || {
                    moved(|k| {
                        let (high, s, j) = (k % CHUNK / 16, k % 16 / PIECE, k % PIECE);
                        k / CHUNK * CHUNK + 16 * s + 8 * high + j
                    })
                },
            ),
            Candidate::of(
                "padding-columns-zero",
                "columns past N are zero, not the last column again",
                move || {
                    let mut bytes = pack(columns)?;
                    for (at, byte) in bytes.iter_mut().enumerate() {
                        if layout.locate(at, 0).column >= layout.shape().size_n {
                            *byte = 0;
                        }
                    }
                    Some(bytes)
                },
            ),
        ];
        let wrong = self.wrong_columns().into_iter();
        all.extend(wrong.map(|(id, text, make)| Candidate::of(id, text, move || pack(&make()?))));
        all
    }

    /// Wrong scales, sums and biases.
    fn wrong_columns(&self) -> Vec<WrongColumns<'_>> {
        let columns = &self.columns;
        let sums = move |sum: fn(&[i8], &[u16], usize) -> f32| {
            let Factors::Group { group_size, scales, .. } = columns.factors() else { return None };
            let groups = columns.shape().size_k / group_size;
            let made: Vec<f32> = (0..columns.shape().size_n)
                .map(|n| sum(columns.column(n), &scales[n * groups..][..groups], *group_size))
                .collect();
            Some(columns.with(|factors, _| {
                if let Factors::Group { sums, .. } = factors {
                    *sums = made;
                }
            }))
        };
        let channel = move |change: fn(&mut Vec<f32>, &mut Vec<i32>)| {
            matches!(columns.factors(), Factors::Channel { .. }).then(|| {
                columns.with(|factors, _| {
                    if let Factors::Channel { scales, sums } = factors {
                        change(scales, sums);
                    }
                })
            })
        };
        vec![
            (
                "bias-missing",
                "the bias is left out",
                Box::new(move || Some(columns.with(|_, bias| bias.fill(0.0)))),
            ),
            (
                "scale-not-divided",
                "scales are not divided by 16",
                Box::new(move || channel(|scales, _| scales.iter_mut().for_each(|s| *s *= 16.0))),
            ),
            (
                "sum-not-times-16",
                "sums of codes are not multiplied with 16",
                Box::new(move || channel(|_, sums| sums.iter_mut().for_each(|s| *s /= 16))),
            ),
            (
                "sum-missing",
                "sums of codes are zero",
                Box::new(move || channel(|_, sums| sums.fill(0)).or_else(|| sums(|_, _, _| 0.0))),
            ),
            (
                "sum-without-scale",
                "sums are of codes, not of codes times scales",
                Box::new(move || sums(|column, _, _| column.iter().map(|&w| f32::from(w)).sum())),
            ),
            (
                "sum-per-group",
                "sums are rounded once per group, not per segment",
                Box::new(move || {
                    sums(|column, scales, g| {
                        let of = column.chunks_exact(g).zip(scales);
                        of.fold(0.0, |sum, (codes, &scale)| {
                            let w: i32 = codes.iter().map(|&w| i32::from(w)).sum();
                            sum + w as f32 * bf16_to_f32(scale)
                        })
                    })
                }),
            ),
            (
                "sum-descending",
                "sums go from the last segment to the first",
                Box::new(move || {
                    sums(|column, scales, g| {
                        let parts: Vec<i32> = segment_sums(column).collect();
                        parts.iter().enumerate().rev().fold(0.0, |sum, (i, &w)| {
                            sum + w as f32 * bf16_to_f32(scales[i * CHUNK / 2 / g])
                        })
                    })
                }),
            ),
            (
                "sum-rounded-once",
                "sums are exact and rounded once",
                Box::new(move || {
                    sums(|column, scales, g| {
                        let of = column.chunks_exact(g).zip(scales);
                        of.map(|(codes, &scale)| {
                            let w: i32 = codes.iter().map(|&w| i32::from(w)).sum();
                            f64::from(w) * f64::from(bf16_to_f32(scale))
                        })
                        .sum::<f64>() as f32
                    })
                }),
            ),
        ]
    }

    /// `own` states which packed buffers the case has; their errors are reported separately.
    pub(crate) fn y_candidates<'c>(
        &'c self,
        rows: &'c QuantizedRows,
        columns: &'c Columns,
        own: [bool; 2],
    ) -> Vec<Candidate<'c, Vec<u32>>> {
        let ty = self.config.dtype;
        let right = Steps::default();
        let stepped = move |steps| Some(product_with(rows, columns, ty, steps).ok()?.bits());
        let made = move |rows: &QuantizedRows, columns: &Columns| {
            Some(scalar::product(rows, columns, ty).ok()?.bits())
        };
        let steps = [
            (
                "accumulation-not-fused",
                "products with group scales are rounded before they are added",
                Steps { unfused: true, ..right },
            ),
            (
                "groups-descending",
                "groups are added from the last to the first",
                Steps { descending: true, ..right },
            ),
            (
                "zero-point-first",
                "the zero point's correction is added before the groups",
                Steps { correction_first: true, ..right },
            ),
            (
                "zero-point-missing",
                "the zero point's correction is left out",
                Steps { no_correction: true, ..right },
            ),
            (
                "bias-fused",
                "the scaled sum is not rounded before the bias is added",
                Steps { bias_fused: true, ..right },
            ),
            (
                "clamp-missing",
                "infinities are not limited to the largest finite number",
                Steps { unclamped: true, ..right },
            ),
        ];
        let mut all: Vec<Candidate<'c, Vec<u32>>> = steps
            .into_iter()
            .map(|(id, text, steps)| Candidate::of(id, text, move || stepped(steps)))
            .collect();
        for run in [8, 16, 32, 64, 128, 256] {
            for (saturates, how) in [(false, "wrap around"), (true, "saturate")] {
                let text = format!(
                    "products of {run} neighbouring k were added in 16 bits, where large sums {how}"
                );
                let steps = Steps { narrow: Some(Narrow { run, saturates }), ..right };
                let make = move || stepped(steps);
                all.push(Candidate::of("int8-accumulation-overflow", text, make));
            }
        }
        all.push(Candidate::of("bias-missing", "the bias is left out", move || {
            made(rows, &columns.with(|_, bias| bias.fill(0.0)))
        }));
        all.push(Candidate::of("scale-not-divided", "scales are not divided by 16", move || {
            let Factors::Channel { .. } = columns.factors() else { return None };
            made(
                rows,
                &columns.with(|factors, _| {
                    if let Factors::Channel { scales, .. } = factors {
                        scales.iter_mut().for_each(|s| *s *= 16.0);
                    }
                }),
            )
        }));
        if ty == ScalarType::BFLOAT16 {
            all.push(Candidate::of("output-truncated", "y is cut off, not rounded", move || {
                let y = scalar::product(rows, columns, ScalarType::FLOAT32).ok()?.to_f32();
                Some(y.into_iter().map(|y| f32_to_bf16_rtz(y).into()).collect())
            }));
        }
        if !own[0] {
            all.extend(self.quantizations().into_iter().map(|(id, text, steps)| {
                Candidate::of(id, text, move || made(&self.requantized(steps)?, columns))
            }));
        }
        if !own[1] {
            let exchanged = move || {
                let size_k = columns.shape().size_k;
                let code = |k: usize, n: usize| columns.column(n)[(k ^ 1).min(size_k - 1)];
                made(rows, &columns.with_codes(code))
            };
            let text = "each even k and the next are exchanged in the weights";
            all.push(Candidate::of("k-pairs-exchanged", text, exchanged));
            let wrong = self.wrong_columns().into_iter();
            all.extend(
                wrong.map(|(id, text, make)| Candidate::of(id, text, move || made(rows, &make()?))),
            );
        }
        all
    }
}

/// Id, text and maker of a wrong weight.
type WrongColumns<'c> = (&'static str, &'static str, Box<dyn Fn() -> Option<Columns> + 'c>);

/// Packed activations whose rows alternate every `piece` k.
fn interleaved(layout: LhsLayout, rows: &QuantizedRows, piece: usize) -> Option<Vec<u8>> {
    let width = padded_k(layout.size_k());
    let (mr, piece) = (layout.mr(), piece.min(width));
    let mut bytes = layout.pack(rows).ok()?.bytes().to_vec();
    for m in 0..layout.size_m() {
        let block = m / mr * layout.block_bytes();
        for (k, &code) in rows.row(m).iter().enumerate() {
            bytes[block + (k / piece * mr + m % mr) * piece + k % piece] = code as u8;
        }
    }
    // The missing rows of the last block are zero in any order.
    for slot in layout.size_m()..layout.blocks() * mr {
        let block = slot / mr * layout.block_bytes();
        for k in 0..width {
            bytes[block + (k / piece * mr + slot % mr) * piece + k % piece] = 0;
        }
    }
    Some(bytes)
}
