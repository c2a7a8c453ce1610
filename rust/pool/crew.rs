//! The threads' side: which job is next, and sleeping while there is none.
//!
//! Jobs stand in a queue. A thread takes one chunk of the first job that has one and puts the job at the end, so jobs
//! advance by turns whatever their sizes. The queue's lock is taken once for a chunk and never held during a copy.
//!
//! Why no wake-up is lost: whoever makes a chunk claimable does so first and then takes this lock to call; a thread
//! looks at all jobs and falls asleep under the same lock. Either it sees the chunk, or it is asleep when it is called.

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

/// Jobs and the threads that share them.
#[derive(Debug)]
pub(super) struct Crew<W> {
    roster: Mutex<Roster<W>>,
    bell: Condvar,
    left: Condvar,
    /// Rises with every call: what a thread looks at that is not asleep yet.
    num_calls: AtomicUsize,
}

#[derive(Debug)]
struct Roster<W> {
    jobs: VecDeque<Arc<W>>,
    num_asleep: usize,
    /// Of those asleep, how many were called and have not got up yet.
    num_called: usize,
    num_threads: usize,
    is_closed: bool,
}

impl<W: Work> Crew<W> {
    /// A crew of threads that are about to start, each of which calls [`Crew::leave`] in the end.
    pub(super) fn new(num_threads: usize) -> Self {
        let roster = Roster { jobs: VecDeque::new(), num_asleep: 0, num_called: 0, num_threads, is_closed: false };
        Self { roster: Mutex::new(roster), bell: Condvar::new(), left: Condvar::new(), num_calls: AtomicUsize::new(0) }
    }

    /// Queues a job; false when the crew is closed. Nobody is called.
    pub(super) fn add(&self, job: Arc<W>) -> bool {
        let mut roster = lock(&self.roster);
        if roster.is_closed {
            return false;
        }
        roster.jobs.push_back(job);
        true
    }

    /// Forgets a job. A thread that has a chunk of it keeps its own reference.
    pub(super) fn remove(&self, job: &Arc<W>) {
        lock(&self.roster).jobs.retain(|queued| !Arc::ptr_eq(queued, job));
    }

    /// Wakes as many threads as asked for, or as sleep.
    pub(super) fn call(&self, num_threads: usize) {
        if num_threads == 0 {
            return;
        }
        // Relaxed: a thread that sees it takes the lock and looks.
        self.num_calls.fetch_add(1, Ordering::Relaxed);
        let mut roster = lock(&self.roster);
        let num_to_wake = num_threads.min(roster.num_asleep - roster.num_called);
        roster.num_called += num_to_wake;
        let are_all = roster.num_called == roster.num_asleep;
        drop(roster);
        if num_to_wake > 1 && are_all {
            self.bell.notify_all(); // one system call, not one for each
        } else {
            for _ in 0..num_to_wake {
                self.bell.notify_one();
            }
        }
    }

    /// Blocks until there is a chunk to copy; None when the crew is closed.
    pub(super) fn next(&self, spin: &mut Spin) -> Option<(Arc<W>, usize)> {
        let mut roster = lock(&self.roster);
        let mut may_spin = true;
        loop {
            if roster.is_closed {
                return None;
            }
            if let Some(turn) = roster.turn() {
                return Some(turn);
            }
            roster = if may_spin { self.look_about(roster, spin) } else { self.sleep(roster) };
            may_spin = !may_spin;
        }
    }

    fn look_about<'a>(&'a self, roster: MutexGuard<'a, Roster<W>>, spin: &mut Spin) -> MutexGuard<'a, Roster<W>> {
        let seen = self.num_calls.load(Ordering::Relaxed);
        if cfg!(loom) {
            return roster;
        }
        drop(roster);
        spin.until(|| self.num_calls.load(Ordering::Relaxed) != seen);
        lock(&self.roster)
    }

    fn sleep<'a>(&'a self, mut roster: MutexGuard<'a, Roster<W>>) -> MutexGuard<'a, Roster<W>> {
        roster.num_asleep += 1;
        let mut roster = wait(&self.bell, roster, None).0;
        roster.num_asleep -= 1;
        // One that got up by itself answers a call meant for another, who looks at the jobs all the same.
        roster.num_called = roster.num_called.saturating_sub(1).min(roster.num_asleep);
        roster
    }

    /// Lets the threads end after the chunks they have. May be called again.
    pub(super) fn close(&self) {
        self.num_calls.fetch_add(1, Ordering::Relaxed);
        let mut roster = lock(&self.roster);
        roster.is_closed = true;
        roster.jobs.clear();
        drop(roster);
        self.bell.notify_all();
    }

    /// The last thing a thread does.
    pub(super) fn leave(&self) {
        let mut roster = lock(&self.roster);
        roster.num_threads -= 1;
        drop(roster);
        self.left.notify_all();
    }

    /// Blocks until every thread of a closed crew has left; how many have not when the deadline has passed.
    pub(super) fn wait_left(&self, deadline: Option<Instant>) -> usize {
        let mut roster = lock(&self.roster);
        while roster.num_threads > 0 {
            let (woken, is_in_time) = wait(&self.left, roster, deadline);
            roster = woken;
            if !is_in_time {
                break;
            }
        }
        roster.num_threads
    }
}

impl<W: Work> Roster<W> {
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
