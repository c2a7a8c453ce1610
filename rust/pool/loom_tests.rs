//! The hand-over under loom: every order of its steps with at most three preemptions (two where three threads meet), and every value that a relaxed
//! load may see. A slot is a loom cell, which fails the test when a read and a write of it are not ordered.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::ledger::{Claim, Ledger, Waited};
use super::queue::{Work, WorkQueue};
use super::shared::{serve, share_in};
use super::steps::Steps;
use super::sync::Spin;
use crate::{Error, Result};

/// A job of one number a chunk, with a slot for each.
struct Numbers {
    ledger: Ledger,
    slots: Vec<UnsafeCell<usize>>,
    failing: Option<usize>,
}

impl Numbers {
    fn new(num_chunks: usize, num_slots: usize) -> Arc<Self> {
        Self::failing_at(None, num_chunks, num_slots)
    }

    fn failing_at(failing: Option<usize>, num_chunks: usize, num_slots: usize) -> Arc<Self> {
        let slots = (0..num_slots).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(Self { ledger: Ledger::new(num_chunks), slots, failing })
    }

    fn copy(&self, chunk: usize) {
        let outcome = if self.failing == Some(chunk) { Err(failure()) } else { Ok(()) };
        if outcome.is_ok() {
            self.store(chunk, chunk + 1);
        }
        self.ledger.end(chunk, outcome);
    }

    #[allow(unsafe_code)]
    fn store(&self, chunk: usize, value: usize) {
        // SAFETY: loom's cell checks that nobody else looks at it now.
        self.slots[chunk % self.slots.len()].with_mut(|slot| unsafe { *slot = value });
    }

    #[allow(unsafe_code)]
    fn load(&self, chunk: usize) -> usize {
        // SAFETY: loom's cell checks that nobody writes to it now.
        self.slots[chunk % self.slots.len()].with(|slot| unsafe { *slot })
    }

    fn claim_and_copy(&self) -> bool {
        let Claim::Chunk(chunk) = self.ledger.claim() else { return false };
        self.copy(chunk);
        true
    }

    /// As `Job::wait`.
    fn wait(&self, chunk: usize) -> Result<()> {
        loop {
            match self.ledger.wait(chunk, None) {
                Waited::Ended(outcome) => return outcome,
                Waited::Claimable => _ = self.claim_and_copy(),
                Waited::TimedOut => unreachable!("there is no deadline"),
            }
        }
    }
}

impl Work for Numbers {
    fn claim(&self) -> Claim {
        self.ledger.claim()
    }
}

fn failure() -> Error {
    Error::Panicked { chunk: 77 }
}

fn model(test: impl Fn() + Sync + Send + 'static) {
    bounded(3, test);
}

/// With three threads the orders are too many for three preemptions.
fn model_of_three(test: impl Fn() + Sync + Send + 'static) {
    bounded(2, test);
}

fn bounded(preemptions: usize, test: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(test);
}

/// Threads of a queue, as `Pool` starts them.
fn start_threads(queue: &Arc<WorkQueue<Numbers>>, count: usize) -> Vec<thread::JoinHandle<()>> {
    let work = |queue: Arc<WorkQueue<Numbers>>| {
        while let Some((job, chunk)) = queue.next(&mut Spin::new()) {
            job.copy(chunk);
        }
        queue.exit();
    };
    (0..count)
        .map(|_| {
            let queue = Arc::clone(queue);
            thread::spawn(move || work(queue))
        })
        .collect()
}

