//! A job of steps that one caller shares with the threads of the process.
//!
//! A step is handed out once, and the closure is called only for a step that was handed out and has not ended. So once no
//! step will be handed out any more and all that were have ended, what the closure borrows is free.
#![allow(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

use super::ledger::{Claim, Ledger};
use super::queue::Work;
use super::sync::{AtomicUsize, Ordering};

/// What a panic was about.
type Panic = Box<dyn Any + Send>;

/// Does one step; false when no further one shall begin.
pub(crate) type Step<'a> = dyn Fn(usize) -> bool + Sync + 'a;

/// Steps, and who may still take some.
pub(super) struct Steps {
    ledger: Ledger,
    run: Run,
    /// Threads of the process that take steps at one time.
    most_helpers: usize,
    num_helpers: AtomicUsize,
    panic: std::sync::Mutex<Option<Panic>>,
}

/// What does a step.
struct Run(*const Step<'static>);

// SAFETY: it is Sync, so other threads may call it, and it is called as long as it is valid only (see `run`).
unsafe impl Send for Run {}
// SAFETY: as for Send.
unsafe impl Sync for Run {}

impl Steps {
    /// Steps that borrow, for the calling thread and so many others.
    ///
    /// # Safety
    ///
    /// * `run` is valid until `finish` has returned, which is called.
    pub(super) unsafe fn new(num_steps: usize, most_helpers: usize, run: &Step<'_>) -> Self {
        let run: *const Step<'_> = run;
        // SAFETY: only the lifetime differs, which is the caller's promise.
        let run = unsafe { std::mem::transmute::<*const Step<'_>, *const Step<'static>>(run) };
        let ledger = Ledger::new(num_steps);
        ledger.permit(num_steps);
        let (num_helpers, panic) = (AtomicUsize::new(0), std::sync::Mutex::default());
        Self { ledger, run: Run(run), most_helpers, num_helpers, panic }
    }

    /// Takes steps on the calling thread until none is left, and waits for those that other threads run. What one of them
    /// panicked with, if one did.
    pub(super) fn finish(&self) -> Option<Panic> {
        self.finish_all();
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// As [`Steps::finish`], and keeps the panic.
    pub(super) fn finish_all(&self) {
        while self.take_one() {}
        self.ledger.settle();
    }

    /// Takes one step on the calling thread; false when none is left to take.
    pub(super) fn take_one(&self) -> bool {
        let Claim::Chunk(step) = self.ledger.claim() else { return false };
        self.run(step);
        true
    }

    /// Whether all have ended, or one has said that no further one shall begin and those that ran have.
    pub(super) fn is_over(&self) -> bool {
        self.ledger.is_over()
    }

    pub(super) fn has_panicked(&self) -> bool {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// A step that the queue handed to a thread of the process.
    pub(super) fn help(&self, step: usize) {
        self.run(step);
        self.num_helpers.fetch_sub(1, Ordering::Relaxed);
    }

    fn run(&self, step: usize) {
        // SAFETY: this step was handed out and has not ended, so `finish` has not returned.
        let run = || unsafe { (*self.run.0)(step) };
        let goes_on = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            false
        });
        if !goes_on {
            self.ledger.cancel();
        }
        self.ledger.end(step, Ok(()));
    }
}

impl Work for Steps {
    fn claim(&self) -> Claim {
        // Relaxed: the queue's lock is held, so it can only have become less meanwhile.
        if self.num_helpers.load(Ordering::Relaxed) >= self.most_helpers {
            return if self.ledger.num_claimable() > 0 { Claim::NotYet } else { Claim::Over };
        }
        let claim = self.ledger.claim();
        if matches!(claim, Claim::Chunk(_)) {
            self.num_helpers.fetch_add(1, Ordering::Relaxed);
        }
        claim
    }
}
