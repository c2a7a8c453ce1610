//! Sweeping now and then, each time on a thread that ends with it: neither a send nor an answer waits for a sweep, and
//! none of them needs one.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use crate::fork::Process;
use crate::sweep::sweep;

/// How long a segment whose sender closed properly is left to its consumer.
const ORPHAN_GRACE: Duration = Duration::from_secs(60);
/// How often a sender and an endpoint sweep.
pub const EVERY: Duration = Duration::from_secs(60);

/// Clears one directory.
#[derive(Debug)]
pub struct Sweeper {
    shared: Arc<Shared>,
    every: Duration,
    begun: Instant,
    /// Milliseconds from `begun` on.
    due: AtomicU64,
    process: Process,
}

/// What sweeps have removed, and what they could not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Segments that were removed.
    pub segments: u64,
    /// Their bytes.
    pub nbytes: u64,
    /// Files that could not be removed, directories that could not be listed, threads that the system refused.
    pub failures: u64,
    /// The last of them, in words.
    pub last_failure: String,
}

#[derive(Debug)]
struct Shared {
    shm_dir: PathBuf,
    is_running: AtomicBool,
    is_news: AtomicBool,
    found: Mutex<Found>,
}

impl Sweeper {
    /// Has done nothing yet; the first sweep is due at once, each further one `every` later.
    pub fn new(shm_dir: PathBuf, every: Duration) -> Self {
        let shared = Shared {
            shm_dir,
            is_running: AtomicBool::new(false),
            is_news: AtomicBool::new(false),
            found: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
            every,
            begun: Instant::now(),
            due: AtomicU64::new(0),
            process: Process::current(),
        }
    }

    /// Starts a sweep when one is due and none runs. Never blocks for it. Does nothing in a forked child.
    pub fn sweep_if_due(&self) {
        let now = millis(self.begun.elapsed());
        let due = self.due.load(Ordering::Relaxed);
        if now < due || !self.process.is_current() {
            return;
        }
        let next = now.saturating_add(millis(self.every));
        let is_ours = self.due.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if is_ours && !self.shared.is_running.swap(true, Ordering::Acquire) {
            let shared = Arc::clone(&self.shared);
            let started = Builder::new().name("mmcopy-sweep".to_owned()).spawn(move || shared.run());
            if let Err(error) = started {
                self.shared.is_running.store(false, Ordering::Release);
                self.shared.add(|found| found.fail(&format!("no thread to sweep: {error}")));
            }
        }
    }

    /// How long until the next one is due.
    pub fn due_in(&self) -> Duration {
        let due = Duration::from_millis(self.due.load(Ordering::Relaxed));
        due.saturating_sub(self.begun.elapsed())
    }

    /// What sweeps that have ended found since this was called last; None for nothing.
    pub fn take(&self) -> Option<Found> {
        let is_news = self.process.is_current() && self.shared.is_news.swap(false, Ordering::Acquire);
        is_news.then(|| std::mem::take(&mut *self.shared.lock()))
    }
}

impl Found {
    /// Adds what was found later.
    pub fn add(&mut self, later: Self) {
        self.segments += later.segments;
        self.nbytes += later.nbytes;
        self.failures += later.failures;
        if later.failures > 0 {
            self.last_failure = later.last_failure;
        }
    }

    fn fail(&mut self, failure: &str) {
        self.failures += 1;
        failure.clone_into(&mut self.last_failure);
    }
}

impl Shared {
    fn run(&self) {
        let swept = sweep(&self.shm_dir, ORPHAN_GRACE);
        self.add(|found| match swept {
            Ok(swept) => {
                found.segments += swept.names.len() as u64;
                found.nbytes += swept.nbytes;
                swept.failures.iter().for_each(|error| found.fail(&error.with_path()));
            }
            Err(error) => found.fail(&error.with_path()),
        });
        self.is_running.store(false, Ordering::Release);
    }

    fn add(&self, change: impl FnOnce(&mut Found)) {
        let mut found = self.lock();
        change(&mut found);
        let is_news = *found != Found::default();
        drop(found);
        self.is_news.fetch_or(is_news, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::Owner;
    use std::fs;

    fn wait_for(is_there: impl Fn() -> bool) {
        let begun = Instant::now();
        while !is_there() {
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing for a minute");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn it_sweeps_at_once_and_again_when_it_is_due() {
        let shm = tempfile::tempdir().unwrap();
        let leave = || {
            let dead = Owner::create(shm.path()).unwrap();
            fs::write(dead.next_name().unwrap().path_in(shm.path()), b"12345").unwrap();
            dead.forget();
            drop(dead);
        };
        let is_empty = || fs::read_dir(shm.path()).unwrap().count() == 0;
        leave();
        let sweeper = Sweeper::new(shm.path().to_path_buf(), Duration::from_millis(1));
        let mut found = Found::default();
        for _ in 0..2 {
            wait_for(|| {
                sweeper.sweep_if_due();
                is_empty()
            });
            wait_for(|| !sweeper.shared.is_running.load(Ordering::Acquire));
            found.add(sweeper.take().unwrap());
            assert_eq!(sweeper.take(), None);
            leave();
        }
        assert_eq!((found.segments, found.nbytes, found.failures), (2, 10, 0));
        let rare = Sweeper::new(shm.path().to_path_buf(), EVERY);
        rare.sweep_if_due();
        wait_for(|| is_empty() && !rare.shared.is_running.load(Ordering::Acquire));
        leave();
        rare.sweep_if_due();
        assert!(!rare.shared.is_running.load(Ordering::Acquire) && !is_empty());
        assert!(rare.due_in() > EVERY / 2);
    }

    #[test]
    fn a_failure_is_counted_and_a_forked_child_does_nothing() {
        let shm = tempfile::tempdir().unwrap();
        let missing = Sweeper::new(shm.path().join("missing"), Duration::ZERO);
        missing.sweep_if_due();
        wait_for(|| missing.shared.is_news.load(Ordering::Acquire));
        let found = missing.take().unwrap();
        assert_eq!(found.failures, 1);
        assert!(found.last_failure.contains("missing: no such"), "{found:?}");
        let inherited = Sweeper { process: Process::elsewhere(), ..Sweeper::new(shm.path().join("missing"), EVERY) };
        inherited.sweep_if_due();
        assert_eq!((inherited.due.load(Ordering::Relaxed), inherited.take()), (0, None));
    }
}
