//! Writing the leases of one request together.

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::ops::Range;

use super::pass::{Pass, STEP_BYTES};
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

/// Fills all of these leases and then commits them, as one job: a step is a part of a large lease or several small ones.
/// Blocks until all is written. On an error those that are not committed are given up; a lease that somebody else ended
/// meanwhile is the only one that cannot be committed.
pub fn write_all(parts: &[Part<'_>], num_threads: NonZeroUsize) -> Result<()> {
    let outcome = fill(parts, num_threads).and_then(|()| parts.iter().try_for_each(|part| part.writing.commit()));
    if outcome.is_err() {
        parts.iter().for_each(|part| part.writing.abort());
    }
    outcome
}

fn fill(parts: &[Part<'_>], num_threads: NonZeroUsize) -> Result<()> {
    let nbytes = parts.iter().map(|part| part.source.nbytes().max(part.writing.nbytes())).sum();
    let plan = Plan::new(nbytes, NonZeroUsize::MIN, num_threads);
    let passes = parts.iter().map(|part| Pass::begin(part.writing, part.source, part.cast, num_threads));
    let passes = passes.collect::<Result<Vec<_>>>()?;
    let steps: Vec<_> = passes.iter().flat_map(|pass| (0..pass.num_steps()).map(move |step| (pass, step))).collect();
    let bundles = bundles(steps.iter().map(|(pass, step)| pass.step_nbytes(*step)), plan.step.get().min(STEP_BYTES));
    let job = Plan { total: bundles.len(), step: NonZeroUsize::MIN, num_threads: plan.num_threads };
    let done: std::result::Result<(), Infallible> = job.run(|range| {
        bundles[range].iter().flat_map(|bundle| &steps[bundle.clone()]).for_each(|(pass, step)| pass.step(*step));
        Ok(())
    });
    done.unwrap_or_else(|never| match never {});
    Ok(())
}

/// Neighbours of these sizes together, up to so many bytes; one that is larger alone.
fn bundles(sizes: impl Iterator<Item = usize>, most_nbytes: usize) -> Vec<Range<usize>> {
    let mut bundles: Vec<Range<usize>> = Vec::new();
    let mut nbytes = 0;
    for (at, size) in sizes.enumerate() {
        match bundles.last_mut() {
            Some(bundle) if nbytes + size <= most_nbytes => bundle.end = at + 1,
            _ => {
                bundles.push(at..at + 1);
                nbytes = 0;
            }
        }
        nbytes += size;
    }
    bundles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_ones_go_together_and_none_is_left_out() {
        let ends = |sizes: &[usize]| {
            let found = bundles(sizes.iter().copied(), 100);
            assert!(found.windows(2).all(|pair| pair[0].end == pair[1].start));
            found.iter().map(|bundle| bundle.end).collect::<Vec<_>>()
        };
        assert!(ends(&[]).is_empty());
        assert_eq!(ends(&[0, 0, 100]), [3]);
        assert_eq!(ends(&[50, 50, 1]), [2, 3]);
        assert_eq!(ends(&[101, 101]), [1, 2]);
        assert_eq!(ends(&[30, 200, 30, 30, 30, 30]), [1, 2, 5, 6]);
    }
}
