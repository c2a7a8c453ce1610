//! Copying by threads that stay: into a ring of slots by those of a [`Pool`], and anything else on the host by those that
//! all callers in the process share ([`start_threads`]). What follows is the former.
//!
//! A [`Table`] says what goes where: chunk `i` is a list of pieces and is written into slot `i % slots.len()`. A
//! [`Job`] hands its chunks out in order, to whichever thread asks first, and only as far as its owner permits: chunk
//! `i + slots.len()` may start once whatever reads slot `i` has read it. The owner waits for chunk 0, passes its slot
//! on, waits for chunk 1, and so on, and raises the permit as slots fall free.
//!
//! # Who copies
//!
//! * Whoever waits for a chunk copies what nobody has begun, and sleeps only when there is nothing. A job of one chunk
//!   is copied by its owner, with no other thread woken.
//! * So no more threads are woken than there are permitted chunks besides the owner's. A thread that has ended a chunk
//!   looks for the next by itself.
//! * Threads take one chunk of each job in turn: a small job is not held up by a big one for longer than a chunk takes.
//! * A thread without work looks about for some microseconds at most and then sleeps.
//!
//! # What ends a job
//!
//! The first error, [`Job::cancel`], dropping the job, or its last chunk. Chunks that run are waited for, so that
//! sources and slots can be reused afterwards (M5). Closing the pool ends the threads, not the jobs: their owners copy
//! the rest while they wait. A process forked from ours has none of the threads: there pool and jobs refuse to work.
//!
//! # How it is checked
//!
//! The hand-over is `pool/ledger.rs` and `pool/queue.rs`. loom runs it through every order of its steps, within a bound
//! of preemptions:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release --lib loom
//! ```

mod job;
mod ledger;
mod queue;
mod shared;
mod steps;
mod sync;
mod table;

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::fork::Process;

use self::job::Copying;
pub use self::job::Job;
use self::queue::WorkQueue;
pub use self::shared::start_threads;
pub(crate) use self::shared::{Started, share, start};
use self::sync::Spin;
pub use self::table::{CopySource, Piece, Table};
use crate::streaming::Store;
use crate::{Error, Result};

/// Threads named `mmcopy-copy-<n>` that copy the chunks of jobs. Dropping it closes it.
#[derive(Debug)]
pub struct Pool {
    queue: Arc<WorkQueue<Copying>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    num_threads: usize,
    process: Process,
}

impl Pool {
    /// Starts the threads, which sleep until there is work. When the system refuses one, none is left.
    pub fn new(num_threads: NonZeroUsize) -> Result<Self> {
        let num_threads = num_threads.get();
        let queue = Arc::new(WorkQueue::new(num_threads));
        let mut threads = Vec::new();
        for thread in 0..num_threads {
            let queue_of_thread = Arc::clone(&queue);
            let spawned = Builder::new().name(format!("mmcopy-copy-{thread}")).spawn(move || work(&queue_of_thread));
            match spawned {
                Ok(handle) => threads.push(handle),
                Err(error) => {
                    queue.close();
                    join(threads);
                    return Err(Error::Spawn { thread, num_threads, reason: error.to_string() });
                }
            }
        }
        Ok(Self { queue, threads: Mutex::new(threads), num_threads, process: Process::current() })
    }

    /// Threads that it was made with.
    pub const fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Takes a job on. Nothing of it is copied before [`Job::permit`]. Never blocks.
    pub fn start(&self, table: Table) -> Result<Job> {
        let closed = || Error::Closed { what: "the copy pool".to_owned() };
        if self.is_inherited() {
            return Err(closed());
        }
        Job::start(table, Store::best_for(self.num_threads), &self.queue, self.process).ok_or_else(closed)
    }

    /// Copies a table of one chunk on the calling thread. No other thread has part in it.
    pub fn copy_now(&self, table: &Table) -> Result<()> {
        if table.num_chunks() > 1 {
            return Err(Error::OneChunk { num_chunks: table.num_chunks() });
        }
        (0..table.num_chunks()).try_for_each(|chunk| table.copy(chunk, Store::best_for(1)))
    }

    /// Wakes as many threads for a job that will start within microseconds: waking takes about as long as what comes
    /// before a start. They look about and sleep again when none comes. Never blocks.
    pub fn wake(&self, num_threads: usize) {
        if !self.is_inherited() {
            self.queue.wake(num_threads.min(self.num_threads));
        }
    }

    /// Refuses further jobs, and blocks until the threads have ended, each after the chunk that it copies. May be called
    /// again, also after a limit was reached. Does nothing in a forked process.
    pub fn close(&self, limit: Duration) -> Result<()> {
        if self.is_inherited() {
            return Ok(());
        }
        self.queue.close();
        let num_left = self.queue.wait_exited(Instant::now().checked_add(limit));
        if num_left > 0 {
            return Err(Error::Timeout { what: format!("{num_left} copy threads"), waited: limit });
        }
        join(std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner)));
        Ok(())
    }

    fn is_inherited(&self) -> bool {
        !self.process.is_current()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.is_inherited() {
            // The handles name threads that this process does not have.
            if let Ok(threads) = self.threads.get_mut() {
                std::mem::forget(std::mem::take(threads));
            }
            return;
        }
        // Without a limit this ends when the threads have: nothing that they do waits for anybody.
        let _ = self.close(Duration::MAX);
    }
}

fn work(queue: &WorkQueue<Copying>) {
    /// Counts the thread out, also after a panic.
    struct Leave<'a>(&'a WorkQueue<Copying>);
    impl Drop for Leave<'_> {
        fn drop(&mut self) {
            self.0.exit();
        }
    }

    let _leave = Leave(queue);
    let mut spin = Spin::new();
    while let Some((copying, chunk)) = queue.next(&mut spin) {
        copying.copy(chunk);
    }
}

fn join(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        // A panic was the error of its chunk already.
        let _ = thread.join();
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
