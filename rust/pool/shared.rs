//! The threads that serve every host copy of the process: sends, casts, segments, receives onto the CPU.
//!
//! They are started once and stay. A caller takes steps of its own job as they do, so it depends on none of them: where
//! all are busy, where other threads keep the cores from them, or where the system refused to start any, the caller does
//! the rest itself. It waits for steps that run, and for nothing else.
//!
//! A process forked from ours has none of them and starts its own. It looks at nothing of what it inherited, whose locks
//! may have been held at the fork.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::panic::resume_unwind;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::queue::WorkQueue;
use super::steps::{Step, Steps};
use super::sync::Spin;
use crate::fork::Process;

/// Threads in one process.
const MOST_THREADS: usize = 256;
/// Enough for a step of any job: a cast has two blocks of 4 KiB on the stack, a segment 64 KiB.
const STACK_BYTES: usize = 512 << 10;
/// After the system has refused a thread, the next one is asked for so much later at the earliest.
const RETRY: Duration = Duration::from_secs(1);

static HOST: AtomicPtr<Host> = AtomicPtr::new(ptr::null_mut());

/// The threads of this process.
struct Host {
    process: Process,
    queue: WorkQueue<Steps>,
    num_threads: AtomicUsize,
    /// Held by the one who starts threads: when the system last refused one.
    refused: Mutex<Option<Instant>>,
}

/// Starts threads until there are as many, 256 at most; how many there are. They sleep while there is no work. Where the
/// system refuses one there are fewer, and some later call tries again.
pub fn start_threads(wanted: usize) -> usize {
    Host::current().start(wanted)
}

/// Runs `step` once for each number below `num_steps`, on the calling thread and on up to `num_helpers` more. Blocks
/// until all have ended. After one that returned false no further one is begun. A panic of any goes on here.
pub(crate) fn share(num_steps: usize, num_helpers: usize, step: &Step<'_>) {
    let host = Host::current();
    host.start(num_helpers);
    share_in(&host.queue, num_steps, num_helpers, step);
}

/// Begins `step` for each number below `num_steps` on threads of the process, `num_helpers` at one time.
pub(crate) fn start(num_steps: usize, num_helpers: usize, step: OwnStep) -> Started {
    let host = Host::current();
    // SAFETY: `finish` is called before the step is dropped, by `Started`.
    let steps = Arc::new(unsafe { Steps::new(num_steps, num_helpers, &*step) });
    let started = Started { steps: Arc::clone(&steps), step: ManuallyDrop::new(step), process: host.process };
    if num_steps == 0 || host.start(num_helpers) == 0 {
        started.finish();
    } else {
        host.queue.add(steps);
        host.queue.wake(num_helpers.min(num_steps));
    }
    started
}

/// A step that keeps what it needs.
pub(crate) type OwnStep = Box<dyn Fn(usize) -> bool + Send + Sync>;

/// A job that its owner does not wait for at once. Dropping it does the rest of it first. In a process forked from the one
/// that started it, it does nothing, and what the step keeps stays.
pub(crate) struct Started {
    steps: Arc<Steps>,
    step: ManuallyDrop<OwnStep>,
    process: Process,
}

impl Started {
    /// Whether all steps have ended. Never blocks.
    pub(crate) fn is_over(&self) -> bool {
        self.process.is_current() && self.steps.is_over()
    }

    /// Takes steps until none is left, and waits for those that run; false when the limit comes first.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let begun = Instant::now();
        while self.process.is_current() {
            if self.steps.is_over() {
                return true;
            }
            if begun.elapsed() >= limit {
                return false;
            }
            if !self.steps.take_one() {
                self.finish();
            }
        }
        false
    }

    /// Whether a step has panicked.
    pub(crate) fn has_panicked(&self) -> bool {
        self.steps.has_panicked()
    }

    fn finish(&self) {
        self.steps.finish_all();
        Host::current().queue.remove(&self.steps);
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if self.process.is_current() {
            self.finish();
            // SAFETY: it is dropped here alone, and all steps have ended, so nothing calls it any more.
            unsafe { ManuallyDrop::drop(&mut self.step) }
        }
    }
}

pub(super) fn share_in(queue: &WorkQueue<Steps>, num_steps: usize, num_helpers: usize, step: &Step<'_>) {
    // SAFETY: `finish` is called below. Nothing before it can panic but out of memory, which ends the process.
    let steps = Arc::new(unsafe { Steps::new(num_steps, num_helpers, step) });
    queue.add(Arc::clone(&steps));
    queue.wake(num_helpers.min(num_steps.saturating_sub(1)));
    let panic = steps.finish();
    queue.remove(&steps);
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
}

impl Host {
    fn current() -> &'static Self {
        let found = HOST.load(Ordering::Acquire);
        // SAFETY: it is null or one that was leaked below.
        if let Some(host) = unsafe { found.as_ref() }
            && host.process.is_current()
        {
            return host;
        }
        let fresh = Box::into_raw(Box::new(Self {
            process: Process::current(),
            queue: WorkQueue::new(0),
            num_threads: AtomicUsize::new(0),
            refused: Mutex::new(None),
        }));
        // The parent's stays as it is: a lock in it may be held for ever.
        let taken = HOST.compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire);
        let host = taken.map_or_else(|first| first, |_| fresh);
        if host != fresh {
            // SAFETY: it came from a box, and nothing else has seen it.
            drop(unsafe { Box::from_raw(fresh) });
        }
        // SAFETY: it is leaked, by this or another thread of this process.
        unsafe { &*host }
    }

    fn start(&'static self, wanted: usize) -> usize {
        let wanted = wanted.min(MOST_THREADS);
        let there = self.num_threads.load(Ordering::Relaxed);
        if there >= wanted {
            return there;
        }
        let mut refused = match self.refused.try_lock() {
            Ok(refused) => refused,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Another thread is at it.
            Err(TryLockError::WouldBlock) => return there,
        };
        if refused.is_some_and(|refused| refused.elapsed() < RETRY) {
            return there;
        }
        *refused = None;
        for thread in self.num_threads.load(Ordering::Relaxed)..wanted {
            let builder = Builder::new().name(format!("mmcopy-host-{thread}")).stack_size(STACK_BYTES);
            if builder.spawn(|| serve(&self.queue)).is_err() {
                *refused = Some(Instant::now());
                break;
            }
            self.num_threads.store(thread + 1, Ordering::Relaxed);
        }
        self.num_threads.load(Ordering::Relaxed)
    }
}

pub(super) fn serve(queue: &WorkQueue<Steps>) {
    let mut spin = Spin::new();
    while let Some((steps, step)) = queue.next(&mut spin) {
        steps.help(step);
    }
}
