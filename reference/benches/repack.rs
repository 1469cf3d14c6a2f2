//! Repacking compared with a plain copy of the same bytes: it is a permutation, so the copy is its
//! limit. Run with `cargo bench -p marlinspike --bench repack`.

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use marlinspike::layouts::Layout;
use marlinspike::layouts::marlin::{Activations, WeightLayout};
use marlinspike::num::dims::Shape;
use marlinspike::weight::Codes;

fn main() {
    divan::main();
}

const THREADS: [usize; 2] = [1, 2];
/// One large dense matrix, and a stack of experts of the Qwen3-30B-A3B kind (w13: K 2048, N 1536).
const DENSE: Shape = Shape::new(4096, 14336);
const EXPERT: Shape = Shape::new(2048, 1536);
const EXPERTS: usize = 128;

fn words(shape: Shape, bits: u32, count: usize) -> Vec<u32> {
    let len = shape.len() / (32 / bits as usize) * count;
    (0..len as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect()
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool")
}

fn bench_pack(bencher: Bencher, threads: usize, shape: Shape, bits: u32, count: usize, perm: bool) {
    let source = words(shape, bits, count);
    let layout = WeightLayout::new(shape, bits, Activations::Bits16).expect("a Marlin shape");
    // act-order of groups of 128, as a sort of a shuffled g_idx gives it.
    let rows = shape.size_k as u32;
    let perm: Option<Vec<u32>> = perm.then(|| (0..rows).map(|k| (k * 1237) % rows).collect());
    let mut out = vec![0u32; source.len()];
    let pool = pool(threads);
    bencher.counter(BytesCount::new(source.len() * 4)).bench_local(|| {
        pool.install(|| {
            let per = source.len() / count;
            for (source, out) in source.chunks_exact(per).zip(out.chunks_exact_mut(per)) {
                let codes = Codes::from_words(bits, shape, source).expect("packed words");
                layout.pack_into(&codes, perm.as_deref(), out).expect("packed");
            }
        });
        black_box(out[out.len() / 2])
    });
    assert_eq!(layout.packed_len() * count, out.len());
}

fn bench_copy(bencher: Bencher, threads: usize, len: usize) {
    let source = vec![0x5au8; len];
    let mut out = vec![0u8; len];
    let pool = pool(threads);
    bencher.counter(BytesCount::new(len)).bench_local(|| {
        pool.scope(|s| {
            let part = len.div_ceil(threads);
            for (out, source) in out.chunks_mut(part).zip(source.chunks(part)) {
                s.spawn(|_| out.copy_from_slice(black_box(source)));
            }
        });
        black_box(out[len / 2])
    });
}

/// The limit: `copy_from_slice` of the dense matrix's bytes.
#[divan::bench(args = THREADS)]
fn copy_dense(bencher: Bencher, threads: usize) {
    bench_copy(bencher, threads, DENSE.len() / 2);
}

/// 4-bit repack of K 4096 × N 14336.
#[divan::bench(args = THREADS)]
fn repack4_dense(bencher: Bencher, threads: usize) {
    bench_pack(bencher, threads, DENSE, 4, 1, false);
}

/// The same with act-order.
#[divan::bench(args = THREADS)]
fn repack4_dense_act_order(bencher: Bencher, threads: usize) {
    bench_pack(bencher, threads, DENSE, 4, 1, true);
}

/// 8-bit repack of half as many columns: the same bytes.
#[divan::bench(args = THREADS)]
fn repack8_dense(bencher: Bencher, threads: usize) {
    bench_pack(bencher, threads, Shape::new(4096, 7168), 8, 1, false);
}

/// The limit for the expert stack.
#[divan::bench(args = THREADS)]
fn copy_experts(bencher: Bencher, threads: usize) {
    bench_copy(bencher, threads, EXPERT.len() / 2 * EXPERTS);
}

/// 4-bit repack of 128 experts.
#[divan::bench(args = THREADS)]
fn repack4_experts(bencher: Bencher, threads: usize) {
    bench_pack(bencher, threads, EXPERT, 4, EXPERTS, false);
}
