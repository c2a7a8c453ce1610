//! The copy pool: `pool/empty_chunk` (one chunk of nothing, start to end), `pool/one_64KiB` (one chunk by the caller, from
//! a segment), `pool/hand_over` (two chunks of nothing, one of them by a thread that slept) and `pool/segment_64MiB`, in
//! chunks of 2 MiB through a ring of eight slots, with this many threads besides the caller. The bytes are checked before
//! anything is timed.
#![allow(unsafe_code)]

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mmcopy::memory::{Source, Target};
use mmcopy::name::SegmentName;
use mmcopy::pool::{CopySource, Job, Piece, Pool, Table};
use mmcopy::segment::{Segment, write};

const NBYTES: usize = 64 << 20;
const CHUNK_BYTES: usize = 2 << 20;
const SLOTS: usize = 8;
const THREADS: [usize; 4] = [1, 2, 4, 8];
const LIMIT: Duration = Duration::from_secs(60);

/// What the jobs copy from and to; it outlives them all.
struct Memory {
    source: Vec<u8>,
    segment: Arc<Segment>,
    slots: Vec<Target<'static>>,
    _bytes: Vec<Vec<u8>>,
}

impl Memory {
    fn new() -> Self {
        let source: Vec<u8> = (0..NBYTES).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
        let shm = tempfile::Builder::new().prefix("mmcopy-bench-").tempdir_in("/dev/shm").expect("a writable /dev/shm");
        let name = SegmentName::parse("segment").expect("a name");
        write(shm.path(), &name, Source::from_slice(&source), None, NonZeroUsize::MIN).expect("a segment");
        let segment = Segment::open(shm.path(), &name).expect("the segment");
        segment.unlink().expect("removed");
        let mut bytes = vec![vec![0; CHUNK_BYTES]; SLOTS];
        // SAFETY: M5. Jobs are dropped before this memory, and nobody uses a reference to `_bytes`.
        let slots = bytes.iter_mut().map(|slot| unsafe { Target::from_slice(slot).lasting() }).collect();
        Self { source, segment: Arc::new(segment), slots, _bytes: bytes }
    }

    fn start(&self, pool: &Pool, chunks: &[usize]) -> Job {
        let mut source_start = 0;
        let mut pieces = Vec::with_capacity(chunks.len());
        for (chunk, nbytes) in chunks.iter().enumerate() {
            let (chunk, nbytes) = (chunk as u64, *nbytes as u64);
            pieces.push(Piece { chunk, source: 0, source_start, slot_start: 0, nbytes });
            source_start += nbytes;
        }
        let sources = vec![CopySource::Segment(Arc::clone(&self.segment))];
        let table = Table::new(sources, self.slots.clone(), &pieces).expect("a table that fits");
        pool.start(table).expect("an open pool")
    }

    /// Copies the whole segment; `look` is called after each chunk.
    fn copy_all(&self, pool: &Pool, mut look: impl FnMut(usize)) {
        let job = self.start(pool, &[CHUNK_BYTES; NBYTES / CHUNK_BYTES]);
        for chunk in 0..job.num_chunks() {
            job.permit(chunk + SLOTS).expect("our process");
            job.wait(chunk, LIMIT).expect("the bytes");
            look(chunk);
        }
    }

    /// Whether the chunk's slot has these bytes. The chunk after it in that slot is not permitted yet.
    fn holds(&self, chunk: usize, wanted: &[u8]) -> bool {
        let mut found = vec![0; wanted.len()];
        // SAFETY: M1. The slot lives as long as `self`.
        let slot = unsafe { Source::from_raw(self.slots[chunk % SLOTS].as_mut_ptr(), wanted.len()) };
        slot.copy_to(Target::from_slice(&mut found));
        found == wanted
    }
}

fn pool(threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(threads).expect("at least one thread")).expect("threads")
}

fn small(criterion: &mut Criterion, memory: &Memory) {
    let pool = pool(2);
    check(memory, &pool);
    for (name, chunks) in [("empty_chunk", &[0][..]), ("one_64KiB", &[64 << 10]), ("hand_over", &[0, 0])] {
        criterion.bench_function(&format!("pool/{name}"), |bencher| {
            bencher.iter(|| {
                let job = memory.start(&pool, chunks);
                job.permit(chunks.len()).expect("our process");
                for chunk in 0..chunks.len() {
                    job.wait(chunk, LIMIT).expect("the bytes");
                }
            });
        });
    }
}

fn big(criterion: &mut Criterion, memory: &Memory) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut group = criterion.benchmark_group("pool/segment_64MiB");
    group.throughput(Throughput::Bytes(NBYTES as u64));
    for threads in THREADS.into_iter().filter(|threads| *threads <= cores) {
        let pool = pool(threads);
        check(memory, &pool);
        group.bench_function(BenchmarkId::from_parameter(threads), |bencher| {
            bencher.iter(|| memory.copy_all(&pool, |_| {}));
        });
    }
    let mut target = vec![0; NBYTES];
    group.bench_function("read_into-1", |bencher| {
        bencher.iter(|| memory.segment.read_into(Target::from_slice(&mut target), 0, NonZeroUsize::MIN));
    });
    group.finish();
}

fn check(memory: &Memory, pool: &Pool) {
    memory.copy_all(pool, |chunk| {
        let wanted = &memory.source[chunk * CHUNK_BYTES..][..CHUNK_BYTES];
        assert!(memory.holds(chunk, wanted), "chunk {chunk}: the bytes differ");
    });
}

fn pools(criterion: &mut Criterion) {
    let memory = Memory::new();
    small(criterion, &memory);
    big(criterion, &memory);
}

criterion_group!(benches, pools);
criterion_main!(benches);
