//! Mutants: wrong variants of operations, many of which have shipped. The properties must reject every
//! one.

mod cases;
mod layer;

pub use cases::cases;
pub use layer::{WrongLayer, layers};

use marlinspike::act_order;
use marlinspike::layouts::marlin::{int4_to_fp8_symmetric, kernel_global_scale};

use crate::ops::*;
use crate::subject::{Element, Operation, Reference, Subject, SubjectError};
use crate::{Config, Report, run};

/// A wrong variant of an operation.
pub struct Mutant {
    /// What is wrong with it.
    pub name: &'static str,
    /// Name of the operation.
    pub operation: &'static str,
    /// Runs the properties of the operation on it.
    pub run: Box<dyn Fn(&Config) -> Report>,
}

/// A function as a subject.
struct FnSubject<F>(F);

impl<O, F> Subject<O> for FnSubject<F>
where
    O: Operation,
    F: Fn(&O::Input) -> Result<Vec<O::Element>, marlinspike::Error>,
{
    /// An output that is too long is truncated, one that is too short is repeated.
    fn call(&self, input: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        let values = (self.0)(input).map_err(|e| SubjectError(e.to_string()))?;
        for (slot, &value) in out.iter_mut().zip(values.iter().cycle()) {
            *slot = value;
        }
        Ok(())
    }
}

fn mutant<O: Operation>(
    name: &'static str,
    make: impl Fn(&O::Input) -> Result<Vec<O::Element>, marlinspike::Error> + 'static,
) -> Mutant {
    let subject = FnSubject(make);
    Mutant { name, operation: O::NAME, run: Box::new(move |c| run::<O, _>(&subject, c)) }
}

/// Every element made of the same byte.
struct Constant(u8);

impl<O: Operation> Subject<O> for Constant {
    fn call(&self, _: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        out.fill(O::Element::of_byte(self.0));
        Ok(())
    }
}

/// Right, except that the last element is not written.
struct Unwritten;

impl<O: Operation> Subject<O> for Unwritten {
    fn call(&self, input: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        let last = out.last().copied();
        Subject::<O>::call(&Reference, input, out)?;
        if let (Some(slot), Some(last)) = (out.last_mut(), last) {
            *slot = last;
        }
        Ok(())
    }
}

/// Right in the first call, with a flipped bit in each later call, as with a race.
struct Drifting(std::cell::Cell<u32>);

impl<O: Operation> Subject<O> for Drifting {
    fn call(&self, input: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        Subject::<O>::call(&Reference, input, out)?;
        let calls = self.0.replace(self.0.get() + 1);
        let at = calls as usize % out.len();
        let bits: u32 = out[at].into();
        out[at] = O::Element::of_bits(bits ^ calls & 1);
        Ok(())
    }
}

/// Mutants of every operation.
fn common<O: Operation>() -> [Mutant; 5] {
    let made = |name, run| Mutant { name, operation: O::NAME, run };
    [
        made("all zeros", Box::new(|c: &Config| run::<O, _>(&Constant(0), c))),
        made("all ones (NaN in every float type)", Box::new(|c| run::<O, _>(&Constant(0xff), c))),
        made("float16 NaN bytes", Box::new(|c| run::<O, _>(&Constant(0x7f), c))),
        made("last element unwritten", Box::new(|c| run::<O, _>(&Unwritten, c))),
        made("differs from call to call", Box::new(|c| run::<O, _>(&Drifting(0.into()), c))),
    ]
}

/// The reference on changed arguments.
fn with<O: Operation>(name: &'static str, change: impl Fn(&mut O::Input) + 'static) -> Mutant {
    mutant::<O>(name, move |input| {
        let mut input = input.clone();
        change(&mut input);
        O::expected(&input)
    })
}

fn map_perms(input: &mut RepackInput, f: impl Fn(&[u32]) -> Vec<u32>) {
    if let Some(perm) = &input.perm {
        input.perm = Some(perm.chunks_exact(input.size_k).flat_map(f).collect());
    }
}

fn swap_nibbles(word: u32) -> u32 {
    (word & 0x0f0f_0f0f) << 4 | word >> 4 & 0x0f0f_0f0f
}

