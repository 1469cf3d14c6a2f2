//! Ranks in processes of their own, on as many GPUs as there are: the bits of one device, in graphs too; a process that dies or stays away
//! is an error. The processes are this test program, started by the tests below.

use crate::common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
    time::{Duration, Instant},
};

use crate::common::{Law, Random, weight};
use crate::peers::{gpus, whole};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::Split;
use marlinspike::weight::Weight;
use marlinspike_accel::{
    AccelError, Device,
    memory::Buffer,
    ops::{Handle, MarlinWeight, Rank, RankMemory},
};

const BF16: ScalarType = ScalarType::BFLOAT16;
const SHAPE: Shape = Shape { size_k: 2048, size_n: 192 };
const SIZE_M: usize = 19;
/// Role of a process that a test starts: rank, ranks, role.
const ROLE: &str = "MARLINSPIKE_TEST_RANK";
const FOLDER: &str = "MARLINSPIKE_TEST_FOLDER";

/// The same on every process.
fn inputs() -> (Weight<'static>, Vec<u16>) {
    let mut random = Random(0x5EED_000C_89AB_CDEF);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, SHAPE, GroupSize::Of(128), true);
    let x = random.halves(BF16, SIZE_M * SHAPE.size_k, 1.0);
    (w, x)
}

/// Writes a file that is whole once it is there.
fn publish(path: PathBuf, bytes: &[u8]) {
    let part = path.with_extension("part");
    fs::write(&part, bytes).unwrap();
    fs::rename(part, path).unwrap();
}

