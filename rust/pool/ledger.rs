//! Who copies which chunk of a job, and when each is there.
//!
//! One atomic word is the cursor: twice the number of chunks handed out, plus one when no more are. A thread that
//! raises it by two owns that chunk. Stopping sets the lowest bit in the same word, so after it the number of chunks
//! handed out is final, and the job is over as soon as that many have ended.
//!
//! What is published by what: the caller's `permit` (Release) to the thread that claims below it (Acquire), so a copy
//! starts after everything that made its slot free; and a chunk's flag (Release, after its bytes) to whoever sees it
//! (Acquire). Ends, errors and sleeping waiters are counted under a lock, which no copy holds.

use std::time::Instant;

use super::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, Ordering, Spin, lock, wait};
use crate::{Error, Result};

const STOPPED: usize = 1;
const ONE_CHUNK: usize = 2;

/// What a thread that asks for a chunk gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// This one, and no other thread gets it. It must be ended.
    Chunk(usize),
    /// The next one is not permitted yet.
    NotYet,
    /// There is none left, now and later.
    Over,
}

/// The answer to a thread that waits for a chunk.
#[derive(Debug)]
pub(super) enum Waited {
    /// The chunk is there, or never will be.
    Ended(Result<()>),
    /// A chunk can be claimed meanwhile.
    Claimable,
    /// The deadline has passed.
    TimedOut,
}

/// The account of one job.
#[derive(Debug)]
pub(super) struct Ledger {
    num_chunks: usize,
    cursor: AtomicUsize,
    permitted: AtomicUsize,
    is_there: Box<[AtomicBool]>,
    /// Changed under the lock of the account.
    num_ended: AtomicUsize,
    account: Mutex<Account>,
    changed: Condvar,
}

#[derive(Debug)]
struct Account {
    num_waiting: usize,
    stopped_by: Option<Stop>,
}

#[derive(Debug)]
enum Stop {
    Error(Error),
    Cancel,
}

impl Ledger {
    /// A job of which nothing is permitted. Half of the word counts chunks, which no table in memory can reach.
    pub(super) fn new(num_chunks: usize) -> Self {
        Self {
            num_chunks,
            cursor: AtomicUsize::new(0),
            permitted: AtomicUsize::new(0),
            is_there: (0..num_chunks).map(|_| AtomicBool::new(false)).collect(),
            num_ended: AtomicUsize::new(0),
            account: Mutex::new(Account { num_waiting: 0, stopped_by: None }),
            changed: Condvar::new(),
        }
    }

    pub(super) const fn num_chunks(&self) -> usize {
        self.num_chunks
    }

    /// Lets the chunks below `upto` start, and wakes those who wait, because one of those can be theirs to copy. How
    /// many threads besides them, or besides the caller who will wait later, have something to do.
    pub(super) fn permit(&self, upto: usize) -> usize {
        self.permitted.fetch_max(upto.min(self.num_chunks), Ordering::Release);
        let num_waiting = lock(&self.account).num_waiting;
        if num_waiting > 0 {
            self.changed.notify_all();
        }
        self.num_claimable().saturating_sub(num_waiting.max(1))
    }

    /// Hands out the next chunk.
    pub(super) fn claim(&self) -> Claim {
        let mut cursor = self.cursor.load(Ordering::Relaxed);
        loop {
            let next = cursor / ONE_CHUNK;
            if cursor & STOPPED != 0 || next >= self.num_chunks {
                return Claim::Over;
            }
            if next >= self.permitted.load(Ordering::Acquire) {
                return Claim::NotYet;
            }
            // Relaxed: the chunk's table was published with the job, and its slot by the load above.
            let taken =
                self.cursor.compare_exchange_weak(cursor, cursor + ONE_CHUNK, Ordering::Relaxed, Ordering::Relaxed);
            match taken {
                Ok(_) => return Claim::Chunk(next),
                Err(seen) => cursor = seen,
            }
        }
    }

