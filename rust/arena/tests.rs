//! A sender and its workers in one process, over real sockets; what needs several processes is tested from Python.
#![allow(unsafe_code)]

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::cast::Cast;
use crate::endpoint::{self, Offer, SenderLink, WorkerEndpoint};
use crate::memory::{Source, Target};
use crate::{Error, Result};

const LIMIT: Duration = Duration::from_secs(20);
const MIB: usize = 1 << 20;

struct Worker {
    endpoint: WorkerEndpoint,
    _directory: tempfile::TempDir,
}

impl Worker {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let endpoint = WorkerEndpoint::create(endpoint::Options {
            directory: directory.path().join("run"),
            shm_dir: directory.path().to_path_buf(),
            accept_prefixes: vec!["mmcopy-".to_owned()],
            allowed_uids: Vec::new(),
            max_links: 8,
            max_arenas: 3,
            max_arena_bytes: 1 << 40,
            hello_limit: LIMIT,
        })
        .unwrap();
        Self { endpoint, _directory: directory }
    }

    /// Its number as a consumer, and its map.
    fn connect(&self, arena: &Arena) -> (u32, Arc<Map>, SenderLink) {
        let link = SenderLink::connect(self.endpoint.path(), LIMIT, &[]).unwrap();
        let slot = arena.hand_over(&link, LIMIT).unwrap();
        (slot, self.endpoint.find_arena(arena.instance()).unwrap(), link)
    }
}

fn options(data_nbytes: usize) -> Options {
    Options { num_threads: threads(2), ..Options::new(data_nbytes) }
}

