//! Copying memory to memory with stores that go past the cache.
//!
//! A plain store first reads the target's line into the cache and later evicts it, which doubles the traffic to the
//! target and pushes out what others keep there. What is copied into a slot is read next by the device, not by this
//! core, and the ring of slots is bigger than the cache, so the way past wins as soon as memory and not the core is the
//! limit. For 64 MiB that was so from 4 threads on, and not for 1, on 16 Xeon cores (27 against 19 and 7.6 against 8.8
//! GB/s), and for 1 and 2 on 2 EPYC cores (16.2 against 9.4 and 26.3 against 15.5). What stays in the cache is copied
//! faster through it: 2 MiB over and over by 1 thread of the latter at 39 against 25.6 GB/s.
//!
//! Below [`STREAM_MIN_BYTES`], for fewer than [`STREAM_MIN_THREADS`] threads, for an overlap, and on every machine but
//! x86_64 the copy is `memmove`. A source that is read by `pread` is copied by the kernel, in its own way.
#![allow(unsafe_code)]

use crate::memory::{Source, Target};

/// Fewer bytes stay in the cache, from where a device reads them as well.
pub const STREAM_MIN_BYTES: usize = 256 << 10;
/// With fewer threads the core can be the limit, and `memmove` faster.
pub const STREAM_MIN_THREADS: usize = 2;

/// How bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// As `memmove` does.
    Cached,
    /// Past the cache, where the machine can.
    Streaming,
}

impl Store {
    /// What is faster for copies that this many threads do at once.
    pub const fn best_for(num_threads: usize) -> Self {
        if num_threads >= STREAM_MIN_THREADS { Self::Streaming } else { Self::Cached }
    }
}

/// Copies `source` to `target`, which has the same length, on the calling thread. The two may overlap. What was stored
/// is visible to a thread that synchronises with this one afterwards, whichever way it went.
///
/// # Panics
///
/// When the lengths differ.
pub fn copy(source: Source<'_>, target: Target<'_>, store: Store) {
    #[cfg(target_arch = "x86_64")]
    if store == Store::Streaming && source.nbytes() >= STREAM_MIN_BYTES && !source.overlaps(target) {
        assert_eq!(source.nbytes(), target.nbytes(), "source and target differ in length");
        x86_64::copy_past_cache(source, target);
        return;
    }
    source.copy_to(target);
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    use crate::memory::{Source, Target};

    const LINE_BYTES: usize = 64;

    /// Whole lines of the target are streamed, what is before and after them is copied plainly. SSE2, which every
    /// x86_64 has: a line's four stores are gathered before they leave the core, so wider ones have nothing to gain.
    pub(super) fn copy_past_cache(source: Source<'_>, target: Target<'_>) {
        let nbytes = source.nbytes();
        let head = target.as_mut_ptr().align_offset(LINE_BYTES).min(nbytes);
        let tail = head + (nbytes - head) / LINE_BYTES * LINE_BYTES;
        source.slice(0..head).copy_to(target.slice(0..head));
        stream_lines(source.slice(head..tail), target.slice(head..tail));
        source.slice(tail..nbytes).copy_to(target.slice(tail..nbytes));
    }

    fn stream_lines(source: Source<'_>, target: Target<'_>) {
        let mut from = source.as_ptr().cast::<__m128i>();
        let mut to = target.as_mut_ptr().cast::<__m128i>();
        for _ in 0..source.nbytes() / LINE_BYTES {
            // SAFETY: M1. A line is left in both, `to` is aligned to a line, and every bit pattern is valid.
            (from, to) = unsafe { stream_line(from, to) };
        }
        // Streamed stores are not ordered with the store that tells another thread that the bytes are there.
        // SAFETY: a fence touches no memory.
        unsafe { _mm_sfence() }
    }

    /// Copies one line and returns the next.
    ///
    /// # Safety
    ///
    /// * `from` is valid for reads and `to` for writes of [`LINE_BYTES`] bytes.
    /// * `to` is aligned to 16 bytes.
    #[allow(clippy::multiple_unsafe_ops_per_block)] // one line is one operation
    #[inline(always)]
    unsafe fn stream_line(from: *const __m128i, to: *mut __m128i) -> (*const __m128i, *mut __m128i) {
        // SAFETY: the caller's promise covers the four parts of the line and the address behind it; loads ask for no
        // alignment.
        unsafe {
            let parts = [
                _mm_loadu_si128(from),
                _mm_loadu_si128(from.add(1)),
                _mm_loadu_si128(from.add(2)),
                _mm_loadu_si128(from.add(3)),
            ];
            _mm_stream_si128(to, parts[0]);
            _mm_stream_si128(to.add(1), parts[1]);
            _mm_stream_si128(to.add(2), parts[2]);
            _mm_stream_si128(to.add(3), parts[3]);
            (from.add(4), to.add(4))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STORES: [Store; 2] = [Store::Cached, Store::Streaming];

    fn pattern(nbytes: usize) -> Vec<u8> {
        (0..nbytes).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
    }

    fn check(nbytes: usize, source_at: usize, target_at: usize, store: Store) {
        let source = pattern(source_at + nbytes);
        let mut around = vec![0xee; nbytes + 160];
        let target = Target::from_slice(&mut around).slice(target_at..target_at + nbytes);
        copy(Source::from_slice(&source).slice(source_at..source_at + nbytes), target, store);
        assert!(around[target_at..target_at + nbytes] == source[source_at..], "{nbytes} {source_at} {target_at}");
        assert!(around[..target_at].iter().chain(&around[target_at + nbytes..]).all(|byte| *byte == 0xee));
    }

    #[test]
    fn every_edge_size_at_every_alignment_arrives_whole_and_nothing_beside_it_changes() {
        for store in STORES {
            for nbytes in [0, 1, 63, 64, 4097, STREAM_MIN_BYTES - 1, STREAM_MIN_BYTES, STREAM_MIN_BYTES + 129] {
                for at in (0..64).step_by(7).chain([1, 63]) {
                    check(nbytes, at, 64 - at, store);
                    check(nbytes, 0, at, store);
                }
            }
        }
    }

    #[test]
    fn an_overlap_is_copied_as_if_through_a_second_buffer() {
        const NBYTES: usize = STREAM_MIN_BYTES + 77;
        for (from, to) in [(0, 65), (65, 0), (0, 0)] {
            let mut bytes = pattern(NBYTES + 65);
            let wanted = bytes[from..from + NBYTES].to_vec();
            let all = Target::from_slice(&mut bytes);
            // SAFETY: the same bytes, of which no reference is used while the views are.
            let source = unsafe { Source::from_raw(all.as_mut_ptr(), all.nbytes()) };
            copy(source.slice(from..from + NBYTES), all.slice(to..to + NBYTES), Store::Streaming);
            assert!(bytes[to..to + NBYTES] == wanted, "from {from} to {to}");
        }
    }

    #[test]
    #[should_panic(expected = "differ in length")]
    fn unequal_lengths_are_refused() {
        let source = vec![0; STREAM_MIN_BYTES];
        copy(Source::from_slice(&source), Target::from_slice(&mut [0; 3]), Store::Streaming);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_size_at_any_alignment(
            over in 0_usize..5000, source_at in 0_usize..64, target_at in 0_usize..64, is_streaming in any::<bool>()
        ) {
            check(STREAM_MIN_BYTES + over, source_at, target_at, STORES[usize::from(is_streaming)]);
        }
    }
}
