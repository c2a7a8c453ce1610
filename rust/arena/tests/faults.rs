//! Bad handles, consumers and senders that go, garbage, and arenas that are none.

use rustix::fs::{MemfdFlags, SealFlags};

use super::*;

#[test]
fn handles_that_are_not_right_are_typed_errors() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    let other = Worker::new();
    let (other_slot, _their_map, _their_link) = other.connect(&arena);
    let handle = send(&arena, &[7; 100], &[slot]).unwrap();
    let changed = |change: &dyn Fn(&mut LeaseHandle)| {
        let mut changed = handle;
        change(&mut changed);
        fault(map.claim(&changed))
    };
    assert!(matches!(changed(&|h| h.instance ^= 1), ArenaError::UnknownArena { .. }));
    assert!(matches!(changed(&|h| h.index = 5000), ArenaError::Forged { .. }));
    assert!(matches!(changed(&|h| h.index += 1), ArenaError::Stale { .. }));
    assert!(matches!(changed(&|h| h.generation += 1), ArenaError::Stale { .. }));
    for (offset, nbytes) in [(256, 100), (0, 101), (0, 99), (u64::MAX, 100), (u64::MAX - 50, 100), (0, u64::MAX)] {
        assert!(matches!(changed(&|h| (h.offset, h.nbytes) = (offset, nbytes)), ArenaError::Forged { .. }));
    }
    let claim = map.claim(&handle).unwrap();
    assert!(matches!(fault(map.claim(&handle)), ArenaError::Repeated { state: "still held", .. }));
    assert_eq!(map.num_held(), 1);
    map.release(&claim).unwrap();
    assert!(matches!(fault(map.claim(&handle)), ArenaError::Repeated { state: "released", .. }));
    assert!(settles(|| is_empty(&arena)));
    let newer = send(&arena, &[8; 100], &[slot]).unwrap();
    assert_eq!((newer.index, newer.offset), (handle.index, handle.offset));
    assert_eq!(map.release(&claim), Ok(false), "an old release says nothing about the new lease");
    assert_eq!(arena.statistics().unwrap().leases_out, 1);
    map.claim(&newer).unwrap();
    assert!(matches!(fault(map.claim(&handle)), ArenaError::Stale { .. }));
    let theirs = send(&arena, &[9; 100], &[other_slot]).unwrap();
    assert!(matches!(fault(map.claim(&theirs)), ArenaError::Forged { .. }));
    assert!(matches!(fault(arena.take(&[1], &[15], LIMIT)), ArenaError::NoConsumer { slot: 15 }));
    assert!(matches!(fault(arena.take(&[1], &[u32::MAX], LIMIT)), ArenaError::NoConsumer { .. }));
    assert!(matches!(fault(arena.take(&[1], &[], LIMIT)), ArenaError::Option { .. }));
}

#[test]
fn what_is_taken_back_is_free_at_once_unless_somebody_reads() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    let unread = send(&arena, &[1; 100], &[slot]).unwrap();
    assert_eq!(arena.cancel(&unread), Ok(true));
    assert!(is_empty(&arena));
    assert_eq!(arena.cancel(&unread), Ok(false));
    assert!(matches!(fault(map.claim(&unread)), ArenaError::Stale { .. }));

    let read_now = send(&arena, &[2; 100], &[slot]).unwrap();
    let claim = map.claim(&read_now).unwrap();
    assert_eq!(arena.cancel(&read_now), Ok(true));
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(arena.statistics().unwrap().leases_out, 1);
    assert_eq!(read(&map, &claim), [2; 100]);
    map.release(&claim).unwrap();
    assert!(settles(|| is_empty(&arena)));
    assert_eq!(arena.statistics().unwrap().cancelled, 2);
    assert!(matches!(fault(arena.cancel(&LeaseHandle { instance: 1, ..unread })), ArenaError::UnknownArena { .. }));
}

