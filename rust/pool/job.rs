//! A job in the hands of the one who started it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::fork::Process;

use super::ledger::{Claim, Ledger, Waited};
use super::queue::{Work, WorkQueue};
use super::table::Table;
use crate::streaming::Store;
use crate::{Error, Result};

/// What the threads see of a job.
#[derive(Debug)]
pub(super) struct Copying {
    ledger: Arc<Ledger>,
    table: Table,
    store: Store,
}

impl Work for Copying {
    fn claim(&self) -> Claim {
        self.ledger.claim()
    }
}

impl Copying {
    /// Copies a chunk that was claimed, and ends it. The sources are let go of first, so that nobody but the job's
    /// owner has them once the job is over.
    pub(super) fn copy(self: Arc<Self>, chunk: usize) {
        let mut claimed = Claimed { ledger: Arc::clone(&self.ledger), chunk, outcome: None };
        claimed.outcome = Some(self.table.copy(chunk, self.store));
        drop(self);
    }
}

/// A chunk that is being copied. Dropping it ends the chunk: after a panic as well, so that no thread waits for ever.
struct Claimed {
    ledger: Arc<Ledger>,
    chunk: usize,
    outcome: Option<Result<()>>,
}

impl Drop for Claimed {
    fn drop(&mut self) {
        let outcome = self.outcome.take().unwrap_or(Err(Error::Panicked { chunk: self.chunk }));
        self.ledger.end(self.chunk, outcome);
    }
}

/// Chunks that are being copied. Dropping it cancels it. In a process forked from the one that started it, it does
/// nothing and waits for no other thread.
#[derive(Debug)]
pub struct Job {
    ledger: Arc<Ledger>,
    queue: Arc<WorkQueue<Copying>>,
    /// None once the job is over: then nothing of the sources and slots is kept.
    copying: Mutex<Option<Arc<Copying>>>,
    process: Process,
}

impl Job {
    pub(super) fn start(table: Table, store: Store, queue: &Arc<WorkQueue<Copying>>, process: Process) -> Option<Self> {
        let ledger = Arc::new(Ledger::new(table.num_chunks()));
        let copying = Arc::new(Copying { ledger: Arc::clone(&ledger), table, store });
        let is_open = queue.add(Arc::clone(&copying));
        is_open.then(|| Self { ledger, queue: Arc::clone(queue), copying: Mutex::new(Some(copying)), process })
    }

    /// Number of chunks.
    pub fn num_chunks(&self) -> usize {
        self.ledger.num_chunks()
    }

    /// Lets the chunks below `upto` start: the slot of each is free, whatever was read from it before. Numbers only
    /// rise; one above the number of chunks means all of them. Never blocks.
    pub fn permit(&self, upto: usize) -> Result<()> {
        self.check_process()?;
        self.queue.wake(self.ledger.permit(upto));
        Ok(())
    }

    /// Whether the chunk is in its slot. When it has not begun, a thread is asked to: whoever only looks gets on too.
    pub fn is_done(&self, chunk: usize) -> Result<bool> {
        self.check_process()?;
        self.check_index(chunk)?;
        let is_there = self.ledger.is_there(chunk);
        if is_there {
            self.let_go_when_over();
        } else {
            self.queue.wake(self.ledger.num_claimable());
        }
        Ok(is_there)
    }

    /// How many chunks in a row, from `chunk` on, are in their slots. Never blocks.
    pub fn num_there_from(&self, chunk: usize) -> usize {
        (chunk..self.num_chunks()).take_while(|&chunk| self.ledger.is_there(chunk)).count()
    }

    /// Blocks until the chunk is in its slot; meanwhile the calling thread copies chunks of this job that nobody has
    /// begun, so the limit can be passed by the time that one takes. After an error of any chunk this is that error, and
    /// the job is over when it is returned.
    pub fn wait(&self, chunk: usize, limit: Duration) -> Result<()> {
        self.check_process()?;
        self.check_index(chunk)?;
        let deadline = Instant::now().checked_add(limit);
        loop {
            match self.ledger.wait(chunk, deadline) {
                Waited::Ended(Ok(())) => {
                    self.let_go_when_over();
                    return Ok(());
                }
                Waited::Ended(Err(error)) => {
                    self.ledger.settle();
                    self.let_go_when_over();
                    return Err(error);
                }
                Waited::Claimable => self.help(),
                Waited::TimedOut => {
                    return Err(Error::Timeout { what: format!("copying chunk {chunk}"), waited: limit });
                }
            }
        }
    }

    /// No further chunk starts; blocks until those that run have ended. What is there stays, and a job that is over
    /// stays as it is. May be called again.
    pub fn cancel(&self) {
        if self.check_process().is_ok() {
            self.ledger.cancel();
            self.ledger.settle();
            self.let_go_when_over();
        }
    }

    /// Whether it touches its sources and slots no more (M5).
    pub fn is_over(&self) -> bool {
        self.check_process().is_err() || self.ledger.is_over()
    }

    fn help(&self) {
        let copying = self.copying.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(copying) = copying
            && let Claim::Chunk(chunk) = copying.claim()
        {
            self.queue.wake(self.ledger.num_claimable());
            copying.copy(chunk);
        }
    }

    /// The last reference to the sources goes here, on the thread of whoever waits for the job, and not on some thread
    /// of the pool a moment later.
    fn let_go_when_over(&self) {
        if self.ledger.is_over() {
            let copying = self.copying.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(copying) = copying {
                self.queue.remove(&copying);
            }
        }
    }

    fn check_index(&self, chunk: usize) -> Result<()> {
        let num_chunks = self.num_chunks();
        if chunk < num_chunks {
            return Ok(());
        }
        Err(Error::ChunkIndex { index: chunk.to_string(), num_chunks })
    }

    fn check_process(&self) -> Result<()> {
        if self.process.is_current() {
            return Ok(());
        }
        Err(Error::Closed { what: "the copy job".to_owned() })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.cancel();
    }
}
