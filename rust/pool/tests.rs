//! Jobs over real segments and memory against an oracle of bytes, and what ends a job.
#![allow(unsafe_code)]

use std::num::NonZeroUsize;
use std::path::Path;

use proptest::prelude::*;
use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;

use super::*;
use crate::memory::{Source, Target};
use crate::name::SegmentName;
use crate::segment::{Segment, write};

const LIMIT: Duration = Duration::from_secs(60);

fn pool(num_threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(num_threads).unwrap()).unwrap()
}

fn pattern(nbytes: usize, seed: usize) -> Vec<u8> {
    (0..nbytes).map(|at| ((at + seed).wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

fn removed_segment(shm: &Path, bytes: &[u8]) -> Arc<Segment> {
    let name = SegmentName::parse("segment").unwrap();
    write(shm, &name, Source::from_slice(bytes), None, NonZeroUsize::MIN).unwrap();
    let segment = Segment::open(shm, &name).unwrap();
    assert_eq!(segment.unlink(), Ok(true));
    Arc::new(segment)
}

/// A job with the memory that it writes to, which outlives it: fields are dropped in this order.
struct Running {
    job: Job,
    slots: Vec<Target<'static>>,
    _memory: Vec<Vec<u8>>,
}

impl Running {
    fn start(pool: &Pool, sources: Vec<CopySource>, slot_sizes: &[usize], pieces: &[Piece]) -> Result<Self> {
        let mut memory: Vec<Vec<u8>> = slot_sizes.iter().map(|nbytes| vec![0xee; *nbytes]).collect();
        // SAFETY: M5. The bytes live in `_memory`, where no reference to them is used until the job is dropped.
        let slots: Vec<_> = memory.iter_mut().map(|bytes| unsafe { Target::from_slice(bytes).lasting() }).collect();
        let job = pool.start(Table::new(sources, slots.clone(), pieces)?)?;
        Ok(Self { job, slots, _memory: memory })
    }

    fn slot(&self, chunk: usize) -> Vec<u8> {
        let slot = self.slots[chunk % self.slots.len()];
        let mut bytes = vec![0; slot.nbytes()];
        // SAFETY: M1. The slot's bytes live as long as `self`.
        unsafe { Source::from_raw(slot.as_mut_ptr(), slot.nbytes()) }.copy_to(Target::from_slice(&mut bytes));
        bytes
    }
}

fn lasting(bytes: &[u8]) -> CopySource {
    // SAFETY: M5. The tests keep these bytes until their jobs are dropped.
    CopySource::Memory(unsafe { Source::from_slice(bytes).lasting() })
}

fn piece(chunk: u64, source: u64, source_start: u64, slot_start: u64, nbytes: u64) -> Piece {
    Piece { chunk, source, source_start, slot_start, nbytes }
}

/// One piece a chunk of this many bytes, from one source.
fn chunks_of(nbytes: u64, count: u64) -> Vec<Piece> {
    (0..count).map(|chunk| piece(chunk, 0, chunk * nbytes, 0, nbytes)).collect()
}

#[derive(Clone, Debug)]
struct Case {
    num_threads: usize,
    num_slots: usize,
    /// For each chunk its pieces: source, a place in it and a length in 1/1000 of what fits.
    chunks: Vec<Vec<(usize, usize, usize)>>,
    /// How many chunks beyond the next one the owner permits when it can.
    ahead: Vec<usize>,
}

fn cases() -> impl Strategy<Value = Case> {
    let pieces = prop::collection::vec((0_usize..3, 0_usize..=1000, 0_usize..=1000), 1..5);
    let chunks = prop::collection::vec(pieces, 0..12);
    (1_usize..=4, 1_usize..=6, chunks, prop::collection::vec(0_usize..6, 1..6))
        .prop_map(|(num_threads, num_slots, chunks, ahead)| Case { num_threads, num_slots, chunks, ahead })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn every_chunk_has_the_bytes_of_its_pieces(case in cases()) {
        const SLOT_BYTES: usize = 20_000;
        let shm = TempDir::new().unwrap();
        let bytes = [pattern(30_011, 1), pattern(5000, 2), pattern(70_000, 3)];
        let sources = vec![
            CopySource::Segment(removed_segment(shm.path(), &bytes[0])),
            lasting(&bytes[1]),
            lasting(&bytes[2]),
        ];
        let mut pieces = Vec::new();
        let mut wanted = Vec::new();
        for (chunk, parts) in case.chunks.iter().enumerate() {
            let mut slot = Vec::new();
            for (source, place, length) in parts {
                let start = bytes[*source].len() * place / 1000;
                let room = (bytes[*source].len() - start).min(SLOT_BYTES - slot.len());
                let nbytes = room * length / 1000;
                pieces.push(piece(chunk as u64, *source as u64, start as u64, slot.len() as u64, nbytes as u64));
                slot.extend_from_slice(&bytes[*source][start..start + nbytes]);
            }
            wanted.push(slot);
        }
        let pool = pool(case.num_threads);
        let running = Running::start(&pool, sources, &vec![SLOT_BYTES; case.num_slots], &pieces).unwrap();
        for (chunk, slot) in wanted.iter().enumerate() {
            // Slots of chunks below this one were looked at, so all of theirs are free again.
            let ahead = case.ahead[chunk % case.ahead.len()].min(case.num_slots - 1);
            running.job.permit(chunk + 1 + ahead).unwrap();
            running.job.wait(chunk, LIMIT).unwrap();
            prop_assert!(running.job.is_done(chunk).unwrap());
            prop_assert!(&running.slot(chunk)[..slot.len()] == slot.as_slice(), "chunk {}", chunk);
        }
        prop_assert!(running.job.is_over());
    }
}

#[test]
fn nothing_starts_without_a_permit_and_a_wait_has_a_limit() {
    let bytes = pattern(30, 0);
    let pool = pool(2);
    let running = Running::start(&pool, vec![lasting(&bytes)], &[10, 10], &chunks_of(10, 3)).unwrap();
    let error = running.job.wait(0, Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.to_string(), "copying chunk 0 did not end within 20ms");
    running.job.permit(2).unwrap();
    running.job.wait(1, LIMIT).unwrap();
    assert!(matches!(running.job.wait(2, Duration::ZERO), Err(Error::Timeout { .. })));
    assert_eq!((running.slot(0), running.slot(1)), (bytes[..10].to_vec(), bytes[10..20].to_vec()));
    running.job.permit(usize::MAX).unwrap();
    running.job.wait(2, LIMIT).unwrap();
    assert_eq!(running.slot(2), &bytes[20..]);
}

#[test]
fn who_only_looks_gets_there_too() {
    let bytes = pattern(10, 0);
    let pool = pool(1);
    let running = Running::start(&pool, vec![lasting(&bytes)], &[10], &chunks_of(10, 1)).unwrap();
    running.job.permit(1).unwrap();
    let end = Instant::now() + LIMIT;
    while !running.job.is_done(0).unwrap() {
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
    assert_eq!(running.slot(0), bytes);
    assert!(running.job.is_over());
}

#[test]
fn a_truncated_source_ends_the_job_for_everyone() {
    let shm = TempDir::new().unwrap();
    let name = SegmentName::parse("cut").unwrap();
    write(shm.path(), &name, Source::from_slice(&pattern(9000, 0)), None, NonZeroUsize::MIN).unwrap();
    let segment = Arc::new(Segment::open(shm.path(), &name).unwrap());
    let peer = rustix::fs::open(name.path_in(shm.path()), OFlags::WRONLY, Mode::empty()).unwrap();
    let pool = pool(2);
    let source = vec![CopySource::Segment(Arc::clone(&segment))];
    let running = Running::start(&pool, source, &[1000; 2], &chunks_of(1000, 9)).unwrap();
    running.job.permit(2).unwrap();
    running.job.wait(1, LIMIT).unwrap();
    rustix::fs::ftruncate(&peer, 2500).unwrap();
    running.job.permit(9).unwrap();
    let error = running.job.wait(8, LIMIT).unwrap_err();
    assert!(matches!(error, Error::Truncated { wanted_nbytes: 1000, file_nbytes: 9000, .. }), "{error:?}");
    assert!(running.job.is_over());
    for chunk in 0..9 {
        assert_eq!(running.job.wait(chunk, LIMIT), Err(error.clone()), "{chunk}");
    }
    assert_eq!(Arc::strong_count(&segment), 1, "the job has let go of its sources");
}

#[test]
fn a_cancelled_job_keeps_what_is_there_and_starts_nothing() {
    let bytes = pattern(50, 0);
    let pool = pool(2);
    let running = Running::start(&pool, vec![lasting(&bytes)], &[10; 5], &chunks_of(10, 5)).unwrap();
    running.job.permit(2).unwrap();
    running.job.wait(0, LIMIT).unwrap();
    running.job.wait(1, LIMIT).unwrap();
    running.job.cancel();
    running.job.cancel();
    running.job.permit(5).unwrap();
    assert_eq!(running.job.wait(1, LIMIT), Ok(()));
    assert_eq!(running.job.wait(2, LIMIT), Err(Error::Cancelled { chunk: 2 }));
    assert_eq!(running.slot(2), vec![0xee; 10]);
    assert!(running.job.is_over());
}

#[test]
fn a_closed_pool_refuses_jobs_and_leaves_the_rest_of_one_to_its_owner() {
    let bytes = pattern(50, 0);
    let pool = pool(3);
    let running = Running::start(&pool, vec![lasting(&bytes)], &[10; 5], &chunks_of(10, 5)).unwrap();
    pool.close(LIMIT).unwrap();
    pool.close(Duration::ZERO).unwrap();
    running.job.permit(5).unwrap();
    for chunk in (0..5).rev() {
        running.job.wait(chunk, LIMIT).unwrap();
        assert_eq!(running.slot(chunk), &bytes[chunk * 10..chunk * 10 + 10]);
    }
    let refused = Running::start(&pool, vec![lasting(&bytes)], &[10], &chunks_of(10, 1)).err();
    assert_eq!(refused, Some(Error::Closed { what: "the copy pool".to_owned() }));
}

#[test]
fn threads_take_turns_at_jobs() {
    let queue = WorkQueue::new(1);
    let jobs: Vec<_> = (0..3).map(|_| Arc::new(Counted(ledger::Ledger::new(3)))).collect();
    for job in &jobs {
        assert!(queue.add(Arc::clone(job)));
        job.0.permit(3);
    }
    let mut turns = Vec::new();
    for _ in 0..9 {
        let (job, chunk) = queue.next(&mut Spin::new()).unwrap();
        turns.push((jobs.iter().position(|other| Arc::ptr_eq(other, &job)).unwrap(), chunk));
    }
    assert_eq!(turns, [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]);
}

struct Counted(ledger::Ledger);

impl queue::Work for Counted {
    fn claim(&self) -> ledger::Claim {
        self.0.claim()
    }
}

#[test]
fn a_table_that_does_not_fit_is_refused_with_the_numbers() {
    let bytes = pattern(100, 0);
    let shm = TempDir::new().unwrap();
    let sources = || vec![lasting(&bytes), CopySource::Segment(removed_segment(shm.path(), &bytes))];
    let max = u64::MAX;
    for (pieces, wanted) in [
        (vec![piece(1, 0, 0, 0, 1)], "piece 0 belongs to chunk 1, but pieces come in the order of their chunks"),
        (vec![piece(0, 0, 0, 0, 1), piece(2, 0, 0, 0, 1)], "without gaps: 0 or 1 wanted"),
        (vec![piece(0, 2, 0, 0, 1)], "piece 0 of chunk 0: source 2 wanted, but there are 2"),
        (vec![piece(0, 0, 99, 0, 2)], "wanted 2 bytes at 99 of source 0, which has 100 bytes"),
        (vec![piece(0, 0, max, 0, 2)], "wanted 2 bytes at 18446744073709551615 of source 0, which has 100 bytes"),
        (vec![piece(0, 1, 99, 0, 2)], "wanted 2 bytes at offset 99, but the file has 100 bytes"),
        (vec![piece(0, 0, 0, 9, 2)], "piece 0 of chunk 0: wanted 2 bytes at 9 of slot 0, which has 10 bytes"),
        (vec![piece(0, 0, 0, 0, 1), piece(1, 0, 0, 6, 1)], "piece 1 of chunk 1: wanted 1 bytes at 6 of slot 1"),
    ] {
        let error = Running::start(&pool(1), sources(), &[10, 6], &pieces).err().unwrap();
        assert!(error.to_string().contains(wanted), "{error}");
    }
    let error = Running::start(&pool(1), sources(), &[], &[piece(0, 0, 0, 0, 0)]).err().unwrap();
    assert_eq!(error.to_string(), "piece 0 of chunk 0: slot 0 wanted, but there are 0");
    let empty = Running::start(&pool(1), sources(), &[], &[]).unwrap();
    assert!(empty.job.is_over());
    assert_eq!(empty.job.wait(0, LIMIT).unwrap_err().to_string(), "chunk 0 wanted, but the job has 0, counted from 0");
}

#[test]
fn a_dropped_job_leaves_its_memory_alone() {
    let bytes = pattern(1 << 20, 0);
    let pool = pool(2);
    for _ in 0..50 {
        let running = Running::start(&pool, vec![lasting(&bytes)], &[1 << 14; 64], &chunks_of(1 << 14, 64)).unwrap();
        running.job.permit(64).unwrap();
        running.job.wait(3, LIMIT).unwrap();
        // What was freed here would be written to by a thread that still runs.
        drop(running);
    }
}
