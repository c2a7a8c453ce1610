//! Filling a lease while the sender goes on.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::pass::Pass;
use super::writing::Writing;
use crate::Result;
use crate::cast::Cast;
use crate::memory::Source;
use crate::pool::{self, Started};

/// A lease that the process's copy threads fill and then commit. Dropping it does what is left of that first.
pub struct Later {
    started: Started,
    writing: Arc<Writing>,
    committed: Arc<Mutex<Result<()>>>,
}

impl Writing {
    /// Begins to fill the whole lease from `source`, with a cast on the way when one is given, by threads of the process,
    /// and to commit it behind the last byte. Once a lease. Where the system refused every thread it is done here.
    ///
    /// `source` is read until the result is over or dropped (M5).
    pub fn write_later(
        self: &Arc<Self>,
        source: Source<'static>,
        cast: Option<Cast>,
        num_threads: NonZeroUsize,
    ) -> Result<Later> {
        let pass = Pass::begin(Arc::clone(self), source, cast, num_threads)?;
        let (num_steps, num_helpers) = (pass.num_steps(), pass.plan().num_threads.get());
        if num_steps == 0 {
            pass.end();
            self.commit()?;
        }
        let committed = Arc::new(Mutex::new(Ok(())));
        let (left, outcome, writing) = (AtomicUsize::new(num_steps), Arc::clone(&committed), Arc::clone(self));
        let step = move |index| {
            pass.step(index);
            if left.fetch_sub(1, Ordering::AcqRel) == 1 {
                pass.end();
                // An error: it was given up meanwhile.
                *outcome.lock().unwrap_or_else(PoisonError::into_inner) = writing.commit();
            }
            true
        };
        let started = pool::start(num_steps, num_helpers, Box::new(step));
        Ok(Later { started, writing: Arc::clone(self), committed })
    }
}

impl Later {
    /// Whether all is written. Never blocks.
    pub fn is_over(&self) -> bool {
        self.started.is_over()
    }

    /// Blocks until all is written and committed, and does meanwhile what no thread has begun; false at the limit, which
    /// can be passed by the time of one step. An error when the lease was given up before.
    pub fn wait(&self, limit: Duration) -> Result<bool> {
        if !self.started.wait(limit) {
            return Ok(false);
        }
        if self.started.has_panicked() {
            self.writing.abort();
        }
        self.committed.lock().unwrap_or_else(PoisonError::into_inner).clone().map(|()| true)
    }
}
