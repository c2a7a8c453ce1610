//! A lease while its sender writes it.

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::ArenaError;
use super::handle::LeaseHandle;
use super::layout;
use super::pass::Pass;
use super::progress::Progress;
use super::sender::Inner;
use crate::cast::Cast;
use crate::memory::{Source, Target};
use crate::{Error, Result};

/// A lease that is not finished. Its handle may be sent already: consumers read as far as it is written. Dropping it
/// gives it up, unless it was committed.
///
/// Its block is not given to anyone else while this exists, or while a [`Writing::view`] of it does, whatever consumers
/// do and however it ends.
#[derive(Debug)]
pub struct Writing {
    pub(super) inner: Arc<Inner>,
    handle: LeaseHandle,
    pub(super) progress: Progress,
    stage: Mutex<Stage>,
}

#[derive(Debug, Default)]
struct Stage {
    /// Passes that have not ended.
    num_writers: usize,
    /// Views that can still be written through.
    num_views: usize,
    end: Option<End>,
    /// The sender's table has the end, and that it can no longer be written to.
    is_booked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Committed,
    Aborted,
}

impl Writing {
    pub(super) fn new(inner: Arc<Inner>, handle: LeaseHandle) -> Self {
        Self { inner, handle, progress: Progress::new(), stage: Mutex::default() }
    }

    /// What a consumer needs to find it. The same each time.
    pub const fn handle(&self) -> &LeaseHandle {
        &self.handle
    }

    /// Fills the whole lease from `source`, with a cast on the way when one is given, by several threads. Consumers see
    /// each step as soon as all before it are there. Blocks until all is written; commits nothing. Once a lease.
    pub fn write(&self, source: Source<'_>, cast: Option<Cast>, num_threads: NonZeroUsize) -> Result<()> {
        let pass = Pass::begin(self, source, cast, num_threads)?;
        let done: std::result::Result<(), Infallible> = pass.plan().run(|range| {
            pass.step(range.start / pass.plan().step);
            Ok(())
        });
        done.unwrap_or_else(|never| match never {});
        Ok(())
    }

    /// The memory itself, for a preprocessor to write into. The block is not reused before the view is dropped.
    pub fn view(self: &Arc<Self>) -> Result<View> {
        self.count_in(|stage| &mut stage.num_views)?;
        Ok(View { writing: Arc::clone(self) })
    }

    /// All bytes are in place. Never blocks. [`ArenaError::Busy`] while a `write` runs, [`Error::Closed`] when it is over.
    pub fn commit(&self) -> Result<()> {
        self.check_process()?;
        let mut stage = self.stage();
        match stage.end {
            _ if stage.num_writers > 0 => Err(ArenaError::Busy { name: self.handle.name() }.into()),
            Some(_) => Err(self.over()),
            None => {
                layout::record(&self.inner.control, self.handle.index).advance(self.handle.nbytes);
                self.end(&mut stage, End::Committed);
                Ok(())
            }
        }
    }

    /// Gives it up: consumers get an error instead of the rest. Never blocks. Does nothing when it is over.
    pub fn abort(&self) {
        if !self.inner.process.is_current() {
            return;
        }
        let mut stage = self.stage();
        if stage.end.is_none() {
            let record = layout::record(&self.inner.control, self.handle.index);
            self.progress.stop(|| record.abort(record.written().nbytes));
            self.end(&mut stage, End::Aborted);
        }
    }

    /// Whether it was committed or given up.
    pub fn is_over(&self) -> bool {
        !self.inner.process.is_current() || self.stage().end.is_some()
    }

    /// Views that exist.
    pub fn num_views(&self) -> usize {
        if self.inner.process.is_current() { self.stage().num_views } else { 0 }
    }

    pub(super) fn nbytes(&self) -> usize {
        // No loss: it is inside a mapping.
        self.handle.nbytes as usize
    }

    pub(super) fn target(&self) -> Target<'_> {
        let start = self.handle.offset as usize;
        self.inner.data.target().slice(start..start + self.nbytes())
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, stage: &mut Stage, end: End) {
        stage.end = Some(end);
        self.book(stage);
    }

    /// Tells the books: of a commit at once, so that the lease can be taken back while a view is left, and of the rest
    /// once it can no longer be written to.
    fn book(&self, stage: &mut Stage) {
        let is_left = stage.num_writers + stage.num_views == 0;
        match stage.end {
            Some(end) if !stage.is_booked && (is_left || end == End::Committed) => {
                stage.is_booked = is_left;
                self.inner.end_writing(&self.handle, end == End::Aborted, is_left);
            }
            _ => {}
        }
    }

    /// A pass begins. It ends with [`Writing::leave`].
    pub(super) fn enter(&self) -> Result<()> {
        self.count_in(|stage| &mut stage.num_writers)
    }

    pub(super) fn leave(&self) {
        self.count_out(|stage| &mut stage.num_writers);
    }

    fn count_in(&self, count: fn(&mut Stage) -> &mut usize) -> Result<()> {
        self.check_process()?;
        let mut stage = self.stage();
        if stage.end.is_some() {
            return Err(self.over());
        }
        *count(&mut stage) += 1;
        Ok(())
    }

    fn count_out(&self, count: fn(&mut Stage) -> &mut usize) {
        if self.inner.process.is_current() {
            let mut stage = self.stage();
            *count(&mut stage) -= 1;
            self.book(&mut stage);
        }
    }

    fn over(&self) -> Error {
        Error::Closed { what: format!("lease {}", self.handle) }
    }

    fn check_process(&self) -> Result<()> {
        if self.inner.process.is_current() { Ok(()) } else { Err(self.inner.closed()) }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.abort();
    }
}

/// The memory of a lease, to write into. It stays valid, and the lease's, while this exists.
#[derive(Debug)]
pub struct View {
    writing: Arc<Writing>,
}

impl View {
    /// All of it.
    pub fn target(&self) -> Target<'_> {
        self.writing.target()
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.writing.count_out(|stage| &mut stage.num_views);
    }
}