#[test]
fn what_nobody_begins_to_read_expires() {
    let worker = Worker::new();
    let arena = Arena::create(&Options { unclaimed_limit: Duration::from_millis(20), ..options(MIB) }).unwrap();
    let (slot, map, _link) = worker.connect(&arena);
    let kept = send(&arena, &[1; 100], &[slot]).unwrap();
    let claim = map.claim(&kept).unwrap();
    let lost = send(&arena, &[2; 100], &[slot]).unwrap();
    assert!(settles(|| arena.statistics().unwrap().expired == 1));
    assert!(matches!(fault(map.claim(&lost)), ArenaError::Stale { .. }));
    assert_eq!(read(&map, &claim), [1; 100]);
    map.release(&claim).unwrap();
    assert!(settles(|| is_empty(&arena)));
}

#[test]
fn giving_up_tells_those_who_read_and_waits_for_them() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(4 * MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    let lease = arena.take(&[1000], &[slot], LIMIT).unwrap().remove(0);
    let claim = map.claim(lease.handle()).unwrap();
    lease.abort();
    lease.abort();
    assert!(lease.is_over());
    let gave_up = ArenaError::Aborted { name: claim.handle().name(), written_nbytes: 0, nbytes: 1000 };
    assert_eq!(fault(map.wait_written(&claim, 1, LIMIT, &|| false)), gave_up);
    assert_eq!(fault(map.written(&claim)), gave_up);
    assert!(matches!(lease.commit(), Err(Error::Closed { .. })));
    assert!(matches!(lease.write(Source::from_slice(&[0; 1000]), None, threads(1)), Err(Error::Closed { .. })));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(arena.statistics().unwrap().leases_out, 1);
    map.release(&claim).unwrap();
    assert!(settles(|| is_empty(&arena)));

    let handle = *arena.take(&[1000], &[slot], LIMIT).unwrap()[0].handle();
    assert!(is_empty(&arena), "dropped before anybody read it");
    assert!(matches!(fault(map.claim(&handle)), ArenaError::Stale { .. }));
    assert_eq!(arena.statistics().unwrap().aborted, 2);
}

#[test]
fn a_view_keeps_its_block() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    for commits in [true, false] {
        let lease = Arc::new(arena.take(&[64], &[slot], LIMIT).unwrap().remove(0));
        let view = lease.view().unwrap();
        view.target().store(0, &[3_u8; 64]);
        assert_eq!(lease.num_views(), 1);
        if commits {
            lease.commit().unwrap();
            let claim = map.claim(lease.handle()).unwrap();
            assert_eq!(read(&map, &claim), [3; 64]);
            map.release(&claim).unwrap();
        } else {
            lease.abort();
        }
        assert!(matches!(lease.view(), Err(Error::Closed { .. })));
        drop(lease);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(arena.statistics().unwrap().leases_out, 1, "somebody can still write there");
        drop(view);
        assert!(settles(|| is_empty(&arena)));
    }
}

#[test]
fn a_committed_lease_can_be_taken_back_while_a_view_is_left() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(MIB)).unwrap());
    let (slot, map, _link) = worker.connect(&arena);
    let lease = Arc::new(arena.take(&[64], &[slot], LIMIT).unwrap().remove(0));
    let view = lease.view().unwrap();
    lease.commit().unwrap();
    assert!(arena.cancel(lease.handle()).unwrap());
    assert!(matches!(fault(map.claim(lease.handle())), ArenaError::Stale { .. }));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(arena.statistics().unwrap().leases_out, 1, "somebody can still write there");
    drop(view);
    assert!(settles(|| is_empty(&arena)));
    let found = arena.statistics().unwrap();
    assert_eq!((found.committed, found.cancelled, found.expired), (1, 1, 0));
}

#[test]
fn a_lease_is_written_once() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(MIB)).unwrap());
    let (slot, _map, _link) = worker.connect(&arena);
    let lease = arena.take(&[4], &[slot], LIMIT).unwrap().remove(0);
    lease.write(Source::from_slice(b"abcd"), None, threads(1)).unwrap();
    assert!(matches!(fault(lease.write(Source::from_slice(b"abcd"), None, threads(1))), ArenaError::Busy { .. }));
    lease.commit().unwrap();
}

