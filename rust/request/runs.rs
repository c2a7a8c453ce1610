//! Copies out of arenas by a device that reads them in place.

use std::sync::Arc;

use super::read::{Extent, Extents};
use super::{Interrupted, Request, not_a_lease};
use crate::{Error, Result};

/// `nbytes` from `source` to `dest`, both addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where to.
    pub dest: u64,
    /// Where from, in this process.
    pub source: u64,
    /// Bytes.
    pub nbytes: u64,
}

/// A part of a lease that is still being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growing {
    /// Index of the open item.
    pub item: usize,
    /// First byte that is wanted.
    pub start: u64,
    /// Bytes that are wanted.
    pub nbytes: u64,
    /// Address that they go to.
    pub dest: u64,
}

impl Request {
    /// The copies of what is written, and the parts that are to be followed. From here on these leases are kept, until
    /// [`Request::flags_written`] or [`Request::keep`].
    ///
    /// Copies that follow each other on both sides, with the same gap of at most `max_gap_bytes`, are one; the gap is
    /// copied, too. None reads from two parts of `part_bytes` of the address space.
    pub fn runs(
        &self,
        extents: &Extents,
        addresses: &[u64],
        max_gap_bytes: u64,
        part_bytes: u64,
    ) -> Result<(Vec<Run>, Vec<Growing>)> {
        let mut state = self.lock();
        let state = &mut *state;
        let mut merging = Merging::new(max_gap_bytes, part_bytes);
        let mut growing = Vec::new();
        let mut reading = Vec::with_capacity(extents.len());
        for extent in extents.iter() {
            let (entry, dest) = extent.place(&state.entries, addresses)?;
            let (map, claim) = entry.lease().ok_or_else(|| not_a_lease(extent.source))?;
            let Extent { source, source_start: start, nbytes, .. } = *extent;
            if map.written(claim)? >= start + nbytes {
                merging.add(Run { dest, source: map.source(claim).as_ptr().addr() as u64 + start, nbytes });
                reading.push(entry);
            } else {
                growing.push(Growing { item: source, start, nbytes, dest });
            }
        }
        for entry in reading {
            if entry.keep() {
                state.begun.push(Arc::clone(entry));
            }
        }
        Ok((merging.end(), growing))
    }

    /// Blocks until the sender has written `least` bytes of an open lease from `start` on; how many can be copied, `most`
    /// at most, and the copies to `dest` on. From here on the lease is kept.
    pub fn follow(
        &self,
        part: Growing,
        least: u64,
        part_bytes: u64,
        interrupted: Interrupted<'_>,
    ) -> Result<(u64, Vec<Run>)> {
        let Growing { item, start, nbytes: most, dest } = part;
        let entry = self.entry(item)?;
        let (map, claim) = entry.lease().ok_or_else(|| not_a_lease(item))?;
        let end = start.checked_add(most).filter(|end| *end <= entry.nbytes);
        let end = end.ok_or(Error::PieceRange {
            piece: item,
            chunk: 0,
            kind: "item",
            index: item as u64,
            start,
            wanted_nbytes: most,
            nbytes: entry.nbytes,
        })?;
        if entry.keep() {
            self.lock().begun.push(Arc::clone(&entry));
        }
        let there = entry.wait_written(start + least.min(most), self.deadline, interrupted)?.min(end) - start;
        let mut merging = Merging::new(0, part_bytes);
        merging.add(Run { dest, source: map.source(claim).as_ptr().addr() as u64 + start, nbytes: there });
        Ok((there, merging.end()))
    }
}

/// Runs, merged and cut while they come.
struct Merging {
    max_gap_bytes: u64,
    part_bytes: u64,
    last: Option<Run>,
    runs: Vec<Run>,
}

impl Merging {
    fn new(max_gap_bytes: u64, part_bytes: u64) -> Self {
        Self { max_gap_bytes, part_bytes: part_bytes.max(1), last: None, runs: Vec::new() }
    }

