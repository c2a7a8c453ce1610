//! Writing the leases of one request together.

use std::num::NonZeroUsize;

use super::writing::Writing;
use crate::Result;
use crate::cast::Cast;
use crate::memory::Source;
use crate::workers::Plan;

/// A lease and what comes into it, with a cast on the way when one is given.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The lease.
    pub writing: &'a Writing,
    /// What is written: all of the lease.
    pub source: Source<'a>,
    /// On the way.
    pub cast: Option<Cast>,
}

/// Fills all of these leases and then commits them. Those that one thread would write are shared out among the threads,
/// the others are written one after the other by all of them. Blocks until all is written. On an error those that are
/// not committed are given up; a lease that somebody else ended meanwhile is the only one that cannot be committed.
pub fn write_all(parts: &[Part<'_>], num_threads: NonZeroUsize) -> Result<()> {
    let outcome = fill(parts, num_threads).and_then(|()| parts.iter().try_for_each(|part| part.writing.commit()));
    if outcome.is_err() {
        parts.iter().for_each(|part| part.writing.abort());
    }
    outcome
}

fn fill(parts: &[Part<'_>], num_threads: NonZeroUsize) -> Result<()> {
    let (small, large): (Vec<&Part<'_>>, Vec<&Part<'_>>) = parts
        .iter()
        .partition(|part| Plan::new(part.source.nbytes(), NonZeroUsize::MIN, num_threads).num_threads.get() == 1);
    for part in large {
        part.writing.write(part.source, part.cast, num_threads)?;
    }
    let nbytes: usize = small.iter().map(|part| part.source.nbytes()).sum();
    let mean_nbytes = NonZeroUsize::new(nbytes / small.len().max(1)).unwrap_or(NonZeroUsize::MIN);
    Plan::new(small.len(), mean_nbytes, num_threads).run(
        || (),
        |(), range| {
            small[range].iter().try_for_each(|part| part.writing.write(part.source, part.cast, NonZeroUsize::MIN))
        },
    )
}
