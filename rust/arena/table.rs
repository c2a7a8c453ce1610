//! The sender's own books: which lease is whose. Nothing in here is shared, and nothing is read from shared memory.

use std::time::Instant;

use super::blocks::{Block, Blocks};
use super::record::{Entry, is_usable};

/// Most consumers of an arena at once; a bit each.
pub const MAX_CONSUMERS: usize = 16;

/// How many times of what would be left one consumer may hold and get more, while there are others.
const SHARE: u64 = 2;

/// A lease that is out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lease {
    pub(super) entry: Entry,
    /// Consumers that have not let go yet.
    pub(super) remaining: u32,
    /// Those of them whose `held_nbytes` it is counted in.
    counted: u32,
    /// Our side still writes to it, or could.
    pub(super) is_writing: bool,
    /// All of it was declared to be in place.
    pub(super) is_committed: bool,
    /// It was taken back; consumers that have claimed it may still read.
    pub(super) is_cancelled: bool,
    /// When it was committed.
    pub(super) since: Instant,
    group: usize,
}

impl Lease {
    /// Whether its writer is not done with it: then it is not taken back, but given up by the writer.
    pub(super) const fn is_unfinished(&self) -> bool {
        self.is_writing && !self.is_committed
    }
}

/// Leases that lie side by side in one block.
#[derive(Debug)]
struct Group {
    block: Block,
    num_leases: usize,
}

/// All leases and blocks.
#[derive(Debug)]
pub(super) struct Table {
    data_nbytes: u64,
    blocks: Blocks,
    leases: Vec<Option<Lease>>,
    free: Vec<u32>,
    groups: Vec<Option<Group>>,
    free_groups: Vec<usize>,
    outstanding: Vec<u32>,
    /// Bytes of the blocks that each consumer has not let go of, as of the last sweep.
    held_nbytes: [u64; MAX_CONSUMERS],
    last_generation: u64,
}

impl Table {
    pub(super) fn new(data_nbytes: usize, num_leases: u32) -> Self {
        Self {
            data_nbytes: data_nbytes as u64,
            blocks: Blocks::new(data_nbytes, num_leases),
            leases: vec![None; num_leases as usize],
            // The lowest is taken first, so that few pages of records are in use.
            free: (0..num_leases).rev().collect(),
            groups: Vec::new(),
            free_groups: Vec::new(),
            outstanding: Vec::new(),
            held_nbytes: [0; MAX_CONSUMERS],
            last_generation: 0,
        }
    }

    /// Bytes of the block that these leases need; None when that cannot be counted.
    pub(super) fn group_nbytes(sizes: &[usize]) -> Option<usize> {
        sizes.iter().try_fold(0_usize, |sum, nbytes| sum.checked_add(Blocks::block_nbytes(*nbytes)?))
    }

    /// Takes leases of these sizes, side by side in their order, for these consumers; all or none. `is_fresh` says
    /// whether no consumer's flags for this record already name this generation.
    pub(super) fn take(
        &mut self,
        sizes: &[usize],
        consumers: u32,
        is_fresh: impl Fn(u32, u64) -> bool,
    ) -> Option<Vec<u32>> {
        let group_nbytes = Self::group_nbytes(sizes)?;
        if sizes.is_empty() || self.free.len() < sizes.len() {
            return None;
        }
        let block = self.blocks.take(group_nbytes)?;
        let group = self.free_groups.pop().unwrap_or_else(|| {
            self.groups.push(None);
            self.groups.len() - 1
        });
        self.groups[group] = Some(Group { block, num_leases: sizes.len() });
        let mut offset = block.offset();
        let mut taken = Vec::with_capacity(sizes.len());
        let now = Instant::now();
        for nbytes in sizes {
            // Both were counted above.
            let (Some(index), Some(block_nbytes)) = (self.free.pop(), Blocks::block_nbytes(*nbytes)) else { break };
            let generation = self.next_generation(|generation| is_fresh(index, generation));
            let entry = Entry { generation, offset: offset as u64, nbytes: *nbytes as u64, consumers };
            let lease = Lease {
                entry,
                remaining: consumers,
                counted: consumers,
                is_writing: true,
                is_committed: false,
                is_cancelled: false,
                since: now,
                group,
            };
            count(&mut self.held_nbytes, consumers, |held| held + block_nbytes as u64);
            self.leases[index as usize] = Some(lease);
            self.outstanding.push(index);
            taken.push(index);
            offset += block_nbytes;
        }
        Some(taken)
    }

    /// One of `consumers` that holds more than its share for getting this many bytes more, and how many it holds.
    ///
    /// What one holds already may be twice of what would be left, so that one that lets go of nothing cannot take the
    /// last room from the others: of small leases it gets two thirds of the data, and each of two such gets two fifths.
    /// Who holds nothing gets what is there.
    pub(super) fn over_share(&self, nbytes: u64, consumers: u32) -> Option<(usize, u64)> {
        let left = self.free_nbytes().saturating_sub(nbytes);
        let mut held = self.held_nbytes.iter().copied().enumerate();
        held.find(|(slot, held)| consumers & (1 << slot) != 0 && *held > SHARE * left)
    }