    fn add(&mut self, next: Run) {
        if let Some(last) = &mut self.last {
            let gap = next.source.checked_sub(last.source + last.nbytes);
            if let Some(gap) = gap
                && gap <= self.max_gap_bytes
                && next.dest.checked_sub(last.dest + last.nbytes) == Some(gap)
            {
                last.nbytes += gap + next.nbytes;
                return;
            }
        }
        self.cut();
        self.last = Some(next);
    }

    /// Ends the last run, in parts.
    fn cut(&mut self) {
        let Some(Run { mut dest, mut source, mut nbytes }) = self.last.take() else { return };
        while nbytes > 0 {
            let step = nbytes.min(self.part_bytes - source % self.part_bytes);
            self.runs.push(Run { dest, source, nbytes: step });
            (dest, source, nbytes) = (dest + step, source + step, nbytes - step);
        }
    }

    fn end(mut self) -> Vec<Run> {
        self.cut();
        self.runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn merged(runs: &[(u64, u64, u64)], max_gap_bytes: u64, part_bytes: u64) -> Vec<(u64, u64, u64)> {
        let mut merging = Merging::new(max_gap_bytes, part_bytes);
        runs.iter().for_each(|&(dest, source, nbytes)| merging.add(Run { dest, source, nbytes }));
        merging.end().iter().map(|run| (run.dest, run.source, run.nbytes)).collect()
    }

    #[test]
    fn neighbours_with_the_same_small_gap_are_one_copy() {
        let runs = [(0, 1000, 100), (256, 1256, 10), (266, 1266, 4), (600, 1700, 5), (605, 1705, 5)];
        assert_eq!(merged(&runs, 255, 1 << 30), [(0, 1000, 270), (600, 1700, 10)]);
        assert_eq!(merged(&runs, 0, 1 << 30), [(0, 1000, 100), (256, 1256, 14), (600, 1700, 10)]);
        assert_eq!(merged(&[(600, 1700, 5), (0, 1000, 100)], 255, 1 << 30), [(600, 1700, 5), (0, 1000, 100)]);
        assert_eq!(merged(&[], 255, 1 << 30), []);
        assert_eq!(merged(&[(5, 7, 0)], 255, 1 << 30), []);
    }

    #[test]
    fn no_copy_reads_from_two_parts() {
        assert_eq!(merged(&[(5, 60, 20)], 0, 20), [(5, 60, 20)]);
        assert_eq!(merged(&[(5, 59, 42)], 0, 20), [(5, 59, 1), (6, 60, 20), (26, 80, 20), (46, 100, 1)]);
        // Merged first, then cut where parts meet and nowhere else.
        assert_eq!(merged(&[(5, 70, 10), (15, 80, 5)], 0, 20), [(5, 70, 10), (15, 80, 5)]);
        assert_eq!(merged(&[(5, 70, 5), (10, 75, 10)], 0, 20), [(5, 70, 10), (15, 80, 5)]);
    }

    proptest! {
        #[test]
        fn every_byte_is_copied_once_and_from_one_part(
            runs in prop::collection::vec((0_u64..4, 1_u64..50), 0..20), part_bytes in 1_u64..60
        ) {
            let (mut at, mut given) = (7, Vec::new());
            for (gap, nbytes) in runs {
                at += gap;
                given.push((at + 1000, at, nbytes));
                at += nbytes;
            }
            let bytes = |runs: &[(u64, u64, u64)]| runs.iter().flat_map(|&(dest, source, nbytes)| (0..nbytes).map(move |n| (dest + n, source + n))).collect::<Vec<_>>();
            let found = merged(&given, 0, part_bytes);
            prop_assert_eq!(bytes(&found), bytes(&given));
            prop_assert!(found.iter().all(|&(_, source, nbytes)| source / part_bytes == (source + nbytes - 1) / part_bytes));
        }
    }
}