    /// How many chunks could be claimed now.
    pub(super) fn num_claimable(&self) -> usize {
        let cursor = self.cursor.load(Ordering::Relaxed);
        if cursor & STOPPED != 0 {
            return 0;
        }
        self.permitted.load(Ordering::Relaxed).saturating_sub(cursor / ONE_CHUNK)
    }

    /// Ends a claimed chunk. An error stops the job.
    pub(super) fn end(&self, chunk: usize, outcome: Result<()>) {
        if outcome.is_ok() {
            self.is_there[chunk].store(true, Ordering::Release);
        }
        let mut account = lock(&self.account);
        if let Err(error) = outcome {
            self.cursor.fetch_or(STOPPED, Ordering::Relaxed);
            account.stopped_by.get_or_insert(Stop::Error(error));
        }
        self.num_ended.fetch_add(1, Ordering::Relaxed);
        let is_awaited = account.num_waiting > 0;
        drop(account);
        if is_awaited {
            self.changed.notify_all();
        }
    }

    /// Whether the chunk is there. After true its bytes can be read.
    pub(super) fn is_there(&self, chunk: usize) -> bool {
        self.is_there[chunk].load(Ordering::Acquire)
    }

    /// Blocks until the chunk has ended, or there is something to claim.
    pub(super) fn wait(&self, chunk: usize, deadline: Option<Instant>) -> Waited {
        let looked_at = || self.is_there(chunk) || self.num_claimable() > 0;
        if !looked_at() {
            Spin::new().until(looked_at);
        }
        let mut account = lock(&self.account);
        loop {
            if let Some(outcome) = self.outcome(&account, chunk) {
                return Waited::Ended(outcome);
            }
            if self.num_claimable() > 0 {
                return Waited::Claimable;
            }
            account.num_waiting += 1;
            let (woken, is_in_time) = wait(&self.changed, account, deadline);
            account = woken;
            account.num_waiting -= 1;
            if !is_in_time {
                return Waited::TimedOut;
            }
        }
    }

    fn outcome(&self, account: &Account, chunk: usize) -> Option<Result<()>> {
        match &account.stopped_by {
            Some(Stop::Error(error)) => Some(Err(error.clone())),
            _ if self.is_there(chunk) => Some(Ok(())),
            Some(Stop::Cancel) => Some(Err(Error::Cancelled { chunk })),
            None => None,
        }
    }

    /// No further chunk starts. Wakes those who wait. Does not wait for those that run: [`Ledger::settle`] does.
    pub(super) fn cancel(&self) {
        let mut account = lock(&self.account);
        if self.has_ended() {
            return;
        }
        self.cursor.fetch_or(STOPPED, Ordering::Relaxed);
        account.stopped_by.get_or_insert(Stop::Cancel);
        drop(account);
        self.changed.notify_all();
    }

    /// Blocks until no chunk of a job runs of which none will start: a stopped one, or one that was handed out whole.
    pub(super) fn settle(&self) {
        if !self.has_ended() {
            Spin::new().until(|| self.has_ended());
        }
        let mut account = lock(&self.account);
        while !self.has_ended() {
            account.num_waiting += 1;
            account = wait(&self.changed, account, None).0;
            account.num_waiting -= 1;
        }
    }

    /// Whether nothing runs and nothing will start.
    pub(super) fn is_over(&self) -> bool {
        let _account = lock(&self.account);
        self.has_ended()
    }

    /// As `is_over`, and final, but what the chunks wrote is there only for who takes the lock afterwards.
    fn has_ended(&self) -> bool {
        let cursor = self.cursor.load(Ordering::Relaxed);
        let handed_out = cursor / ONE_CHUNK;
        let is_last = cursor & STOPPED != 0 || handed_out == self.num_chunks;
        is_last && self.num_ended.load(Ordering::Relaxed) == handed_out
    }
}