fn threads(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

fn pattern(nbytes: usize, seed: usize) -> Vec<u8> {
    (0..nbytes).map(|at| ((at + seed).wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

fn send(arena: &Arena, bytes: &[u8], consumers: &[u32]) -> Result<LeaseHandle> {
    let lease = arena.take(&[bytes.len()], consumers, LIMIT)?.remove(0);
    lease.write(Source::from_slice(bytes), None, threads(2))?;
    lease.commit()?;
    Ok(*lease.handle())
}

/// The handle as it comes off the wire.
fn sent(handle: &LeaseHandle) -> LeaseHandle {
    LeaseHandle::parse(&handle.name(), handle.offset(), handle.nbytes(), &handle.owner_id()).unwrap()
}

fn read(map: &Map, claim: &Claim) -> Vec<u8> {
    let mut bytes = vec![0; claim.nbytes() as usize];
    map.source(claim).copy_to(Target::from_slice(&mut bytes));
    bytes
}

fn settles(condition: impl Fn() -> bool) -> bool {
    let end = Instant::now() + LIMIT;
    while !condition() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

fn is_empty(arena: &Arena) -> bool {
    let found = arena.statistics().unwrap();
    (found.used_nbytes, found.leases_out, found.largest_free_nbytes) == (0, 0, found.data_nbytes)
}

fn fault(result: Result<impl std::fmt::Debug>) -> ArenaError {
    match result {
        Err(Error::Arena(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

mod faults;

#[test]
fn every_edge_size_arrives_and_its_block_comes_back() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(16 * MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    assert!(map.is_read_only());
    for nbytes in [0, 1, 255, 256, 257, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 3 * MIB + 5, 16 * MIB] {
        let bytes = pattern(nbytes, nbytes);
        let handle = sent(&send(&arena, &bytes, &[slot]).unwrap());
        let claim = map.claim(&handle).unwrap();
        assert_eq!(map.wait_written(&claim, u64::MAX, Duration::ZERO, &|| false), Ok(nbytes as u64));
        assert!(read(&map, &claim) == bytes, "{nbytes}");
        assert_eq!((map.release(&claim), map.release(&claim)), (Ok(true), Ok(false)));
        assert!(settles(|| is_empty(&arena)), "{nbytes}");
    }
    let found = arena.statistics().unwrap();
    assert_eq!((found.taken, found.committed, found.released, found.full), (13, 13, 13, 0));
}

#[test]
fn casts_happen_on_the_way() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(4 * MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    for elements in [0_usize, 1, 1000, 700_001] {
        let floats: Vec<u8> = (0..elements).flat_map(|at| (at as f32 * 0.37).to_le_bytes()).collect();
        let mut wanted = vec![0; elements * 2];
        let cast = Cast::Float32ToBfloat16;
        cast.apply(Source::from_slice(&floats), Target::from_slice(&mut wanted));
        for num_threads in [1, 3] {
            let lease = arena.take(&[elements * 2], &[slot], LIMIT).unwrap().remove(0);
            lease.write(Source::from_slice(&floats), Some(cast), threads(num_threads)).unwrap();
            lease.commit().unwrap();
            let claim = map.claim(lease.handle()).unwrap();
            assert!(read(&map, &claim) == wanted, "{elements} by {num_threads}");
            assert_eq!(map.release(&claim), Ok(true));
        }
    }
    let lease = arena.take(&[10], &[slot], LIMIT).unwrap().remove(0);
    let error = lease.write(Source::from_slice(&[0; 12]), Some(Cast::Float32ToBfloat16), threads(1)).unwrap_err();
    assert_eq!(error, Error::Lengths { src_nbytes: 12, dst_nbytes: 10, wanted_nbytes: 6 });
}

#[test]
fn a_consumer_follows_the_watermark() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(32 * MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    let bytes = pattern(24 * MIB + 77, 5);
    for num_threads in [1, 3] {
        let lease = arena.take(&[bytes.len()], &[slot], LIMIT).unwrap().remove(0);
        let claim = map.claim(lease.handle()).unwrap();
        assert_eq!(map.written(&claim), Ok(0));
        assert!(matches!(
            fault(map.wait_written(&claim, 1, Duration::ZERO, &|| false)),
            ArenaError::Timeout { written_nbytes: 0, .. }
        ));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                lease.write(Source::from_slice(&bytes), None, threads(num_threads)).unwrap();
                lease.commit().unwrap();
            });
            let mut seen = 0;
            while seen < bytes.len() {
                let there = map.wait_written(&claim, seen as u64 + 1, LIMIT, &|| false).unwrap() as usize;
                let mut part = vec![0; there - seen];
                map.source(&claim).slice(seen..there).copy_to(Target::from_slice(&mut part));
                assert!(part == bytes[seen..there], "{seen}..{there}");
                seen = there;
            }
        });
        map.release(&claim).unwrap();
        assert!(settles(|| is_empty(&arena)));
    }
}

#[test]
fn a_group_is_one_range_and_stays_until_its_last() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    let leases = arena.take(&[100, 24, 8], &[slot], LIMIT).unwrap();
    let offsets: Vec<_> = leases.iter().map(|lease| lease.handle().offset()).collect();
    assert_eq!(offsets, [0, 256, 512]);
    let claims: Vec<_> = leases.iter().map(|lease| map.claim(lease.handle()).unwrap()).collect();
    leases.iter().for_each(|lease| lease.commit().unwrap());
    for (done, claim) in claims.iter().enumerate() {
        assert_eq!(arena.statistics().unwrap().used_nbytes, 768);
        map.release(claim).unwrap();
        assert!(settles(|| arena.statistics().unwrap().leases_out == 2 - done));
    }
    assert!(is_empty(&arena));
}

#[test]
fn a_group_is_written_by_several_threads_each_lease_whole() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(32 * MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    let mut sizes = vec![5 * MIB + 3, 0, 1, 2 * MIB, 3 * MIB];
    sizes.extend((0..200).map(|n| 60_000 + n));
    let sources: Vec<_> = sizes.iter().enumerate().map(|(n, nbytes)| pattern(*nbytes, n)).collect();
    for num_threads in [1, 2, 5] {
        let leases = arena.take(&sizes, &[slot], LIMIT).unwrap();
        let parts: Vec<_> = leases
            .iter()
            .zip(&sources)
            .map(|(writing, bytes)| Part { writing, source: Source::from_slice(bytes), cast: None })
            .collect();
        write_all(&parts, threads(num_threads)).unwrap();
        for (lease, bytes) in leases.iter().zip(&sources) {
            assert!(lease.is_over());
            let claim = map.claim(lease.handle()).unwrap();
            assert_eq!(map.wait_written(&claim, u64::MAX, Duration::ZERO, &|| false), Ok(bytes.len() as u64));
            assert!(read(&map, &claim) == *bytes, "{} bytes by {num_threads}", bytes.len());
            map.release(&claim).unwrap();
        }
        assert!(settles(|| is_empty(&arena)));
    }
    assert_eq!(write_all(&[], threads(3)), Ok(()));
}

#[test]
fn a_group_of_which_one_cannot_be_written_is_given_up() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    let leases = arena.take(&[1000; 20], &[slot], LIMIT).unwrap();
    let bytes = [pattern(1000, 1), pattern(999, 2)];
    let parts: Vec<_> = leases
        .iter()
        .enumerate()
        .map(|(n, writing)| Part { writing, source: Source::from_slice(&bytes[usize::from(n == 7)]), cast: None })
        .collect();
    let wanted = Error::Lengths { src_nbytes: 999, dst_nbytes: 1000, wanted_nbytes: 999 };
    assert_eq!(write_all(&parts, threads(2)), Err(wanted));
    assert!(leases.iter().all(Writing::is_over));
    assert!(matches!(fault(map.claim(leases[0].handle())), ArenaError::Stale { .. }));
    assert!(settles(|| is_empty(&arena)));
    assert_eq!(arena.statistics().unwrap().aborted, 20);
}

#[test]
fn a_full_arena_waits_within_the_limit_and_wakes() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(4 * MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    let first = send(&arena, &pattern(3 * MIB, 1), &[slot]).unwrap();
    let claim = map.claim(&first).unwrap();
    let refused = fault(arena.take(&[2 * MIB], &[slot], Duration::from_millis(20)));
    let ArenaError::Full { wanted_nbytes, free_nbytes, data_nbytes, largest_nbytes, .. } = &refused else {
        panic!("{refused}")
    };
    let numbers = (2 * MIB as u64, MIB as u64, 4 * MIB as u64, MIB as u64);
    assert_eq!((*wanted_nbytes, *free_nbytes, *data_nbytes, *largest_nbytes), numbers);
    // What can never fit is refused without a wait.
    let refused = fault(arena.take(&[5 * MIB], &[slot], LIMIT));
    assert!(matches!(refused, ArenaError::Full { waited: Duration::ZERO, .. }), "{refused}");
    // An arena of no class's size has no block as large as itself.
    let odd = Arena::create(&Options { huge_pages: HugePages::Off, ..options(17 * MIB) }).unwrap();
    let (only, _map, _link) = worker.connect(&odd);
    let refused = fault(odd.take(&[16 * MIB + 1], &[only], LIMIT));
    assert!(matches!(refused, ArenaError::Full { waited: Duration::ZERO, .. }), "{refused}");
    assert!(odd.take(&[16 * MIB], &[only], LIMIT).is_ok());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| arena.take(&[2 * MIB], &[slot], LIMIT).map(|taken| taken.len()));
        std::thread::sleep(Duration::from_millis(20));
        map.release(&claim).unwrap();
        assert_eq!(waiting.join().unwrap(), Ok(1));
    });
    assert_eq!(arena.statistics().unwrap().full, 2);
    assert!(settles(|| is_empty(&arena)), "the lease that was dropped was given up");
}

