//! Closing files on a thread of their own: the last close of a removed segment frees its pages, which takes as long as
//! reading them.
//!
//! The thread starts with the first file, sleeps while there is none, and ends in [`Reaper::join`]. Where the system
//! refuses a thread, and in a process forked from ours, the caller closes the files itself, so nothing here can fail.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::fork::Process;

use crate::segment::Segment;

/// Closes what it is given, later. Dropping it waits until all is closed.
#[derive(Debug)]
pub struct Reaper {
    shared: Arc<Shared>,
    process: Process,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    segments: VecDeque<Arc<Segment>>,
    /// Handed over and not closed yet, the one that is being closed among them.
    num_pending: usize,
    /// The thread that takes from this queue.
    thread: Option<JoinHandle<()>>,
    /// It shall end once the queue is empty. It clears this when it does.
    is_ending: bool,
    /// Threads that take no more, to be joined.
    ended: Vec<JoinHandle<()>>,
}

impl Reaper {
    /// A reaper without a thread.
    #[must_use]
    pub fn new() -> Self {
        Self { shared: Arc::default(), process: Process::current() }
    }

    /// Lets go of the segments. One that somebody else still uses, a copy job for example, is closed by the last of
    /// them. Does not block.
    pub fn close_later(&self, segments: impl IntoIterator<Item = Arc<Segment>>) {
        let segments: Vec<_> = segments.into_iter().collect();
        if segments.is_empty() || self.is_inherited() {
            return;
        }
        let mut queue = self.shared.lock();
        if queue.thread.is_none() {
            let shared = Arc::clone(&self.shared);
            queue.thread = Builder::new().name("mmcopy-reaper".to_owned()).spawn(move || shared.work()).ok();
        }
        if queue.thread.is_none() {
            drop(queue); // they are closed here, without the lock
            return;
        }
        queue.num_pending += segments.len();
        queue.segments.extend(segments);
        drop(queue);
        self.shared.changed.notify_all();
    }

    /// Segments handed over and not closed yet.
    pub fn pending(&self) -> usize {
        if self.is_inherited() { 0 } else { self.shared.lock().num_pending }
    }

    /// Blocks until all is closed and the thread has ended; false when that took longer than the limit. A later
    /// [`Reaper::close_later`] starts a thread again.
    pub fn join(&self, limit: Duration) -> bool {
        if self.is_inherited() {
            return true;
        }
        let deadline = Instant::now().checked_add(limit);
        let mut queue = self.shared.lock();
        queue.is_ending = queue.thread.is_some();
        self.shared.changed.notify_all();
        while queue.is_ending {
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return false;
            }
            queue = self.shared.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let ended = std::mem::take(&mut queue.ended);
        drop(queue);
        ended.into_iter().all(|thread| thread.join().is_ok())
    }

    fn is_inherited(&self) -> bool {
        !self.process.is_current()
    }
}

impl Default for Reaper {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        if !self.is_inherited() {
            self.join(Duration::MAX);
            return;
        }
        // The lock may have been held at the fork, by a thread that is not here. Then its files stay open until this
        // process ends.
        let queue = match self.shared.queue.try_lock() {
            Ok(queue) => Some(queue),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(mut queue) = queue {
            queue.segments.clear();
            // The handles name threads that this process does not have.
            std::mem::forget((queue.thread.take(), std::mem::take(&mut queue.ended)));
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut queue = self.lock();
        loop {
            if let Some(segment) = queue.segments.pop_front() {
                drop(queue);
                drop(segment);
                queue = self.lock();
                queue.num_pending -= 1;
            } else if queue.is_ending {
                let this = queue.thread.take();
                queue.ended.extend(this);
                queue.is_ending = false;
                drop(queue);
                self.changed.notify_all();
                return;
            } else {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Source;
    use crate::name::SegmentName;
    use crate::segment::write;
    use std::num::NonZeroUsize;
    use std::sync::Weak;

    fn removed_segments(count: usize) -> Vec<Arc<Segment>> {
        let shm = tempfile::tempdir().unwrap();
        let open = |number| {
            let name = SegmentName::parse(&format!("segment-{number}")).unwrap();
            write(shm.path(), &name, Source::from_slice(&[7; 5000]), None, NonZeroUsize::MIN).unwrap();
            let segment = Segment::open(shm.path(), &name).unwrap();
            assert_eq!(segment.unlink(), Ok(true));
            Arc::new(segment)
        };
        (0..count).map(open).collect()
    }

    fn watch(segments: &[Arc<Segment>]) -> Vec<Weak<Segment>> {
        segments.iter().map(Arc::downgrade).collect()
    }

    #[test]
    fn all_is_closed_when_joined_and_it_starts_again() {
        let reaper = Reaper::new();
        assert!(reaper.join(Duration::ZERO), "nothing to wait for");
        for count in [1, 20, 3] {
            let segments = removed_segments(count);
            let watched = watch(&segments);
            reaper.close_later(segments);
            assert!(reaper.join(Duration::from_secs(60)));
            assert!(watched.iter().all(|segment| segment.strong_count() == 0));
            assert_eq!(reaper.pending(), 0);
            assert!(reaper.shared.lock().thread.is_none());
        }
    }

    #[test]
    fn dropping_waits_for_the_rest() {
        let segments = removed_segments(50);
        let watched = watch(&segments);
        let reaper = Reaper::new();
        reaper.close_later(segments);
        drop(reaper);
        assert!(watched.iter().all(|segment| segment.strong_count() == 0));
    }

    #[test]
    fn a_segment_in_use_stays_open() {
        let segments = removed_segments(1);
        let reaper = Reaper::new();
        reaper.close_later(segments.clone());
        assert!(reaper.join(Duration::from_secs(60)));
        assert_eq!(Arc::strong_count(&segments[0]), 1);
        segments[0].check(0, 5000).unwrap();
    }

    #[test]
    fn several_threads_may_hand_over_and_join() {
        let reaper = Reaper::new();
        let watched = std::thread::scope(|scope| {
            let hand_over = || {
                let segments = removed_segments(10);
                let watched = watch(&segments);
                for segment in segments {
                    reaper.close_later([segment]);
                    assert!(reaper.join(Duration::from_secs(60)));
                }
                watched
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(hand_over)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(reaper.join(Duration::from_secs(60)));
        assert!(watched.iter().all(|segment| segment.strong_count() == 0));
    }
}
