//! The steps of a lease under loom: every order of them with at most three preemptions, and every value that a relaxed
//! load may see. The block is a loom cell, which fails the test when a read and a write of it are not ordered.
#![allow(unsafe_code)]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::thread;

use super::progress::Progress;
use super::record::{Entry, Flags, Record};

const BIT: u32 = 1;

/// The words of one record and one consumer, and a block of two numbers.
struct Shared {
    generation: AtomicU64,
    offset: AtomicU64,
    nbytes: AtomicU64,
    consumers: AtomicU32,
    state: AtomicU32,
    written: AtomicU64,
    claim: AtomicU32,
    release: AtomicU32,
    block: [UnsafeCell<u64>; 2],
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            generation: AtomicU64::new(0),
            offset: AtomicU64::new(0),
            nbytes: AtomicU64::new(0),
            consumers: AtomicU32::new(0),
            state: AtomicU32::new(0),
            written: AtomicU64::new(0),
            claim: AtomicU32::new(0),
            release: AtomicU32::new(0),
            block: [UnsafeCell::new(0), UnsafeCell::new(0)],
        })
    }

    fn with_lease(generation: u64) -> Arc<Self> {
        let shared = Self::new();
        shared.record().publish(&entry(generation));
        shared
    }

    fn record(&self) -> Record<'_, AtomicU64, AtomicU32> {
        let Self { generation, offset, nbytes, consumers, state, written, .. } = self;
        Record { generation, offset, nbytes, consumers, state, written }
    }

    fn flags(&self) -> Flags<'_, AtomicU32> {
        Flags { claim: &self.claim, release: &self.release }
    }

    fn store(&self, at: usize, value: u64) {
        // SAFETY: loom's cell checks that nobody else looks at it now.
        self.block[at].with_mut(|place| unsafe { *place = value });
    }

    fn load(&self, at: usize) -> u64 {
        // SAFETY: loom's cell checks that nobody writes to it now.
        self.block[at].with(|place| unsafe { *place })
    }
}

fn entry(generation: u64) -> Entry {
    Entry { generation, offset: generation * 100, nbytes: generation * 1000, consumers: BIT }
}

fn model(test: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(test);
}

#[test]
fn a_block_is_written_again_only_after_the_last_read() {
    model(|| {
        let shared = Shared::with_lease(1);
        shared.store(0, 11);
        shared.record().advance(1);
        let consumer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                assert!(shared.flags().claim(&shared.record(), 1, BIT));
                if shared.record().written().nbytes == 1 {
                    assert_eq!(shared.load(0), 11);
                }
                shared.flags().release(1);
            })
        };
        if shared.flags().is_released(1) {
            shared.store(0, 22);
        }
        consumer.join().unwrap();
        assert!(shared.flags().is_released(1));
    });
}

#[test]
fn what_the_watermark_covers_is_there() {
    model(|| {
        let shared = Shared::with_lease(1);
        let progress = Arc::new(Progress::new());
        assert!(progress.begin(2));
        let write = |shared: &Shared, progress: &Progress, step: usize| {
            shared.store(step, step as u64 + 7);
            progress.end(step, |there| shared.record().advance(there as u64));
        };
        let other = {
            let (shared, progress) = (Arc::clone(&shared), Arc::clone(&progress));
            thread::spawn(move || write(&shared, &progress, 1))
        };
        let reader = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                for at in 0..shared.record().written().nbytes as usize {
                    assert_eq!(shared.load(at), at as u64 + 7);
                }
            })
        };
        write(&shared, &progress, 0);
        other.join().unwrap();
        assert_eq!(shared.record().written().nbytes, 2);
        reader.join().unwrap();
    });
}

#[test]
fn a_lease_that_is_taken_back_is_either_claimed_or_free() {
    model(|| {
        let shared = Shared::with_lease(1);
        let consumer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let is_ours = shared.flags().claim(&shared.record(), 1, BIT);
                if is_ours {
                    shared.load(0);
                    shared.flags().release(1);
                }
                is_ours
            })
        };
        shared.record().cancel();
        // A claim that won is waited for; without one the block is ours.
        if !shared.flags().is_claimed(1) || shared.flags().is_released(1) {
            shared.store(0, 22);
        }
        consumer.join().unwrap();
        assert!(!shared.flags().is_claimed(1) || shared.flags().is_released(1));
    });
}

#[test]
fn a_slow_claim_of_an_old_lease_does_not_get_the_new_one() {
    model(|| {
        let shared = Shared::with_lease(1);
        let consumer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                if shared.flags().claim(&shared.record(), 1, BIT) {
                    shared.load(0);
                    shared.flags().release(1);
                }
            })
        };
        shared.record().cancel();
        if !shared.flags().is_claimed(1) {
            shared.record().retire();
            shared.record().publish(&entry(2));
            shared.store(0, 22);
            shared.record().advance(1);
            assert!(!shared.flags().is_released(2));
        }
        consumer.join().unwrap();
    });
}

#[test]
fn a_record_is_read_whole_or_not_at_all() {
    model(|| {
        let shared = Shared::with_lease(1);
        let reader = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                for generation in [1, 2] {
                    if let Some(found) = shared.record().read(generation) {
                        assert_eq!(found, entry(generation));
                    }
                }
            })
        };
        shared.record().publish(&entry(2));
        reader.join().unwrap();
        assert_eq!(shared.generation.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn nothing_is_made_known_after_giving_up() {
    model(|| {
        let shared = Shared::with_lease(1);
        let progress = Arc::new(Progress::new());
        assert!(progress.begin(1));
        let writer = {
            let (shared, progress) = (Arc::clone(&shared), Arc::clone(&progress));
            thread::spawn(move || progress.end(0, |there| shared.record().advance(there as u64)))
        };
        progress.stop(|| shared.record().abort(shared.record().written().nbytes));
        writer.join().unwrap();
        assert!(shared.record().written().is_aborted);
    });
}