#[test]
fn leases_can_run_out_before_bytes() {
    let worker = Worker::new();
    let arena = Arena::create(&Options { num_leases: Some(3), ..options(MIB) }).unwrap();
    let (slot, _map, _link) = worker.connect(&arena);
    let taken = arena.take(&[1, 1], &[slot], LIMIT).unwrap();
    let refused = fault(arena.take(&[1, 1], &[slot], Duration::from_millis(1)));
    assert!(matches!(refused, ArenaError::Full { free_leases: 1, num_leases: 2, .. }), "{refused}");
    assert!(matches!(fault(arena.take(&[1; 4], &[slot], LIMIT)), ArenaError::Full { .. }));
    drop(taken);
    assert!(arena.take(&[1; 3], &[slot], LIMIT).is_ok());
}

#[test]
fn many_threads_many_sizes_two_arenas_two_workers() {
    let arenas: Vec<_> = (0..2).map(|_| Arena::create(&options(2 * MIB)).unwrap()).collect();
    let workers: Vec<_> = (0..2).map(|_| Worker::new()).collect();
    let connected: Vec<Vec<_>> =
        arenas.iter().map(|arena| workers.iter().map(|worker| worker.connect(arena)).collect()).collect();
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (arena, peers) = (&arenas[thread % 2], &connected[thread % 2]);
            scope.spawn(move || {
                for round in 0..300 {
                    let sizes: Vec<_> =
                        (0..=round % 3).map(|at| (round * 7919 + thread * 104_729 + at * 31) % 200_000).collect();
                    let chosen = &peers[if round % 4 == 0 { 0..2 } else { round % 2..round % 2 + 1 }];
                    let slots: Vec<_> = chosen.iter().map(|(slot, ..)| *slot).collect();
                    let leases = arena.take(&sizes, &slots, LIMIT).unwrap();
                    for (lease, nbytes) in leases.iter().zip(&sizes) {
                        let bytes = pattern(*nbytes, thread + round);
                        lease.write(Source::from_slice(&bytes), None, threads(1)).unwrap();
                        lease.commit().unwrap();
                        for (_, map, _) in chosen {
                            let claim = map.claim(&sent(lease.handle())).unwrap();
                            assert!(read(map, &claim) == bytes);
                            assert_eq!(map.release(&claim), Ok(true));
                        }
                    }
                }
            });
        }
    });
    for arena in &arenas {
        assert!(settles(|| is_empty(arena)));
        let found = arena.statistics().unwrap();
        // Of 300 rounds of two threads 75 go to two consumers; rounds have 1, 2, 3 leases in turn, 2 on average.
        assert_eq!((found.taken, found.committed, found.released), (1200, 1200, 1500));
        assert_eq!((found.aborted, found.cancelled, found.expired), (0, 0, 0));
    }
}

