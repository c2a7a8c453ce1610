//! Reading open items into host memory.

use std::num::NonZeroUsize;
use std::ops::Deref;
use std::sync::Arc;

use super::{Body, Entry, Interrupted, Request, no_such};
use crate::memory::Target;
use crate::streaming::{self, Store};
use crate::workers::Plan;
use crate::{Error, Result};

/// How far one copy follows a sender that is still writing.
const FOLLOW_BYTES: u64 = 4 << 20;

/// `nbytes` of open item `source` from `source_start` go to `dest_start` of base `base`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the open item.
    pub source: usize,
    /// Index of the base.
    pub base: usize,
    /// First byte of the item.
    pub source_start: u64,
    /// First byte in the base.
    pub dest_start: u64,
    /// Bytes.
    pub nbytes: u64,
}

/// Extents of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extents(pub Vec<Extent>);

impl Deref for Extents {
    type Target = [Extent];

    fn deref(&self) -> &[Extent] {
        &self.0
    }
}

impl Extent {
    /// Its item, which has its bytes, and the address that they go to.
    pub(super) fn place<'a>(&self, entries: &'a [Arc<Entry>], addresses: &[u64]) -> Result<(&'a Arc<Entry>, u64)> {
        let entry = self.entry(entries)?;
        let base = addresses.get(self.base).ok_or_else(|| self.no_base(addresses.len()))?;
        let dest = base.checked_add(self.dest_start).filter(|dest| dest.checked_add(self.nbytes).is_some());
        Ok((entry, dest.ok_or_else(|| self.out_of_range("base", self.base, self.dest_start, u64::MAX - base))?))
    }

    fn entry<'a>(&self, entries: &'a [Arc<Entry>]) -> Result<&'a Arc<Entry>> {
        let entry = entries.get(self.source).ok_or_else(|| no_such(self.source, entries.len()))?;
        match self.source_start.checked_add(self.nbytes) {
            Some(end) if end <= entry.nbytes => Ok(entry),
            _ => Err(self.out_of_range("item", self.source, self.source_start, entry.nbytes)),
        }
    }

    fn target<'a>(&self, bases: &[Target<'a>]) -> Result<Target<'a>> {
        let base = bases.get(self.base).ok_or_else(|| self.no_base(bases.len()))?;
        let nbytes = base.nbytes() as u64;
        match self.dest_start.checked_add(self.nbytes) {
            // No loss: both are below the bytes of the base, which is a usize.
            Some(end) if end <= nbytes => Ok(base.slice(self.dest_start as usize..end as usize)),
            _ => Err(self.out_of_range("base", self.base, self.dest_start, nbytes)),
        }
    }

    fn no_base(&self, count: usize) -> Error {
        Error::NoSuch { piece: self.source, chunk: 0, kind: "base", index: self.base as u64, count }
    }

    fn out_of_range(&self, kind: &'static str, index: usize, start: u64, nbytes: u64) -> Error {
        let (piece, index, wanted_nbytes) = (self.source, index as u64, self.nbytes);
        Error::PieceRange { piece, chunk: 0, kind, index, start, wanted_nbytes, nbytes }
    }
}

/// A part of an item that goes to one place.
struct Part<'a> {
    entry: &'a Entry,
    start: u64,
    target: Target<'a>,
}

impl Part<'_> {
    fn is_written(&self) -> Result<bool> {
        let Some((map, claim)) = self.entry.lease() else { return Ok(true) };
        Ok(map.written(claim)? >= self.start + self.target.nbytes() as u64)
    }

    fn sub(&self, from: usize, to: usize) -> Self {
        Self { entry: self.entry, start: self.start + from as u64, target: self.target.slice(from..to) }
    }

    fn copy(&self, store: Store) -> Result<()> {
        // No loss: checked against the bytes of the item, which are inside a mapping or a buffer.
        let range = self.start as usize..self.start as usize + self.target.nbytes();
        match &self.entry.body {
            Body::Inline { bytes, .. } => streaming::copy(bytes.slice(range), self.target, store),
            Body::Lease { map, claim, .. } => streaming::copy(map.source(claim).slice(range), self.target, store),
            Body::Segment { segment, offset } => {
                segment.read_into(self.target, offset + self.start, NonZeroUsize::MIN)?;
            }
        }
        Ok(())
    }
}

impl Request {
    /// Puts these extents into host memory, by several threads, and blocks until they are there. Senders that are still
    /// writing are followed, each up to the last byte that is wanted, and waited for until the request's limit.
    pub fn read(
        &self,
        extents: &Extents,
        bases: &[Target<'_>],
        num_threads: NonZeroUsize,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let entries = self.entries();
        let (mut whole, mut growing) = (Vec::with_capacity(extents.len()), Vec::new());
        for extent in extents.iter() {
            let part =
                Part { entry: extent.entry(&entries)?, start: extent.source_start, target: extent.target(bases)? };
            if part.is_written()? { whole.push(part) } else { growing.push(part) }
        }
        copy_all(&whole, num_threads)?;
        for part in growing {
            let (mut done, nbytes) = (0, part.target.nbytes());
            while done < nbytes {
                // No loss: at most the bytes of the target.
                let wanted = part.start + (done as u64 + FOLLOW_BYTES).min(nbytes as u64);
                let there = part.entry.wait_written(wanted, self.deadline, interrupted)? - part.start;
                let there = there.min(nbytes as u64) as usize;
                copy_all(&[part.sub(done, there)], num_threads)?;
                done = there;
            }
        }
        Ok(())
    }
}

fn copy_all(parts: &[Part<'_>], num_threads: NonZeroUsize) -> Result<()> {
    let total = parts.iter().map(|part| part.target.nbytes()).sum();
    let plan = Plan::new(total, NonZeroUsize::MIN, num_threads);
    if plan.num_threads.get() == 1 {
        return parts.iter().try_for_each(|part| part.copy(Store::Cached));
    }
    let step = plan.step.get();
    let steps: Vec<(usize, usize)> = parts
        .iter()
        .enumerate()
        .flat_map(|(index, part)| (0..part.target.nbytes()).step_by(step).map(move |from| (index, from)))
        .collect();
    let store = Store::best_for(plan.num_threads.get());
    Plan { total: steps.len(), step: NonZeroUsize::MIN, ..plan }.run(|range| {
        steps[range].iter().try_for_each(|&(index, from)| {
            let part = &parts[index];
            part.sub(from, (from + step).min(part.target.nbytes())).copy(store)
        })
    })
}