    /// Bytes that are not in use.
    fn free_nbytes(&self) -> u64 {
        self.data_nbytes - self.used_nbytes()
    }

    /// What the lease's record says.
    pub(super) fn entry(&self, index: u32) -> Option<Entry> {
        Some(self.leases.get(index as usize)?.as_ref()?.entry)
    }

    /// The lease, while it is this generation's.
    pub(super) fn get_mut(&mut self, index: u32, generation: u64) -> Option<&mut Lease> {
        let lease = self.leases.get_mut(index as usize)?.as_mut()?;
        (lease.entry.generation == generation).then_some(lease)
    }

    /// Shows every lease that is out to `visit`, which may change it, and frees those that are no longer needed. The
    /// indices of the freed ones.
    pub(super) fn sweep(&mut self, mut visit: impl FnMut(u32, &mut Lease)) -> Vec<u32> {
        let mut freed = Vec::new();
        let mut at = 0;
        while at < self.outstanding.len() {
            let index = self.outstanding[at];
            let Some(lease) = self.leases[index as usize].as_mut() else {
                self.outstanding.swap_remove(at);
                continue;
            };
            visit(index, lease);
            let block_nbytes = Blocks::block_nbytes(lease.entry.nbytes as usize).unwrap_or(0) as u64;
            count(&mut self.held_nbytes, lease.counted & !lease.remaining, |held| held - block_nbytes);
            lease.counted = lease.remaining;
            if lease.is_writing || lease.remaining != 0 {
                at += 1;
                continue;
            }
            let group = lease.group;
            self.leases[index as usize] = None;
            self.outstanding.swap_remove(at);
            self.free.push(index);
            self.leave_group(group);
            freed.push(index);
        }
        freed
    }

    /// Leases that are out.
    pub(super) fn num_outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Lease records that are free.
    pub(super) fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Bytes in use.
    pub(super) fn used_nbytes(&self) -> u64 {
        self.blocks.used_nbytes()
    }

    /// Bytes that one group finds for certain.
    pub(super) fn largest_nbytes(&self) -> u64 {
        self.blocks.largest_nbytes()
    }

    /// Leases that each consumer has not let go of.
    pub(super) fn held(&self) -> [usize; MAX_CONSUMERS] {
        let mut held = [0; MAX_CONSUMERS];
        for lease in self.outstanding.iter().filter_map(|index| self.leases[*index as usize]) {
            for (slot, count) in held.iter_mut().enumerate() {
                *count += usize::from(lease.remaining & (1 << slot) != 0);
            }
        }
        held
    }

    fn leave_group(&mut self, index: usize) {
        if let Some(group) = self.groups[index].as_mut() {
            group.num_leases -= 1;
            if group.num_leases == 0
                && let Some(group) = self.groups[index].take()
            {
                self.blocks.give(group.block);
                self.free_groups.push(index);
            }
        }
    }

    fn next_generation(&mut self, is_fresh: impl Fn(u64) -> bool) -> u64 {
        loop {
            self.last_generation += 1;
            if is_usable(self.last_generation) && is_fresh(self.last_generation) {
                return self.last_generation;
            }
        }
    }
}

