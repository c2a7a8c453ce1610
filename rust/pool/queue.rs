//! The threads' side: which job is next, and sleeping while there is none.
//!
//! A thread takes one chunk of the first job in the queue that has one and puts the job at the end, so jobs advance by
//! turns whatever their sizes. The queue's lock is taken once per chunk and never held during a copy.
//!
//! Why no wake-up is lost: a chunk is made claimable first, and then this lock is taken to wake threads; a thread looks
//! at all jobs and falls asleep under the same lock. Either it sees the chunk, or it is asleep when it is woken.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::ledger::Claim;
use super::sync::{AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, Spin, lock, wait};

/// What threads can take a turn of.
pub(super) trait Work {
    /// Hands out a piece of it.
    fn claim(&self) -> Claim;
}

/// The queue of jobs, and the threads that share them.
#[derive(Debug)]
pub(super) struct WorkQueue<W> {
    state: Mutex<State<W>>,
    ready: Condvar,
    exited: Condvar,
    /// Rises with every wake: what a spinning thread looks at.
    num_wakes: AtomicUsize,
}

#[derive(Debug)]
struct State<W> {
    jobs: VecDeque<Arc<W>>,
    num_asleep: usize,
    /// Of those asleep, how many were notified and have not resumed yet.
    num_woken: usize,
    num_threads: usize,
    is_closed: bool,
}

impl<W: Work> WorkQueue<W> {
    /// A queue for threads that are about to start, each of which calls [`WorkQueue::exit`] at its end.
    pub(super) fn new(num_threads: usize) -> Self {
        let state = State { jobs: VecDeque::new(), num_asleep: 0, num_woken: 0, num_threads, is_closed: false };
        Self { state: Mutex::new(state), ready: Condvar::new(), exited: Condvar::new(), num_wakes: AtomicUsize::new(0) }
    }

    /// Queues a job; false when the queue is closed. Wakes no thread.
    pub(super) fn add(&self, job: Arc<W>) -> bool {
        let mut state = lock(&self.state);
        if state.is_closed {
            return false;
        }
        state.jobs.push_back(job);
        true
    }

    /// Removes a job. A thread that has a chunk of it keeps its own reference.
    pub(super) fn remove(&self, job: &Arc<W>) {
        lock(&self.state).jobs.retain(|queued| !Arc::ptr_eq(queued, job));
    }

    /// Wakes as many threads as asked for, or as sleep.
    pub(super) fn wake(&self, num_threads: usize) {
        if num_threads == 0 {
            return;
        }
        // Relaxed: a thread that sees it takes the lock and looks.
        self.num_wakes.fetch_add(1, Ordering::Relaxed);
        let mut state = lock(&self.state);
        let num_to_wake = num_threads.min(state.num_asleep - state.num_woken);
        state.num_woken += num_to_wake;
        let are_all = state.num_woken == state.num_asleep;
        drop(state);
        if num_to_wake > 1 && are_all {
            self.ready.notify_all(); // one system call, not one for each
        } else {
            for _ in 0..num_to_wake {
                self.ready.notify_one();
            }
        }
    }

    /// Blocks until there is a chunk to copy; None when the queue is closed.
    pub(super) fn next(&self, spin: &mut Spin) -> Option<(Arc<W>, usize)> {
        let mut state = lock(&self.state);
        let mut may_spin = true;
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(turn) = state.turn() {
                return Some(turn);
            }
            state = if may_spin { self.spin_then_look(state, spin) } else { self.sleep(state) };
            may_spin = !may_spin;
        }
    }

    fn spin_then_look<'a>(&'a self, state: MutexGuard<'a, State<W>>, spin: &mut Spin) -> MutexGuard<'a, State<W>> {
        let seen = self.num_wakes.load(Ordering::Relaxed);
        if cfg!(loom) {
            return state;
        }
        drop(state);
        spin.until(|| self.num_wakes.load(Ordering::Relaxed) != seen);
        lock(&self.state)
    }

    fn sleep<'a>(&'a self, mut state: MutexGuard<'a, State<W>>) -> MutexGuard<'a, State<W>> {
        state.num_asleep += 1;
        let mut state = wait(&self.ready, state, None).0;
        state.num_asleep -= 1;
        // After a spurious wake-up this counts a notification meant for another thread, which looks at the jobs anyway.
        state.num_woken = state.num_woken.saturating_sub(1).min(state.num_asleep);
        state
    }

    /// Lets the threads end after the chunks they have. May be called again.
    pub(super) fn close(&self) {
        self.num_wakes.fetch_add(1, Ordering::Relaxed);
        let mut state = lock(&self.state);
        state.is_closed = true;
        state.jobs.clear();
        drop(state);
        self.ready.notify_all();
    }

    /// The last thing a thread does.
    pub(super) fn exit(&self) {
        let mut state = lock(&self.state);
        state.num_threads -= 1;
        drop(state);
        self.exited.notify_all();
    }

    /// Blocks until every thread of a closed queue has exited; how many have not when the deadline has passed.
    pub(super) fn wait_exited(&self, deadline: Option<Instant>) -> usize {
        let mut state = lock(&self.state);
        while state.num_threads > 0 {
            let (woken, is_in_time) = wait(&self.exited, state, deadline);
            state = woken;
            if !is_in_time {
                break;
            }
        }
        state.num_threads
    }
}

impl<W: Work> State<W> {
    fn turn(&mut self) -> Option<(Arc<W>, usize)> {
        for _ in 0..self.jobs.len() {
            let job = self.jobs.pop_front()?;
            match job.claim() {
                Claim::Chunk(chunk) => {
                    self.jobs.push_back(Arc::clone(&job));
                    return Some((job, chunk));
                }
                Claim::NotYet => self.jobs.push_back(job),
                Claim::Over => {}
            }
        }
        None
    }
}
