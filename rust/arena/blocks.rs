//! Which parts of the data are free. Known to the sender alone.

use offset_allocator::{Allocation, Allocator};

/// Every block is a whole number of these, and so are offsets: what a GPU reads best, and more than any dtype needs.
pub(super) const UNIT_BYTES: usize = 256;
/// Most units that the allocator counts.
const MOST_UNITS: u32 = 1 << 30;
/// Most bytes of an arena's data.
pub(super) const MOST_DATA_BYTES: u64 = MOST_UNITS as u64 * UNIT_BYTES as u64;

/// A block that is in use.
#[derive(Clone, Copy)]
pub(super) struct Block {
    allocation: Allocation,
    num_units: u32,
}

/// Free and used blocks of an arena. Sizes are grouped into classes an eighth of a power of two apart, and a block is
/// taken from the next class, in constant time: a request can miss a free block that is less than an eighth larger.
pub(super) struct Blocks {
    allocator: Allocator,
    total_units: u32,
    used_units: u32,
}

impl Blocks {
    /// For this many bytes, in at most `num_blocks` blocks at once.
    pub(super) fn new(data_nbytes: usize, num_blocks: u32) -> Self {
        // No loss: arenas have at most MOST_DATA_BYTES.
        let total_units = (data_nbytes / UNIT_BYTES) as u32;
        // Between any two blocks there can be a free one.
        let allocator = Allocator::with_max_allocs(total_units, 2 * num_blocks + 16);
        Self { allocator, total_units, used_units: 0 }
    }

    /// Bytes of a block for so many.
    pub(super) const fn block_nbytes(nbytes: usize) -> Option<usize> {
        if nbytes == 0 { Some(UNIT_BYTES) } else { nbytes.checked_next_multiple_of(UNIT_BYTES) }
    }

    /// A block of this many bytes, which [`Blocks::block_nbytes`] gave.
    pub(super) fn take(&mut self, nbytes: usize) -> Option<Block> {
        let num_units = u32::try_from(nbytes / UNIT_BYTES).ok().filter(|units| *units <= self.total_units)?;
        let allocation = self.allocator.allocate(num_units)?;
        self.used_units += num_units;
        Some(Block { allocation, num_units })
    }

    /// Gives a block back.
    pub(super) fn give(&mut self, block: Block) {
        self.used_units -= block.num_units;
        self.allocator.free(block.allocation);
    }

    /// Bytes in use.
    pub(super) const fn used_nbytes(&self) -> u64 {
        self.used_units as u64 * UNIT_BYTES as u64
    }

    /// Bytes that one [`Blocks::take`] finds for certain.
    pub(super) fn largest_nbytes(&self) -> u64 {
        u64::from(self.allocator.storage_report().largest_free_region) * UNIT_BYTES as u64
    }
}

impl Block {
    /// First byte.
    pub(super) const fn offset(&self) -> usize {
        self.allocation.offset as usize * UNIT_BYTES
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Block({} units at {})", self.num_units, self.allocation.offset)
    }
}

impl std::fmt::Debug for Blocks {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Blocks({} of {} units used)", self.used_units, self.total_units)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_empty_arena_gives_all_of_itself() {
        for nbytes in [1 << 20, 1 << 30, 768 << 20] {
            let mut blocks = Blocks::new(nbytes, 100);
            assert_eq!(blocks.largest_nbytes(), nbytes as u64);
            let block = blocks.take(nbytes).unwrap();
            assert!(blocks.take(UNIT_BYTES).is_none());
            blocks.give(block);
            assert_eq!((blocks.used_nbytes(), blocks.largest_nbytes()), (0, nbytes as u64));
        }
    }

    #[test]
    fn many_small_blocks_are_as_many_as_fit() {
        let mut blocks = Blocks::new(1 << 20, 4096);
        let taken: Vec<_> = std::iter::from_fn(|| blocks.take(UNIT_BYTES)).collect();
        assert_eq!(taken.len(), 4096);
        for block in taken.into_iter().step_by(2) {
            blocks.give(block);
        }
        assert_eq!(blocks.used_nbytes(), 1 << 19);
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_all_come_back(
            steps in prop::collection::vec((any::<bool>(), 1_usize..200_000, any::<prop::sample::Index>()), 1..200)
        ) {
            const NBYTES: usize = 1 << 20;
            let mut blocks = Blocks::new(NBYTES, 256);
            let mut held: Vec<(Block, usize)> = Vec::new();
            for (is_taking, nbytes, which) in steps {
                if is_taking {
                    let nbytes = Blocks::block_nbytes(nbytes).unwrap();
                    let is_sure = blocks.largest_nbytes() >= nbytes as u64;
                    match blocks.take(nbytes) {
                        Some(block) => {
                            let range = block.offset()..block.offset() + nbytes;
                            prop_assert!(range.end <= NBYTES);
                            for (other, other_nbytes) in &held {
                                prop_assert!(range.end <= other.offset() || other.offset() + other_nbytes <= range.start);
                            }
                            held.push((block, nbytes));
                        }
                        None => prop_assert!(!is_sure),
                    }
                } else if !held.is_empty() {
                    let (block, _) = held.swap_remove(which.index(held.len()));
                    blocks.give(block);
                }
                let used: usize = held.iter().map(|(_, nbytes)| nbytes).sum();
                prop_assert_eq!(blocks.used_nbytes(), used as u64);
            }
            for (block, _) in held {
                blocks.give(block);
            }
            prop_assert_eq!(blocks.largest_nbytes(), NBYTES as u64);
        }
    }
}