/// The file's bytes, once it is there.
fn await_file(path: &Path) -> Vec<u8> {
    let begin = Instant::now();
    loop {
        if let Ok(bytes) = fs::read(path) {
            return bytes;
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "{path:?} did not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// One process's rank.
struct Own {
    device: Device,
    weight: MarlinWeight,
    x: Buffer<u16>,
    y: Buffer<u16>,
    rank: Rank,
}

impl Own {
    /// Exchanges handles through files.
    fn join(folder: &Path, rank: usize, ranks: usize) -> Self {
        let (w, x) = inputs();
        let device = Device::open_ordinal(rank % gpus()).unwrap();
        let split = Split::new(SHAPE.size_k, rank, ranks).unwrap();
        let part = split.part_of(&w).unwrap();
        let weight = MarlinWeight::of_part(&device, &part, BF16).unwrap();
        let rows = x.chunks_exact(SHAPE.size_k);
        let x: Vec<u16> = rows.flat_map(|row| &row[split.rows()]).copied().collect();
        let (x, y) = (device.upload(&x).unwrap(), device.zeroed(SIZE_M * SHAPE.size_n).unwrap());
        let memory = RankMemory::new(&device, [rank, ranks], SIZE_M * SHAPE.size_n).unwrap();
        publish(folder.join(format!("handle{rank}")), &memory.handle().to_bytes());
        let handles = (0..ranks)
            .map(|r| Handle::from_bytes(&await_file(&folder.join(format!("handle{r}")))).unwrap());
        let handles: Vec<Handle> = handles.collect();
        let rank = Rank::of_processes(&device, memory, &handles).unwrap();
        Self { device, weight, x, y, rank }
    }

    fn call(&mut self) -> Result<(), AccelError> {
        self.rank.multiply(&self.device, &self.x, &self.weight)?;
        self.rank.add(&self.device, &self.weight, &mut self.y)
    }

    /// The bits of y, after a check.
    fn found(&self) -> Vec<u8> {
        self.rank.check(&self.device).unwrap();
        self.device.download(&self.y).unwrap().iter().flat_map(|bits| bits.to_le_bytes()).collect()
    }
}

/// What a process does that a test below starts; nothing otherwise.
#[test]
fn a_rank_in_a_process_of_its_own() {
    let (Ok(role), Some(folder)) = (std::env::var(ROLE), std::env::var_os(FOLDER)) else { return };
    let folder = Path::new(&folder);
    let role: Vec<&str> = role.split(' ').collect();
    let [rank, ranks] = [role[0], role[1]].map(|number| number.parse::<usize>().unwrap());
    let mut own = Own::join(folder, rank, ranks);
    match role[2] {
        "calls" => {
            let mut found = Vec::new();
            for two_shot in [false, true, true, false] {
                own.rank = own.rank.with_two_shot(two_shot);
                own.call().unwrap();
                found.extend(own.found());
            }
            publish(folder.join(format!("calls{rank}")), &found);
            let Own { device, weight, x, y, rank: own } = &mut own;
            let graph = device
                .record(|| {
                    for _ in 0..2 {
                        own.multiply(device, x, weight)?;
                        own.add(device, weight, y)?;
                    }
                    Ok(())
                })
                .unwrap();
            (0..25).for_each(|_| graph.replay().unwrap());
            drop(graph);
            own.check(device).unwrap();
            let y = device.download(y).unwrap();
            let found: Vec<u8> = y.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            publish(folder.join(format!("replays{rank}")), &found);
        }
        // Both call once, then rank 1 is no more.
        "loses" => {
            own.call().unwrap();
            own.found();
            if rank == 1 {
                std::process::abort();
            }
            missing(own);
        }
        // Rank 1 knows the others and never calls.
        "waits" if rank == 1 => std::mem::forget(own),
        "waits" => missing(own),
        role => panic!("{role}"),
    }
}

/// The error of a call to which rank 1 does not come, within the limit and what a launch takes.
fn missing(mut own: Own) {
    own.rank = own.rank.with_limit(Duration::from_millis(300));
    let begin = Instant::now();
    own.call().unwrap();
    let error = own.rank.check(&own.device).unwrap_err();
    let AccelError::Ranks { rank: 0, missing, odd_calls: false } = &error else {
        panic!("{error}")
    };
    assert_eq!(missing, &[1]);
    // Dropping a rank without its peers does not wait for them.
    drop(own);
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

/// Processes of those ranks.
fn start(folder: &Path, ranks: std::ops::Range<usize>, of: usize, role: &str) -> Vec<Child> {
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["processes::a_rank_in_a_process_of_its_own", "--exact", "--nocapture"])
            .env(ROLE, format!("{rank} {of} {role}"))
            .env(FOLDER, folder)
            .spawn()
            .unwrap()
    };
    ranks.map(start).collect()
}

/// Waits for a process, at most a minute, and returns whether it succeeded.
fn succeeded(mut child: Child) -> bool {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.success();
        }
        if begin.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("a process hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ranks_in_processes_have_the_bits_of_the_reference() {
    let test = "ranks_in_processes_have_the_bits_of_the_reference";
    let Some(_gpu) = common::whole_gpu_or_skip(test) else { return };
    let mut law =
        Law::new("row-parallel product, 1, 2 and 4 processes, calls and 50 recorded ones");
    let (w, x) = inputs();
    let wanted: Vec<u8> = whole(&x, &w).iter().flat_map(|bits| bits.to_le_bytes()).collect();
    for ranks in [1, 2, 4] {
        let folder = tempfile::tempdir().unwrap();
        let children = start(folder.path(), 0..ranks, ranks, "calls");
        let ends: Vec<bool> = children.into_iter().map(succeeded).collect();
        assert_eq!(ends, vec![true; ranks]);
        for rank in 0..ranks {
            let found = await_file(&folder.path().join(format!("calls{rank}")));
            assert_eq!(found.len(), 4 * wanted.len());
            for (call, found) in found.chunks_exact(wanted.len()).enumerate() {
                law.equal(&format!("rank {rank} of {ranks}, call {call}"), found, &wanted);
            }
            let found = await_file(&folder.path().join(format!("replays{rank}")));
            law.equal(&format!("rank {rank} of {ranks}, replays"), &found, &wanted);
        }
    }
    law.held_on(gpus());
}

#[test]
fn processes_that_die_or_stay_away_are_errors() {
    let Some(_gpu) = common::whole_gpu_or_skip("processes_that_die_or_stay_away_are_errors") else {
        return;
    };
    for role in ["loses", "waits"] {
        let folder = tempfile::tempdir().unwrap();
        let children = start(folder.path(), 0..2, 2, role);
        let ends: Vec<bool> = children.into_iter().map(succeeded).collect();
        assert_eq!(ends, [true, role == "waits"], "{role}");
    }
    let gpus = gpus();
    common::say(&format!("LAW processes that die or stay away are errors, GPUs: {gpus}: 2 of 2"));
}

#[test]
fn handles_that_do_not_fit_are_refused() {
    let Some(device) = common::device_or_skip("handles_that_do_not_fit_are_refused") else {
        return;
    };
    let memory = |rank, ranks, capacity| RankMemory::new(&device, [rank, ranks], capacity);
    let refused = |own: RankMemory, handles: &[Handle]| {
        Rank::of_processes(&device, own, handles).unwrap_err()
    };
    let what = |error: AccelError| match error {
        AccelError::Argument { what, .. } => what,
        error => panic!("{error}"),
    };
    assert_eq!(what(memory(0, 3, 64).unwrap_err()), "ranks");
    assert_eq!(what(memory(2, 2, 64).unwrap_err()), "rank");
    let [zero, one] = [0, 1].map(|rank| memory(rank, 2, 64).unwrap());
    let (first, second) = (zero.handle(), one.handle());
    let larger = memory(1, 2, 128).unwrap().handle();
    assert_eq!(what(refused(memory(0, 2, 64).unwrap(), &[first, second])), "handle");
    assert_eq!(what(refused(zero, &[first])), "handles");
    let own = memory(0, 2, 64).unwrap();
    let handles = [own.handle(), own.handle()];
    assert_eq!(what(refused(own, &handles)), "handle");
    let own = memory(0, 2, 64).unwrap();
    let handles = [own.handle(), larger];
    assert_eq!(what(refused(own, &handles)), "handle");
    // Whole and in order, but of memory of this process, which it cannot open, and of memory that is gone.
    let own = memory(0, 2, 64).unwrap();
    let handles = [own.handle(), second];
    let error = refused(own, &handles);
    assert!(matches!(error, AccelError::Driver { call: "cuIpcOpenMemHandle", .. }), "{error}");
    drop(one);
    let own = memory(0, 2, 64).unwrap();
    let handles = [own.handle(), second];
    let error = refused(own, &handles);
    assert!(error.to_string().contains("rank 1 of 2"), "{error}");
    // One rank needs no other.
    let own = memory(0, 1, 64).unwrap();
    let handles = [own.handle()];
    Rank::of_processes(&device, own, &handles).unwrap();
}
