//! Steps that several threads end in any order, made known in theirs.

use std::sync::PoisonError;

#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::{Mutex, MutexGuard};

/// How far a lease is written. What `advance` is given is known under the lock, so it only rises, and everything that the
/// threads stored before they ended their steps comes before it.
#[derive(Debug)]
pub(super) struct Progress {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Steps that have ended out of turn.
    ended: Vec<bool>,
    next: usize,
    has_begun: bool,
    is_stopped: bool,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(State::default()) }
    }

    /// A pass of so many steps begins; false when there was one, because consumers may read what it wrote.
    pub(super) fn begin(&self, num_steps: usize) -> bool {
        let mut state = self.lock();
        let is_first = !std::mem::replace(&mut state.has_begun, true);
        if is_first {
            state.ended = vec![false; num_steps];
        }
        is_first
    }

    /// This step has ended. When all before it have, `advance` gets the number of steps that are there.
    pub(super) fn end(&self, step: usize, advance: impl FnOnce(usize)) {
        let mut state = self.lock();
        state.ended[step] = true;
        let before = state.next;
        while state.ended.get(state.next) == Some(&true) {
            state.next += 1;
        }
        if state.next > before && !state.is_stopped {
            advance(state.next);
        }
    }

    /// No step is made known from now on.
    pub(super) fn stop(&self, last: impl FnOnce()) {
        self.lock().is_stopped = true;
        last();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn steps_are_known_in_order_and_not_after_a_stop() {
        let progress = Progress::new();
        assert!(progress.begin(4));
        let seen = Mutex::new(Vec::new());
        let end = |step| progress.end(step, |there| seen.lock().unwrap().push(there));
        end(2);
        end(0);
        end(1);
        assert_eq!(*seen.lock().unwrap(), [1, 3]);
        progress.stop(|| seen.lock().unwrap().push(99));
        end(3);
        assert_eq!(*seen.lock().unwrap(), [1, 3, 99]);
        assert!(!progress.begin(4));
    }
}
