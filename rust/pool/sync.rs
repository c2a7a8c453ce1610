//! The primitives under the hand-over: the standard library's, or loom's, which tries every order of their steps.

#[cfg(loom)]
pub(super) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};
#[cfg(not(loom))]
pub(super) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// No state behind these locks is half changed while it is held, so a panic elsewhere does not spoil it.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification; without a deadline for ever. False when the deadline has passed.
pub(super) fn wait<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Option<Instant>,
) -> (MutexGuard<'a, T>, bool) {
    let Some(deadline) = deadline else {
        return (condvar.wait(guard).unwrap_or_else(PoisonError::into_inner), true);
    };
    match deadline.checked_duration_since(Instant::now()) {
        Some(left) if !left.is_zero() => {
            (condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0, true)
        }
        _ => (guard, false),
    }
}

/// How long to look at a flag before going to sleep: about what going to sleep costs. It halves when that was in vain
/// and doubles when it was not, so that a thread with nothing to do does not burn a core that others want.
#[derive(Debug)]
pub(super) struct Spin(Duration);

impl Spin {
    const MOST: Duration = Duration::from_micros(50);
    const LEAST: Duration = Duration::from_nanos(250);

    pub(super) const fn new() -> Self {
        Self(Self::MOST)
    }

    /// Whether `happened` within the time.
    pub(super) fn until(&mut self, happened: impl Fn() -> bool) -> bool {
        if cfg!(loom) {
            return false; // it has no clock, and takes a loop that waits for another thread as endless
        }
        let end = Instant::now() + self.0;
        let seen = loop {
            if happened() {
                break true;
            }
            if Instant::now() >= end {
                break false;
            }
            std::hint::spin_loop();
        };
        self.0 = if seen { (self.0 * 2).min(Self::MOST) } else { (self.0 / 2).max(Self::LEAST) };
        seen
    }
}
