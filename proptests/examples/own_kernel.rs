//! Your own kernel under the kit: `cargo run --example own_kernel -- --bug` breaks it on purpose.

use std::process::ExitCode;

use marlinspike_proptests::{Config, Subject, SubjectError, ops, run};

/// A straightforward 4-bit and 8-bit repack, written from the format's description.
struct OwnKernel {
    /// Whether the last lane's two words of a tile are swapped.
    bug: bool,
}

impl Subject<ops::Repack> for OwnKernel {
    fn call(&self, i: &ops::RepackInput, out: &mut [u32]) -> Result<(), SubjectError> {
        let bits = i.num_bits as usize;
        let pack = 32 / bits;
        let (tile_k, tile_n) = if i.is_a_8bit { (32, 32) } else { (16, 64) };
        let order: &[usize] = match (i.is_a_8bit, bits) {
            (false, 4) => &[0, 2, 4, 6, 1, 3, 5, 7],
            (false, _) => &[0, 2, 1, 3],
            (true, 4) => &[0, 4, 1, 5, 2, 6, 3, 7],
            (true, _) => &[0, 1, 2, 3],
        };
        let rows: &[usize] =
            if i.is_a_8bit { &[0, 1, 2, 3, 16, 17, 18, 19] } else { &[0, 1, 8, 9] };
        let words = i.size_k * i.size_n / pack;
        out.fill(0);
        for e in 0..i.experts {
            let code = |k: usize, n: usize| {
                let k = i.perm.as_ref().map_or(k, |p| p[e * i.size_k + k] as usize);
                let word = i.qweight[e * words + k / pack * i.size_n + n];
                word >> (k % pack * bits) & (u32::MAX >> (32 - bits))
            };
            for (t, tile) in out[e * words..][..words].chunks_mut(1024 / pack).enumerate() {
                let (k0, n0) = (t / (i.size_n / tile_n) * tile_k, t % (i.size_n / tile_n) * tile_n);
                let mut values = Vec::with_capacity(1024);
                for lane in 0..32 {
                    for block in 0..tile_n / 8 {
                        for r in rows {
                            let k = rows.len() / 2 * (lane % 4) + r;
                            values.push(code(k0 + k, n0 + 8 * block + lane / 4));
                        }
                    }
                }
                for (word, run) in tile.iter_mut().zip(values.chunks(pack)) {
                    for (field, &v) in order.iter().enumerate() {
                        *word |= run[v] << (field * bits);
                    }
                }
                if self.bug {
                    let last = tile.len() - 1;
                    tile.swap(last - 1, last);
                }
            }
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    let bug = std::env::args().any(|a| a == "--bug");
    let config = Config { cases: 200, ..Config::default() };
    let report = run::<ops::Repack, _>(&OwnKernel { bug }, &config);
    print!("{report}");
    if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
