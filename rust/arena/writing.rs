//! A lease while its sender writes it.

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::ArenaError;
use super::handle::LeaseHandle;
use super::layout;
use super::progress::Progress;
use super::sender::Inner;
use crate::cast::Cast;
use crate::memory::{Source, Target};
use crate::streaming::{self, Store};
use crate::workers::Plan;
use crate::{Error, Result};

/// The longest steps, so that a consumer can follow. As many as there are threads are written at once and are there at
/// about the same time: with steps of 4 MiB, 8 threads and 256 MiB the GPU had all in 6.5 ms, with 0.25 to 1 MiB in 5.8 to
/// 6.1 (H200).
const STEP_BYTES: usize = 512 << 10;

/// A lease that is not finished. Its handle may be sent already: consumers read as far as it is written. Dropping it
/// gives it up, unless it was committed.
///
/// Its block is not given to anyone else while this exists, or while a [`Writing::view`] of it does, whatever consumers
/// do and however it ends.
#[derive(Debug)]
pub struct Writing {
    inner: Arc<Inner>,
    handle: LeaseHandle,
    progress: Progress,
    stage: Mutex<Stage>,
}

#[derive(Debug, Default)]
struct Stage {
    /// Calls of `write` that run.
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
        let (src_nbytes, dst_nbytes) = (source.nbytes(), self.nbytes());
        let wanted_nbytes = cast.map_or(Ok(src_nbytes), |cast| cast.dst_nbytes(src_nbytes))?;
        if wanted_nbytes != dst_nbytes {
            return Err(Error::Lengths { src_nbytes, dst_nbytes, wanted_nbytes });
        }
        let _writer = self.enter(|stage| &mut stage.num_writers)?;
        let target = self.target();
        if source.overlaps(target) {
            return Err(Error::Overlap { src_nbytes, dst_nbytes });
        }
        let (from, to) = cast.map_or((1, 1), |cast| (cast.from().itemsize(), cast.to().itemsize()));
        let unit_bytes = NonZeroUsize::new(from.max(to)).unwrap_or(NonZeroUsize::MIN);
        let plan = Plan::new(src_nbytes / from, unit_bytes, num_threads);
        let most = NonZeroUsize::new(STEP_BYTES / unit_bytes).unwrap_or(NonZeroUsize::MIN);
        let plan = plan.with_step(plan.step.min(most));
        let store = Store::best_for(plan.num_threads.get());
        let step = plan.step.get();
        let record = layout::record(&self.inner.control, self.handle.index);
        let busy = || ArenaError::Busy { name: self.handle.name() };
        let steps = self.progress.begin(plan.total.div_ceil(step)).ok_or_else(busy)?;
        let done: std::result::Result<(), Infallible> = plan.run(
            || (),
            |(), range| {
                let (part, place) = (range.start * from..range.end * from, range.start * to..range.end * to);
                match cast {
                    None => streaming::copy(source.slice(part), target.slice(place), store),
                    Some(cast) => cast.apply(source.slice(part), target.slice(place)),
                }
                let in_place = |steps: usize| ((steps * step).min(plan.total) * to) as u64;
                steps.end(range.start / step, |steps| record.advance(in_place(steps)));
                Ok(())
            },
        );
        done.unwrap_or_else(|never| match never {});
        Ok(())
    }

    /// The memory itself, for a preprocessor to write into. The block is not reused before the view is dropped.
    pub fn view(self: &Arc<Self>) -> Result<View> {
        std::mem::forget(self.enter(|stage| &mut stage.num_views)?);
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

    fn nbytes(&self) -> usize {
        // No loss: it is inside a mapping.
        self.handle.nbytes as usize
    }

    fn target(&self) -> Target<'_> {
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

    fn enter(&self, count: fn(&mut Stage) -> &mut usize) -> Result<Entered<'_>> {
        self.check_process()?;
        let mut stage = self.stage();
        if stage.end.is_some() {
            return Err(self.over());
        }
        *count(&mut stage) += 1;
        Ok(Entered { writing: self, count })
    }

    fn leave(&self, count: fn(&mut Stage) -> &mut usize) {
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

/// A thread that may write.
struct Entered<'a> {
    writing: &'a Writing,
    count: fn(&mut Stage) -> &mut usize,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.writing.leave(self.count);
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
        self.writing.leave(|stage| &mut stage.num_views);
    }
}
