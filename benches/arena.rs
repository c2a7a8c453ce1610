//! The arena, sender and worker in one process: `arena/lease` (take, commit, claim and release of 64 KiB that are not
//! written, which is what a lease costs besides its bytes), `arena/give_back` (a block of half the arena, from its release
//! until it can be taken again), and `arena/write_64MiB` beside `arena/segment_64MiB` (the same bytes into a new segment)
//! with this many threads. The bytes are checked before anything is timed.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mmcopy::arena::{Arena, Map, Options, Writing};
use mmcopy::cast::Cast;
use mmcopy::endpoint::{self, SenderLink, WorkerEndpoint};
use mmcopy::memory::{Source, Target};
use mmcopy::name::SegmentName;
use mmcopy::segment;

const NBYTES: usize = 64 << 20;
const THREADS: [usize; 4] = [1, 2, 4, 8];
const LIMIT: Duration = Duration::from_secs(60);

struct Both {
    arena: Arena,
    map: Arc<Map>,
    worker: u32,
    _link: SenderLink,
    _endpoint: WorkerEndpoint,
}

impl Both {
    fn new(directory: &Path) -> Self {
        let num_threads = NonZeroUsize::MIN;
        let arena = Arena::create(&Options { num_threads, ..Options::new(2 * NBYTES) }).expect("memory");
        let endpoint = WorkerEndpoint::create(endpoint::Options {
            directory: directory.join("run"),
            shm_dir: directory.to_path_buf(),
            accept_prefixes: vec!["mmcopy-".to_owned()],
            allowed_uids: Vec::new(),
            max_links: 1,
            max_arenas: 1,
            max_arena_bytes: 1 << 40,
            hello_limit: LIMIT,
        });
        let endpoint = endpoint.expect("an endpoint");
        let link = SenderLink::connect(endpoint.path(), LIMIT, &[]).expect("a link");
        let worker = arena.hand_over(&link, LIMIT).expect("handed over");
        let map = endpoint.find_arena(arena.instance()).expect("mapped");
        Self { arena, map, worker, _link: link, _endpoint: endpoint }
    }

    fn take(&self, nbytes: usize) -> Writing {
        self.arena.take(&[nbytes], &[self.worker], LIMIT).expect("room").remove(0)
    }

    fn receive(&self, lease: &Writing, look: impl FnOnce(Source<'_>)) {
        let claim = self.map.claim(lease.handle()).expect("a lease");
        look(self.map.source(&claim));
        self.map.release(&claim).expect("our process");
    }

    fn write(&self, bytes: &[u8], cast: Option<Cast>, threads: NonZeroUsize) -> Writing {
        let lease =
            self.take(cast.map_or(Ok(bytes.len()), |cast| cast.dst_nbytes(bytes.len())).expect("whole elements"));
        lease.write(Source::from_slice(bytes), cast, threads).expect("written");
        lease.commit().expect("open");
        lease
    }
}

fn small(criterion: &mut Criterion, both: &Both) {
    criterion.bench_function("arena/lease", |bencher| {
        bencher.iter(|| {
            let lease = both.take(64 << 10);
            lease.commit().expect("open");
            both.receive(&lease, |_| ());
        });
    });
    criterion.bench_function("arena/give_back", |bencher| {
        bencher.iter(|| {
            let lease = both.take(NBYTES + 256);
            lease.commit().expect("open");
            both.receive(&lease, |_| ());
        });
    });
}

fn big(criterion: &mut Criterion, both: &Both, shm: &Path) {
    let bytes: Vec<u8> = (0..NBYTES).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for threads in THREADS.into_iter().filter(|threads| *threads <= cores).filter_map(NonZeroUsize::new) {
        both.receive(&both.write(&bytes, None, threads), |source| {
            let mut found = vec![0; NBYTES];
            source.copy_to(Target::from_slice(&mut found));
            assert!(found == bytes, "the bytes differ");
        });
        let mut group = criterion.benchmark_group("arena/write_64MiB");
        group.throughput(Throughput::Bytes(NBYTES as u64));
        for (name, cast) in [("copy", None), ("cast", Some(Cast::Float32ToBfloat16))] {
            group.bench_function(BenchmarkId::new(name, threads), |bencher| {
                bencher.iter(|| both.receive(&both.write(&bytes, cast, threads), |_| ()));
            });
        }
        group.finish();
        let mut group = criterion.benchmark_group("arena/segment_64MiB");
        group.throughput(Throughput::Bytes(NBYTES as u64));
        let name = SegmentName::parse("segment").expect("a name");
        group.bench_function(BenchmarkId::from_parameter(threads), |bencher| {
            bencher.iter(|| {
                segment::write(shm, &name, Source::from_slice(&bytes), None, threads).expect("written");
                std::fs::remove_file(name.path_in(shm)).expect("removed");
            });
        });
        group.finish();
    }
}

fn arenas(criterion: &mut Criterion) {
    let shm = tempfile::Builder::new().prefix("mmcopy-bench-").tempdir_in("/dev/shm").expect("a writable /dev/shm");
    let both = Both::new(shm.path());
    small(criterion, &both);
    big(criterion, &both, shm.path());
}

criterion_group!(benches, arenas);
criterion_main!(benches);
