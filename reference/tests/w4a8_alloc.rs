//! A forward call allocates nothing once its workspace has grown.

#[allow(dead_code, reason = "each test uses a part")]
#[path = "w4a8/layers/mod.rs"]
mod layers;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use layers::{Batch, Given, Sizes, matrix};
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::{Linear, LinearWorkspace, Values};

/// The system's allocator with a count of its calls.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code)]
// SAFETY: every call is forwarded to the system's allocator with unchanged arguments; reallocation
// is the default implementation, which calls `alloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, SeqCst);
        // SAFETY: the caller guarantees the conditions of `System::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees the conditions of `System::dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The only test of this file, since the allocations of another test would be counted, too.
#[test]
fn forward_calls_do_not_allocate() {
    let mut rng = Rng::new(31);
    let groups = [GroupSize::Of(32), GroupSize::Of(64)];
    let sizes = Sizes { experts: 6, size_h: 256, size_i: 192, groups, nr: 8 };
    let given = Given::new(sizes, 32);
    let (layer, tokens) = (given.engine(), 50);
    let weight = matrix(Shape::new(256, 512), groups[0], 8, &mut rng);
    let dense = Linear::new(weight, given.config.rounding);
    let mut linear_workspace = LinearWorkspace::default();
    for threads in 1..=3 {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let any = |rng: &mut Rng, _: usize| rng.below(6) as i32;
        let batches = [ScalarType::FLOAT32, ScalarType::BFLOAT16]
            .map(|ty| Batch::new(sizes, ty, tokens, 2, &mut rng, any));
        let logits: Vec<f32> = (0..tokens * 6).map(|_| rng.below(1000) as f32 / 99.0).collect();
        let mut workspace = layer.workspace(tokens);
        let mut wide = Values::F32(vec![0.0; tokens * 512]);
        let mut outputs = batches.each_ref().map(Batch::output);
        let counted = pool.install(|| {
            // A thread allocates its own buffers when it first steals work, at any call.
            // Allocations of a call itself would occur in every call.
            let mut counted = [0; 12];
            for count in &mut counted {
                let before = ALLOCATIONS.load(SeqCst);
                for (batch, out) in batches.iter().zip(&mut outputs) {
                    let (x, logits) = (batch.x.view(256), rows_of("logits", &logits, 6).unwrap());
                    let (x, y) = (x.unwrap(), out.view_mut(256).unwrap());
                    layer.forward(x, logits, &mut workspace, y).unwrap();
                    let (routed, y) = (batch.routed(), out.view_mut(256).unwrap());
                    layer.forward_routed(x, routed, &mut workspace, y).unwrap();
                }
                let (x, y) = (batches[0].x.view(256), wide.view_mut(512));
                dense.forward(x.unwrap(), &mut linear_workspace, y.unwrap()).unwrap();
                *count = ALLOCATIONS.load(SeqCst) - before;
            }
            counted
        });
        assert!(counted.contains(&0), "{threads} threads: {counted:?}");
    }
}