fn count(held_nbytes: &mut [u64; MAX_CONSUMERS], consumers: u32, change: impl Fn(u64) -> u64) {
    for (slot, held) in held_nbytes.iter_mut().enumerate() {
        if consumers & (1 << slot) != 0 {
            *held = change(*held);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fresh(_: u32, _: u64) -> bool {
        true
    }

    #[test]
    fn a_group_lies_side_by_side_and_comes_back_as_one() {
        let mut table = Table::new(1 << 20, 16);
        let taken = table.take(&[100, 0, 257, 256], 0b11, fresh).unwrap();
        let entries: Vec<_> = taken
            .iter()
            .map(|index| table.leases[*index as usize].unwrap().entry)
            .map(|e| (e.offset, e.nbytes))
            .collect();
        assert_eq!(entries, [(0, 100), (256, 0), (512, 257), (1024, 256)]);
        assert_eq!((table.used_nbytes(), table.num_outstanding()), (1280, 4));
        for last in [false, true] {
            let freed = table.sweep(|index, lease| {
                if last || index != taken[2] {
                    (lease.is_writing, lease.remaining) = (false, 0);
                }
            });
            assert_eq!(freed.len(), if last { 1 } else { 3 });
            assert_eq!(table.used_nbytes(), if last { 0 } else { 1280 });
        }
        assert_eq!((table.num_free(), table.num_outstanding()), (16, 0));
    }

    #[test]
    fn all_or_none() {
        let mut table = Table::new(1 << 20, 3);
        assert!(table.take(&[1; 4], 1, fresh).is_none());
        assert!(table.take(&[], 1, fresh).is_none());
        assert!(table.take(&[1 << 20, 1], 1, fresh).is_none());
        assert!(table.take(&[usize::MAX, usize::MAX], 1, fresh).is_none());
        assert_eq!((table.used_nbytes(), table.num_free()), (0, 3));
    }

    #[test]
    fn one_that_lets_go_of_nothing_leaves_room_for_the_others() {
        let mut table = Table::new(1 << 20, 1024);
        let fill = |table: &mut Table, consumers: u32| {
            let mut num_taken = 0;
            while table.over_share(4096, consumers).is_none() && table.take(&[4096], consumers, fresh).is_some() {
                num_taken += 1;
            }
            num_taken
        };
        assert_eq!(fill(&mut table, 0b01), 171); // of 256
        assert_eq!(table.over_share(4096, 0b11), Some((0, 171 * 4096)));
        assert_eq!(fill(&mut table, 0b10), 57); // of 85
        assert_eq!(table.over_share(28 * 4096, 0b100), None); // who holds nothing gets the rest
        // Cancelled or released: it is counted no more, and the last one's turn again.
        table.sweep(|_, lease| (lease.is_writing, lease.remaining) = (false, lease.remaining & !0b01));
        assert_eq!(table.held_nbytes[..3], [0, 57 * 4096, 0]);
        assert_eq!(table.over_share(150 * 4096, 0b11), None);
        table.sweep(|_, lease| lease.remaining = 0);
        assert_eq!((table.held_nbytes, table.used_nbytes()), ([0; MAX_CONSUMERS], 0));
    }

    #[test]
    fn generations_rise_and_pass_over_marks_that_are_there() {
        let mut table = Table::new(1 << 20, 3);
        table.last_generation = (1 << 32) - 2;
        let mut generation_of = |is_fresh: &dyn Fn(u32, u64) -> bool| {
            let index = table.take(&[1], 1, is_fresh).unwrap()[0];
            table.leases[index as usize].unwrap().entry.generation
        };
        assert_eq!(generation_of(&fresh), (1 << 32) - 1);
        assert_eq!(generation_of(&fresh), (1 << 32) + 1, "one whose flag is that of fresh memory");
        assert_eq!(generation_of(&|_, generation| generation > (1 << 32) + 5), (1 << 32) + 6);
    }

    #[test]
    fn an_old_generation_is_not_found() {
        let mut table = Table::new(1 << 20, 1);
        for round in 1..4_u64 {
            let index = table.take(&[1], 1, fresh).unwrap()[0];
            assert!(table.get_mut(index, round).is_some());
            assert!(table.get_mut(index, round - 1).is_none());
            assert!(table.get_mut(index + 1, round).is_none());
            table.sweep(|_, lease| (lease.is_writing, lease.remaining) = (false, 0));
            assert!(table.get_mut(index, round).is_none());
        }
    }

    proptest! {
        #[test]
        fn the_books_add_up(
            steps in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(0_usize..20_000, 1..5).prop_map(Ok),
                    any::<u32>().prop_map(Err),
                ],
                1..150,
            )
        ) {
            let mut table = Table::new(256 << 10, 40);
            let mut model: Vec<(u32, u64, u64, u64)> = Vec::new(); // index, generation, offset, nbytes
            for step in steps {
                match step {
                    Ok(sizes) => if let Some(taken) = table.take(&sizes, 0b1, fresh) {
                        prop_assert_eq!(taken.len(), sizes.len());
                        for index in taken {
                            let entry = table.leases[index as usize].unwrap().entry;
                            let end = entry.offset + entry.nbytes;
                            prop_assert!(entry.offset.is_multiple_of(256) && end <= 256 << 10);
                            for (other, generation, offset, nbytes) in &model {
                                prop_assert!(*other != index && *generation < entry.generation);
                                prop_assert!(end <= *offset || offset + nbytes <= entry.offset);
                            }
                            model.push((index, entry.generation, entry.offset, entry.nbytes));
                        }
                    },
                    Err(chosen) => {
                        let freed = table.sweep(|index, lease| {
                            lease.is_writing = false;
                            if chosen >> (index % 32) & 1 == 1 {
                                lease.remaining = 0;
                            }
                        });
                        model.retain(|(index, ..)| !freed.contains(index));
                        prop_assert!(model.iter().all(|(index, ..)| chosen >> (index % 32) & 1 == 0));
                    }
                }
                prop_assert_eq!(table.num_outstanding(), model.len());
                prop_assert_eq!(table.num_outstanding() + table.num_free(), 40);
                prop_assert!(table.held_nbytes[0] <= table.used_nbytes());
                prop_assert_eq!(table.held()[0], table.outstanding.iter()
                    .filter(|index| table.leases[**index as usize].unwrap().remaining != 0).count());
            }
            table.sweep(|_, lease| (lease.is_writing, lease.remaining) = (false, 0));
            prop_assert_eq!((table.used_nbytes(), table.largest_nbytes()), (0, 256 << 10));
        }
    }
}
