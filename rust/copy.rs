//! Copying memory to memory by several threads.

use std::convert::Infallible;
use std::num::NonZeroUsize;

use crate::memory::{Source, Target};
use crate::workers::Plan;
use crate::{Error, Result};

/// Copies `source` to `target`, which has the same length. Blocks until all bytes are there. When the two overlap, the
/// calling thread does it alone, as `memmove` would.
pub fn copy(source: Source<'_>, target: Target<'_>, num_threads: NonZeroUsize) -> Result<()> {
    let nbytes = source.nbytes();
    if nbytes != target.nbytes() {
        return Err(Error::Lengths { src_nbytes: nbytes, dst_nbytes: target.nbytes(), wanted_nbytes: nbytes });
    }
    if source.overlaps(target) {
        source.copy_to(target);
        return Ok(());
    }
    let plan = Plan::new(nbytes, NonZeroUsize::MIN, num_threads);
    let done: std::result::Result<(), Infallible> = plan.run(|range| {
        source.slice(range.clone()).copy_to(target.slice(range));
        Ok(())
    });
    done.unwrap_or_else(|never| match never {});
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn threads(number: usize) -> NonZeroUsize {
        NonZeroUsize::new(number).unwrap()
    }

    fn pattern(nbytes: usize) -> Vec<u8> {
        (0..nbytes).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
    }

    #[test]
    fn every_edge_size_arrives_whole_and_nothing_beside_it_changes() {
        const MIB: usize = 1 << 20;
        for nbytes in [0, 1, 2, 4095, 4096, 4097, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1, 3 * MIB + 5] {
            for (num_threads, at) in [(1, 0), (2, 1), (5, 3)] {
                let source = pattern(nbytes);
                let mut around = vec![0xee; nbytes + 8];
                let target = Target::from_slice(&mut around).slice(at..at + nbytes);
                copy(Source::from_slice(&source), target, threads(num_threads)).unwrap();
                assert_eq!(&around[at..at + nbytes], source, "{nbytes} bytes by {num_threads}");
                assert!(around[..at].iter().chain(&around[at + nbytes..]).all(|byte| *byte == 0xee));
            }
        }
    }

    #[test]
    fn unequal_lengths_are_refused_with_both() {
        let mut target = [7; 3];
        let error = copy(Source::from_slice(&[1, 2]), Target::from_slice(&mut target), threads(1)).unwrap_err();
        assert_eq!(error, Error::Lengths { src_nbytes: 2, dst_nbytes: 3, wanted_nbytes: 2 });
        assert_eq!(target, [7; 3]);
    }

    #[test]
    #[allow(unsafe_code)]
    fn an_overlap_is_copied_as_if_through_a_second_buffer() {
        const NBYTES: usize = 3 << 20;
        for (from, to) in [(0, 4097), (4097, 0), (0, 0)] {
            let mut bytes = pattern(NBYTES + 4097);
            let wanted = bytes[from..from + NBYTES].to_vec();
            let all = Target::from_slice(&mut bytes);
            // SAFETY: the same bytes, of which no reference is used while the views are.
            let source = unsafe { Source::from_raw(all.as_mut_ptr(), all.nbytes()) };
            copy(source.slice(from..from + NBYTES), all.slice(to..to + NBYTES), threads(4)).unwrap();
            assert!(bytes[to..to + NBYTES] == wanted, "from {from} to {to}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_at_any_alignment(bytes in prop::collection::vec(any::<u8>(), 0..9000), at in 0_usize..64) {
            let at = at.min(bytes.len());
            let mut target = vec![0; bytes.len() - at];
            copy(Source::from_slice(&bytes).slice(at..bytes.len()), Target::from_slice(&mut target), threads(3)).unwrap();
            prop_assert_eq!(&target, &bytes[at..]);
        }
    }
}
