//! Filling a lease, in steps that any thread may do.

use std::num::NonZeroUsize;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::ArenaError;
use super::layout;
use super::writing::Writing;
use crate::cast::Cast;
use crate::memory::Source;
use crate::streaming::{self, Store};
use crate::workers::Plan;
use crate::{Error, Result};

/// The longest steps, so that a consumer can follow. As many as there are threads are written at once and are there at
/// about the same time: with steps of 4 MiB, 8 threads and 256 MiB the GPU had all in 6.5 ms, with 0.25 to 1 MiB in 5.8 to
/// 6.1 (H200).
pub(super) const STEP_BYTES: usize = 512 << 10;

/// One filling of a lease. While it exists and has not ended, the lease can be given up, not committed, and its block is
/// given to no other.
#[derive(Debug)]
pub(super) struct Pass<'a, W: Deref<Target = Writing>> {
    writing: W,
    source: Source<'a>,
    cast: Option<Cast>,
    store: Store,
    plan: Plan,
    has_ended: AtomicBool,
}

impl<'a, W: Deref<Target = Writing>> Pass<'a, W> {
    /// Checks the source against the lease, and divides it for so many threads. Once a lease.
    pub(super) fn begin(writing: W, source: Source<'a>, cast: Option<Cast>, num_threads: NonZeroUsize) -> Result<Self> {
        let (src_nbytes, dst_nbytes) = (source.nbytes(), writing.nbytes());
        let wanted_nbytes = cast.map_or(Ok(src_nbytes), |cast| cast.dst_nbytes(src_nbytes))?;
        if wanted_nbytes != dst_nbytes {
            return Err(Error::Lengths { src_nbytes, dst_nbytes, wanted_nbytes });
        }
        let (from, to) = itemsizes(cast);
        let unit_bytes = NonZeroUsize::new(from.max(to)).unwrap_or(NonZeroUsize::MIN);
        let plan = Plan::new(src_nbytes / from, unit_bytes, num_threads);
        let most = NonZeroUsize::new(STEP_BYTES / unit_bytes).unwrap_or(NonZeroUsize::MIN);
        let plan = plan.with_step(plan.step.min(most));
        writing.enter()?;
        let store = Store::best_for(plan.num_threads.get());
        let pass = Self { writing, source, cast, store, plan, has_ended: AtomicBool::new(false) };
        if source.overlaps(pass.writing.target()) {
            return Err(Error::Overlap { src_nbytes, dst_nbytes });
        }
        if pass.writing.progress.begin(pass.num_steps()) {
            Ok(pass)
        } else {
            Err(ArenaError::Busy { name: pass.writing.handle().name() }.into())
        }
    }

    pub(super) const fn plan(&self) -> Plan {
        self.plan
    }

    pub(super) fn num_steps(&self) -> usize {
        self.plan.total.div_ceil(self.plan.step.get())
    }

    /// Bytes of one step, before or after the cast, whichever are more.
    pub(super) fn step_nbytes(&self, index: usize) -> usize {
        let (from, to) = itemsizes(self.cast);
        self.units(index).len() * from.max(to)
    }

    fn units(&self, index: usize) -> Range<usize> {
        let place = |steps: usize| steps.saturating_mul(self.plan.step.get()).min(self.plan.total);
        place(index)..place(index + 1)
    }

    /// Does one step. Consumers see it once all before it are there.
    pub(super) fn step(&self, index: usize) {
        let (from, to) = itemsizes(self.cast);
        let units = self.units(index);
        let source = self.source.slice(units.start * from..units.end * from);
        let target = self.writing.target().slice(units.start * to..units.end * to);
        match self.cast {
            None => streaming::copy(source, target, self.store),
            Some(cast) => cast.apply(source, target),
        }
        let record = layout::record(&self.writing.inner.control, self.writing.handle().index);
        self.writing.progress.end(index, |steps| record.advance((self.units(steps - 1).end * to) as u64));
    }

    /// No step runs or will: the lease can be committed.
    pub(super) fn end(&self) {
        if !self.has_ended.swap(true, Ordering::Relaxed) {
            self.writing.leave();
        }
    }
}

impl<W: Deref<Target = Writing>> Drop for Pass<'_, W> {
    fn drop(&mut self) {
        self.end();
    }
}

fn itemsizes(cast: Option<Cast>) -> (usize, usize) {
    cast.map_or((1, 1), |cast| (cast.from().itemsize(), cast.to().itemsize()))
}