#[test]
fn of_three_consumers_one_goes() {
    let arena = Arena::create(&options(MIB)).unwrap();
    let mut workers: Vec<Worker> = (0..3).map(|_| Worker::new()).collect();
    let connected: Vec<_> = workers.iter().map(|worker| worker.connect(&arena)).collect();
    let slots: Vec<_> = connected.iter().map(|(slot, ..)| *slot).collect();
    assert_eq!(slots, [0, 1, 2]);
    let mut maps: Vec<_> = connected.into_iter().map(|(_, map, link)| (map, link)).collect();
    let handle = send(&arena, &[5; 500], &slots).unwrap();
    let claims: Vec<_> = maps.iter().map(|(map, _)| map.claim(&handle).unwrap()).collect();
    // The first releases, the second goes without, the third goes on reading.
    maps[0].0.release(&claims[0]).unwrap();
    drop((workers.remove(1), maps.remove(1)));
    assert!(settles(|| arena.statistics().unwrap().consumers == 2));
    let found = arena.statistics().unwrap();
    assert_eq!((found.leases_out, found.consumers_gone, &found.held[..4]), (1, 1, &[0, 0, 1, 0][..]));
    assert_eq!(read(&maps[1].0, &claims[2]), [5; 500]);

    // Another takes the second's number: it is no consumer of what was the second's.
    let fourth = Worker::new();
    let (slot, map, _link) = fourth.connect(&arena);
    assert_eq!(slot, 1);
    assert!(matches!(fault(map.claim(&handle)), ArenaError::Forged { .. }));
    maps[1].0.release(&claims[2]).unwrap();
    assert!(settles(|| is_empty(&arena)));
    assert!(matches!(fault(map.claim(&handle)), ArenaError::Stale { .. }));
}

#[test]
fn closing_the_link_is_not_the_end_of_a_consumers_reads() {
    let (worker, arena) = (Worker::new(), Arena::create(&options(MIB)).unwrap());
    let (slot, map, link) = worker.connect(&arena);
    let handle = send(&arena, &[5; 500], &[slot]).unwrap();
    let claim = map.claim(&handle).unwrap();
    link.close();
    assert!(settles(|| map.is_owner_gone()));
    assert!(worker.endpoint.find_arena(arena.instance()).is_none());
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(arena.statistics().unwrap().leases_out, 1);
    assert_eq!(read(&map, &claim), [5; 500]);
    drop(map);
    assert!(settles(|| is_empty(&arena)));
    assert_eq!(arena.statistics().unwrap().consumers, 0);
}

#[test]
fn a_sender_that_goes_fails_what_waits_for_it_and_leaves_what_is_there() {
    let worker = Worker::new();
    let arena = Arena::create(&options(MIB)).unwrap();
    let (slot, map, link) = worker.connect(&arena);
    let whole = map.claim(&send(&arena, &[5; 500], &[slot]).unwrap()).unwrap();
    let lease = arena.take(&[1000], &[slot], LIMIT).unwrap().remove(0);
    let half = map.claim(lease.handle()).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| fault(map.wait_written(&half, 1000, LIMIT, &|| false)));
        std::thread::sleep(Duration::from_millis(5));
        drop(link);
        let gone = waiting.join().unwrap();
        assert!(matches!(gone, ArenaError::OwnerGone { written_nbytes: 0, wanted_nbytes: 1000, .. }), "{gone}");
    });
    std::mem::forget(lease); // as when the process has died
    drop(arena);
    assert_eq!(read(&map, &whole), [5; 500]);
    assert_eq!(map.wait_written(&whole, 500, Duration::ZERO, &|| false), Ok(500));
}

#[test]
fn garbage_in_ones_marks_harms_nobody_else() {
    let arena = Arena::create(&options(2 * MIB)).unwrap();
    let (good, bad) = (Worker::new(), Worker::new());
    let ((good_slot, map, _good_link), (bad_slot, bad_map, _bad_link)) = (good.connect(&arena), bad.connect(&arena));
    let is_over = AtomicBool::new(false);
    let (start, nbytes) = bad_map.flags_span();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = 0x2545_f491_4f6c_dd1d_u64;
            while !is_over.load(Ordering::Relaxed) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let at = start + (random as usize % (nbytes / 4)) * 4;
                // Small numbers are those that generations have, so this releases its own leases at any moment.
                let value = if random & 1 << 40 == 0 { (random >> 32) as u32 % 3000 } else { (random >> 32) as u32 };
                // SAFETY: inside the map's flags, which are mapped, and aligned.
                let word = unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(at)) };
                word.store(value, Ordering::Relaxed);
            }
        });
        for round in 0..2000 {
            let bytes = pattern(1000 + round, round);
            let consumers: &[u32] = if round % 3 == 0 { &[good_slot] } else { &[good_slot, bad_slot] };
            let Ok(handle) = send(&arena, &bytes, consumers) else { panic!("round {round}") };
            let claim = map.claim(&handle).unwrap();
            assert!(read(&map, &claim) == bytes, "round {round}");
            map.release(&claim).unwrap();
            arena.cancel(&handle).unwrap(); // of those that the bad one never releases
        }
        is_over.store(true, Ordering::Relaxed);
    });
    drop((bad_map, bad));
    assert!(settles(|| is_empty(&arena)));
    let found = arena.statistics().unwrap();
    assert_eq!((found.taken, found.committed), (2000, 2000));
}