fn end(queue: &WorkQueue<Numbers>, threads: Vec<thread::JoinHandle<()>>) {
    queue.close();
    assert_eq!(queue.wait_exited(None), 0);
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn a_waiter_sees_the_bytes_and_a_copy_sees_its_slot_free() {
    model(|| {
        // One slot for two chunks: the second copy overwrites what the owner has read by then.
        let job = Numbers::new(2, 1);
        let copier = {
            let job = Arc::clone(&job);
            thread::spawn(move || {
                job.claim_and_copy();
                job.claim_and_copy();
            })
        };
        for chunk in 0..2 {
            job.ledger.permit(chunk + 1);
            job.wait(chunk).unwrap();
            assert_eq!(job.load(chunk), chunk + 1);
        }
        copier.join().unwrap();
        assert!(job.ledger.is_over());
    });
}

#[test]
fn who_only_looks_sees_the_bytes_too() {
    model(|| {
        let job = Numbers::new(1, 1);
        job.ledger.permit(1);
        let copier = {
            let job = Arc::clone(&job);
            thread::spawn(move || assert!(job.claim_and_copy()))
        };
        if job.ledger.is_there(0) {
            assert_eq!(job.load(0), 1);
        }
        copier.join().unwrap();
    });
}

#[test]
fn after_a_cancel_nothing_runs_and_nothing_starts() {
    model(|| {
        let job = Numbers::new(2, 2);
        job.ledger.permit(2);
        let copier = {
            let job = Arc::clone(&job);
            thread::spawn(move || while job.claim_and_copy() {})
        };
        job.ledger.cancel();
        job.ledger.settle();
        // A copy that still ran, or began now, would race with these.
        job.store(0, 9);
        job.store(1, 9);
        assert!(job.ledger.is_over());
        for chunk in 0..2 {
            let wanted = if job.ledger.is_there(chunk) { Ok(()) } else { Err(Error::Cancelled { chunk }) };
            assert_eq!(job.wait(chunk), wanted);
        }
        copier.join().unwrap();
        assert_eq!(job.ledger.claim(), Claim::Over);
    });
}

#[test]
fn two_threads_never_take_the_same_chunk() {
    model_of_three(|| {
        let job = Numbers::new(2, 2);
        let copiers: Vec<_> = (0..2)
            .map(|_| {
                let job = Arc::clone(&job);
                thread::spawn(move || while job.claim_and_copy() {})
            })
            .collect();
        job.ledger.permit(2);
        job.wait(1).unwrap();
        for copier in copiers {
            copier.join().unwrap();
        }
        // Two copies of one chunk race for its slot, and would make three ends of two chunks.
        assert!(job.ledger.is_over());
        assert!((0..2).all(|chunk| job.load(chunk) == chunk + 1));
    });
}

#[test]
fn an_error_ends_the_job_and_wakes_the_waiter() {
    model(|| {
        let job = Numbers::failing_at(Some(0), 2, 2);
        job.ledger.permit(1);
        let copier = {
            let job = Arc::clone(&job);
            thread::spawn(move || _ = job.claim_and_copy())
        };
        // Chunk 1 is not permitted: only the error can end this.
        assert_eq!(job.wait(1), Err(failure()));
        job.ledger.settle();
        job.store(0, 9);
        assert_eq!(job.ledger.claim(), Claim::Over);
        copier.join().unwrap();
    });
}

#[test]
fn a_permit_wakes_one_who_waits_to_copy_it_himself() {
    model(|| {
        let job = Numbers::new(1, 1);
        let waiter = {
            let job = Arc::clone(&job);
            thread::spawn(move || {
                job.wait(0).unwrap();
                assert_eq!(job.load(0), 1);
            })
        };
        assert_eq!(job.ledger.permit(1), 0, "no thread besides the waiter has anything to do");
        waiter.join().unwrap();
    });
}

#[test]
fn no_call_is_lost_between_looking_and_sleeping() {
    model(|| {
        let queue = Arc::new(WorkQueue::new(1));
        let threads = start_threads(&queue, 1);
        let job = Numbers::new(2, 2);
        assert!(queue.add(Arc::clone(&job)));
        // The owner takes the first, so the second is for the thread. The owner copies nothing else: when the thread
        // missed the call, this would wait for ever, which loom reports.
        queue.wake(job.ledger.permit(2));
        assert!(job.claim_and_copy() || job.ledger.num_claimable() == 0);
        while let Waited::Claimable = job.ledger.wait(1, None) {
            thread::yield_now();
        }
        assert_eq!(job.load(1), 2);
        end(&queue, threads);
    });
}

#[test]
fn two_threads_and_the_owner_copy_all_and_end() {
    model_of_three(|| {
        let queue = Arc::new(WorkQueue::new(2));
        let threads = start_threads(&queue, 2);
        let job = Numbers::new(2, 2);
        assert!(queue.add(Arc::clone(&job)));
        queue.wake(job.ledger.permit(2));
        job.wait(0).unwrap();
        assert_eq!(job.load(0), 1);
        job.ledger.cancel();
        job.ledger.settle();
        queue.remove(&job);
        end(&queue, threads);
        assert!(job.ledger.is_over());
    });
}

#[test]
fn closing_wakes_a_thread_that_falls_asleep() {
    model(|| {
        let queue: Arc<WorkQueue<Numbers>> = Arc::new(WorkQueue::new(1));
        let threads = start_threads(&queue, 1);
        end(&queue, threads);
        assert!(!queue.add(Numbers::new(1, 1)));
    });
}

/// Threads of the process.
fn start_helpers(queue: &Arc<WorkQueue<Steps>>, count: usize) -> Vec<thread::JoinHandle<()>> {
    (0..count)
        .map(|_| {
            let queue = Arc::clone(queue);
            thread::spawn(move || serve(&queue))
        })
        .collect()
}

/// What a job borrows: only the steps may touch it before the job has returned.
struct Borrowed(Vec<UnsafeCell<usize>>);

impl Borrowed {
    fn new(count: usize) -> Self {
        Self((0..count).map(|_| UnsafeCell::new(0)).collect())
    }

    #[allow(unsafe_code)]
    fn count(&self, at: usize) {
        // SAFETY: loom's cell checks that nobody else looks at it now.
        self.0[at].with_mut(|cell| unsafe { *cell += 1 });
    }

    #[allow(unsafe_code)]
    fn all(&self) -> Vec<usize> {
        // SAFETY: loom's cell checks that nobody writes to it now.
        self.0.iter().map(|cell| cell.with(|cell| unsafe { *cell })).collect()
    }
}

// SAFETY: loom's cells check every use.
#[allow(unsafe_code)]
unsafe impl Sync for Borrowed {}

#[test]
fn what_a_job_borrows_is_free_when_it_returns() {
    model(|| {
        let queue = Arc::new(WorkQueue::new(0));
        let helpers = start_helpers(&queue, 1);
        let borrowed = Borrowed::new(2);
        share_in(&queue, 2, 1, &|step| {
            borrowed.count(step);
            true
        });
        // A step that still ran, or began now, would race with this.
        assert_eq!(borrowed.all(), [1, 1]);
        drop(borrowed);
        queue.close();
        helpers.into_iter().for_each(|helper| helper.join().unwrap());
    });
}

#[test]
fn no_step_begins_after_one_that_ended_the_job() {
    model(|| {
        let queue = Arc::new(WorkQueue::new(0));
        let helpers = start_helpers(&queue, 1);
        let borrowed = Borrowed::new(3);
        share_in(&queue, 3, 1, &|step| {
            borrowed.count(step);
            false
        });
        let begun = borrowed.all();
        // The two that can begin before either has ended.
        assert!(begun[0] == 1 && begun[1] <= 1 && begun[2] == 0, "{begun:?}");
        queue.close();
        helpers.into_iter().for_each(|helper| helper.join().unwrap());
    });
}

#[test]
fn two_jobs_share_a_helper() {
    model_of_three(|| {
        let queue = Arc::new(WorkQueue::new(0));
        let helpers = start_helpers(&queue, 1);
        let run = |queue: &WorkQueue<Steps>| {
            let borrowed = Borrowed::new(2);
            share_in(queue, 2, 1, &|step| {
                borrowed.count(step);
                true
            });
            assert_eq!(borrowed.all(), [1, 1]);
        };
        let other = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || run(&queue))
        };
        run(&queue);
        other.join().unwrap();
        queue.close();
        helpers.into_iter().for_each(|helper| helper.join().unwrap());
    });
}