/// All mutants of layouts; [`layers`] has those of whole layers, which take longer.
pub fn all() -> Vec<Mutant> {
    let mut all = vec![
        // act-order
        with::<Repack>("act-order: inverse permutation", |i| {
            map_perms(i, |p| act_order::inverse(p).unwrap_or_default());
        }),
        with::<Repack>("act-order: weights not permuted", |i| i.perm = None),
        with::<Repack>("act-order: permuted twice", |i| {
            map_perms(i, |p| act_order::gather(p, p));
        }),
        with::<Repack>("act-order: the first expert's permutation for all", |i| {
            let size_k = i.size_k;
            if let Some(perm) = &mut i.perm {
                let first = perm[..size_k].to_vec();
                perm.chunks_exact_mut(size_k).for_each(|p| p.copy_from_slice(&first));
            }
        }),
        with::<Repack>("nibble order: pairs swapped", |i| {
            i.qweight.iter_mut().for_each(|w| *w = swap_nibbles(*w));
        }),
        with::<Repack>("8-bit activations' tiles for 16-bit ones and the reverse", |i| {
            i.is_a_8bit ^= true;
        }),
        mutant::<Repack>("packed without the interleave", |i| {
            let order: [u32; 8] =
                if i.is_a_8bit { [0, 4, 1, 5, 2, 6, 3, 7] } else { [0, 2, 4, 6, 1, 3, 5, 7] };
            let fields = 32 / i.num_bits;
            let order = if fields == 8 { order } else { [0, 2, 1, 3, 0, 0, 0, 0] };
            let unweave = |w: u32| {
                let mask = u32::MAX >> (32 - i.num_bits);
                (0..fields).fold(0, |word, p| {
                    word | (w >> (p * i.num_bits) & mask) << (order[p as usize] * i.num_bits)
                })
            };
            Ok(Repack::expected(i)?.into_iter().map(unweave).collect())
        }),
        mutant::<Repack>("experts in reverse order", |i| {
            let out = Repack::expected(i)?;
            Ok(out.rchunks_exact(i.words()).flatten().copied().collect())
        }),
        mutant::<Repack>("one nibble of the last word flipped", |i| {
            let mut out = Repack::expected(i)?;
            if let Some(last) = out.last_mut() {
                *last ^= 1 << 28;
            }
            Ok(out)
        }),
        with::<Fp4Repack>("even k in the high nibble", |i| {
            i.weight.iter_mut().for_each(|b| *b = b.rotate_left(4));
        }),
        mutant::<MergeW13>("gate and up swapped", |i| i.merged(&i.up, &i.gate)),
        mutant::<MergeW13>("gate taken for both halves", |i| i.merged(&i.gate, &i.gate)),
        // scales
        mutant::<PermuteScales>("w13: order chosen with the intermediate size as K", |i| {
            i.permuted(i.size_n / 2)
        }),
        mutant::<PermuteScales>("order chosen with the packed K", |i| i.permuted(i.size_k / 8)),
        with::<PermuteScales>("order of 16-bit activations under 8-bit ones", |i| {
            i.is_a_8bit = false;
        }),
        mutant::<PermuteScales>("not permuted", |i| Ok(i.scales.clone())),
        mutant::<PermuteBias>("bias not permuted", |i| Ok(i.bias.clone())),
        mutant::<PermuteBias>("bias in the grouped order", |i| {
            let column = |p: usize| p / 64 * 64 + p % 8 * 8 + p % 64 / 8;
            Ok((0..i.bias.len()).map(|p| i.bias[column(p)]).collect())
        }),
        mutant::<Int8Scales>("factor left out", |i| {
            let mut out = Int8Scales::expected(i)?;
            if let Some(last) = out.last_mut() {
                *last = 1f32.to_bits();
            }
            Ok(out)
        }),
        mutant::<Int8Scales>("scales left as floats", |i| {
            let mut out = Int8Scales::expected(i)?;
            for (slot, &s) in out.iter_mut().zip(&i.scales) {
                *slot = s.into();
            }
            Ok(out)
        }),
        mutant::<Nvfp4Scales>("not reordered in fours", |i| {
            let out = Nvfp4Scales::expected(i)?;
            Ok(out.chunks_exact(4).flat_map(|q| [q[0], q[2], q[1], q[3]]).collect())
        }),
        mutant::<Nvfp4Scales>("not shifted: the sign bit kept", |i| {
            Ok(Nvfp4Scales::expected(i)?.into_iter().map(|b| b >> 1).collect())
        }),
        mutant::<MxScales>("not reordered in fours, or reordered under fp8 activations", |i| {
            let out = MxScales::expected(i)?;
            Ok(out.chunks_exact(4).flat_map(|q| [q[0], q[2], q[1], q[3]]).collect())
        }),
        mutant::<MxScales>("6 not added under fp8 activations", |i| {
            let less = if i.fp8_activations { 6 } else { 0 };
            Ok(MxScales::expected(i)?.into_iter().map(|b| b.wrapping_sub(less)).collect())
        }),
        // shards
        with::<ShardScales>("act-order: scales cut along K all the same", |i| i.desc_act = false),
        with::<ShardScales>("grouped scales not cut along K", |i| i.desc_act = true),
        with::<ShardScales>("actorder static taken for group", |i| i.desc_act |= i.static_order),
        mutant::<ShardScales>("group_size -1 used as a stride", |i| {
            let out = ShardScales::expected(i)?;
            if i.group_size != -1 {
                return Ok(out);
            }
            let start = i.tp_rank * (i.size_k / i.tp_size) / i.group_size.unsigned_abs() as usize;
            Ok((0..out.len()).map(|n| i.scales[(start + 32 + n) % i.scales.len()]).collect())
        }),
        // zero points
        with::<GptqZeroPoints>("v2 zeros read as v1 and the reverse", |i| i.v2 ^= true),
        with::<GptqZeroPoints>("all zeros read as v1", |i| i.v2 = false),
        with::<GptqZeroPoints>("all zeros read as v2", |i| i.v2 = true),
        mutant::<AwqZeroPoints>("AWQ's interleave instead of its inverse", |i| {
            let inverse: &[usize] =
                if i.num_bits == 4 { &[0, 4, 1, 5, 2, 6, 3, 7] } else { &[0, 2, 1, 3] };
            i.repacked(inverse)
        }),
        mutant::<AwqZeroPoints>("AWQ's interleave not undone", |i| {
            let plain: &[usize] =
                if i.num_bits == 4 { &[0, 1, 2, 3, 4, 5, 6, 7] } else { &[0, 1, 2, 3] };
            i.repacked(plain)
        }),
        mutant::<Preprocess>("codes not rewritten", |i| Ok(i.qweight.clone())),
        mutant::<Preprocess>("zero points ignored", |i| Ok(int4_to_fp8_symmetric(&i.qweight))),
        // order and global scale
        mutant::<Sort>("sorted in descending order", |i| {
            let out = Sort::expected(i)?;
            let (perm, g_idx) = out.split_at(i.g_idx.len());
            Ok(perm.iter().rev().chain(g_idx.iter().rev()).copied().collect())
        }),
        mutant::<Sort>("the inverse permutation", |i| {
            let sorted = act_order::sort(&i.g_idx);
            Ok([act_order::inverse(&sorted.perm)?, sorted.g_idx].concat())
        }),
        mutant::<Sort>("sorted g_idx, identity permutation", |i| {
            let identity = (0..i.g_idx.len() as u32).collect();
            Ok([identity, act_order::sort(&i.g_idx).g_idx].concat())
        }),
        with::<Nvfp4GlobalScale>("up's global scale for gate", |i| i.gate = i.up),
        with::<Nvfp4GlobalScale>("multiplied where the format divides", |i| i.divisor = false),
        with::<Nvfp4GlobalScale>("divided where the format multiplies", |i| i.divisor = true),
        mutant::<Nvfp4GlobalScale>("scale factor not divided out", |i| {
            let multiplier = if i.divisor { 1.0 / i.gate } else { i.gate };
            Ok(vec![kernel_global_scale(multiplier, i.dtype, 1.0).to_bits()])
        }),
    ];
    all.extend(common::<Repack>());
    all.extend(common::<Fp4Repack>());
    all.extend(common::<MergeW13>());
    all.extend(common::<PermuteScales>());
    all.extend(common::<PermuteBias>());
    all.extend(common::<Int8Scales>());
    all.extend(common::<Nvfp4Scales>());
    all.extend(common::<MxScales>());
    all.extend(common::<ShardScales>());
    all.extend(common::<GptqZeroPoints>());
    all.extend(common::<AwqZeroPoints>());
    all.extend(common::<Preprocess>());
    all.extend(common::<Sort>());
    all.extend(common::<Nvfp4GlobalScale>());
    all
}