#[test]
fn too_many_consumers_and_arenas() {
    let worker = Worker::new();
    let arenas: Vec<_> = (0..4).map(|_| Arena::create(&options(MIB)).unwrap()).collect();
    let _connected: Vec<_> = arenas[..3].iter().map(|arena| worker.connect(arena)).collect();
    let link = SenderLink::connect(worker.endpoint.path(), LIMIT, &[]).unwrap();
    let refused = arenas[3].hand_over(&link, LIMIT).unwrap_err();
    assert!(refused.to_string().contains("3 arenas are mapped already"), "{refused}");
    assert!(!link.is_closed());
    assert_eq!(worker.endpoint.wait_arena(2, Duration::ZERO), Ok(3));
    assert_eq!(worker.endpoint.arenas().len(), 3);

    let workers: Vec<_> = (0..6).map(|_| Worker::new()).collect();
    let _connected: Vec<_> = (0..16).map(|at| workers[at / 3].connect(&arenas[3])).collect();
    let link = SenderLink::connect(workers[5].endpoint.path(), LIMIT, &[]).unwrap();
    assert!(matches!(fault(arenas[3].hand_over(&link, LIMIT)), ArenaError::Consumers { most: 16 }));
}

#[test]
fn what_is_no_arena_is_refused() {
    let worker = Worker::new();
    let sealed = |nbytes: u64, seals: SealFlags| -> OwnedFd {
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, nbytes).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        file
    };
    let both = SealFlags::SHRINK | SealFlags::GROW;
    let flags = super::layout::flags_nbytes(10) as u64;
    let good = Offer { instance: 7, data_nbytes: 8192, control_nbytes: 4096, num_leases: 10, slot: 0 };
    let refused = |offer: Offer, files: [(u64, SealFlags); 3], wanted: &str| {
        let files = files.map(|(nbytes, seals)| sealed(nbytes, seals));
        let pipe = tempfile::tempfile().unwrap();
        let link = SenderLink::connect(worker.endpoint.path(), LIMIT, &[]).unwrap();
        let descriptors = [files[0].as_fd(), files[1].as_fd(), files[2].as_fd(), pipe.as_fd()];
        let error = link.offer(offer, &descriptors, LIMIT).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    };
    let files = [(8192, both), (4096, both), (flags, both)];
    refused(good, files, "its header says something else");
    refused(Offer { num_leases: 0, ..good }, files, "0 leases");
    refused(Offer { num_leases: u32::MAX, ..good }, files, "4294967295 leases");
    refused(Offer { slot: 16, ..good }, files, "consumer 16");
    refused(Offer { data_nbytes: 0, ..good }, files, "0 bytes of data");
    refused(Offer { data_nbytes: u64::MAX, ..good }, files, "18446744073709551615 bytes of data");
    refused(Offer { control_nbytes: 8192, ..good }, files, "4096 of control belong to 10 leases");
    refused(Offer { data_nbytes: 4096, ..good }, files, "data: its file has 8192 bytes, 4096 were named");
    refused(good, [(8192, SealFlags::GROW), files[1], files[2]], "data: it is not sealed against shrinking");
    refused(good, [files[0], (4096, SealFlags::SHRINK), files[2]], "control: it is not sealed");
    refused(good, [files[0], files[1], (flags, SealFlags::empty())], "flags: it is not sealed");
    refused(good, [files[0], files[1], (4096, both)], "flags: its file has 4096 bytes");
    assert!(worker.endpoint.arenas().is_empty());
}