#[test]
fn a_stream_may_write_the_mark() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    let claim = map.claim(&send(&arena, &[5; 500], &[slot]).unwrap()).unwrap();
    let flag = map.release_flag(&claim);
    let (start, nbytes) = map.flags_span();
    assert!(flag.address == start + flag.offset && flag.offset + 4 <= nbytes && flag.address.is_multiple_of(4));
    assert_eq!(
        (map.defer_release(&claim), map.defer_release(&claim), map.release(&claim)),
        (Ok(true), Ok(false), Ok(false))
    );
    assert!(matches!(fault(map.claim(claim.handle())), ArenaError::Repeated { .. }));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(arena.statistics().unwrap().leases_out, 1);
    // SAFETY: the address is inside the map's flags, which are mapped, and aligned.
    let word = unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(flag.address)) };
    word.store(flag.value, Ordering::Release);
    assert!(settles(|| is_empty(&arena)));
}

#[test]
fn a_consumer_that_goes_has_released_what_it_released() {
    let arena = Arena::create(&options(MIB)).unwrap();
    for round in 1..=10 {
        let worker = Worker::new();
        let (slot, map, link) = worker.connect(&arena);
        let handles: Vec<_> = (0..50).map(|seed| send(&arena, &pattern(100, seed), &[slot]).unwrap()).collect();
        for handle in &handles {
            map.release(&map.claim(handle).unwrap()).unwrap();
        }
        drop((map, link, worker));
        assert!(settles(|| arena.statistics().unwrap().consumers == 0));
        assert!(is_empty(&arena));
        assert_eq!(arena.statistics().unwrap().released, 50 * round);
    }
}

#[test]
fn the_thread_parks_some_time_after_the_last_lease_and_wakes_for_the_next() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    for seed in 0..2 {
        let begun = Instant::now();
        let handle = send(&arena, &pattern(100, seed), &[slot]).unwrap();
        assert!(settles(|| !arena.is_parked()));
        map.release(&map.claim(&handle).unwrap()).unwrap();
        assert!(settles(|| arena.is_parked()));
        assert!(begun.elapsed() >= reclaim::LINGER);
    }
    assert_eq!(arena.statistics().unwrap().released, 2);
}

#[test]
fn the_thread_sleeps_while_nothing_is_out_and_ends() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    let lease = arena.take(&[10], &[slot], LIMIT).unwrap().remove(0);
    arena.close(LIMIT).unwrap();
    arena.close(Duration::ZERO).unwrap();
    assert!(arena.is_closed());
    assert!(matches!(arena.take(&[1], &[slot], LIMIT), Err(Error::Closed { .. })));
    assert!(matches!(arena.cancel(lease.handle()), Err(Error::Closed { .. })));
    // What is being written still can be.
    lease.write(Source::from_slice(&[1; 10]), None, threads(1)).unwrap();
    lease.commit().unwrap();
    let claim = map.claim(lease.handle()).unwrap();
    drop((lease, arena));
    assert_eq!(read(&map, &claim), [1; 10]);
}

#[test]
fn bad_options_are_refused_with_their_names() {
    let refused = |options: Options| fault(Arena::create(&options)).to_string();
    assert!(refused(options(0)).starts_with("data_nbytes is 0"), "{}", refused(options(0)));
    assert!(refused(options(usize::MAX)).starts_with("data_nbytes"));
    assert!(refused(Options { num_leases: Some(0), ..options(MIB) }).starts_with("num_leases is 0"));
    assert!(refused(Options { num_leases: Some(1 << 21), ..options(MIB) }).starts_with("num_leases is 2097152"));
    let too_much = refused(options(200 << 30));
    assert!(too_much.contains("bytes is refused") && too_much.contains("available"), "{too_much}");
}
