//! Senders and what they leave behind.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use super::arena::cast_of;
use super::arguments::{Limit, Threads};
use super::buffers::ReadBuffer;
use super::detached_when_big;
use crate::owner::Owner;
use crate::{Error, Result, sweep as sweeping, sweeper};

/// A sender's identity on this host: a lock file in shm_dir that is locked as long as this process lives, and names
/// that no other sender has.
///
/// A child after os.fork() has no part in it, and does not keep it alive.
#[pyclass(frozen, name = "SegmentOwner", module = "mmcopy._native")]
pub(super) struct PySegmentOwner {
    /// The random part of this sender's names: 16 hexadecimal digits.
    #[pyo3(get)]
    instance_id: String,
    /// A write has its own reference, so that a close in another thread ends the sender behind it.
    owner: Mutex<Option<Arc<Owner>>>,
}

#[pymethods]
impl PySegmentOwner {
    #[new]
    #[pyo3(text_signature = "(shm_dir)")]
    fn new(py: Python<'_>, shm_dir: PathBuf) -> PyResult<Self> {
        let owner = py.detach(|| Owner::create(&shm_dir))?;
        Ok(Self { instance_id: owner.id().as_str().to_owned(), owner: Mutex::new(Some(Arc::new(owner))) })
    }

    /// A name that no segment has had before: "mmcopy-<instance_id>-<number>". ClosedError after close or forget.
    fn next_name(&self) -> PyResult<String> {
        Ok(self.opened()?.next_name()?.to_string())
    }

    /// Writes a segment under a name that is free, as write_segment does: (name, bytes). ClosedError after close or forget.
    /// What the handler of a signal raises meanwhile leaves none.
    #[pyo3(
        signature = (src, *, src_dtype = None, dst_dtype = None, num_threads = Threads::ONE),
        text_signature = "($self, src, *, src_dtype=None, dst_dtype=None, num_threads=1)"
    )]
    fn write(
        &self,
        py: Python<'_>,
        src: ReadBuffer,
        src_dtype: Option<&str>,
        dst_dtype: Option<&str>,
        num_threads: Threads,
    ) -> PyResult<(String, u64)> {
        let owner = self.opened()?;
        let cast = cast_of(&src, src_dtype, dst_dtype)?;
        // A cast makes at most four bytes of one.
        let nbytes = src.nbytes().saturating_mul(if cast.is_some() { 4 } else { 1 });
        let written = detached_when_big(py, nbytes, || owner.write(src.source(), cast, num_threads.0))?;
        // What a signal's handler raises would otherwise be raised behind this call, and the name be lost.
        py.check_signals()?;
        written.hand_on();
        Ok((written.name().to_string(), written.nbytes()))
    }

    /// Removes the lock file and lets go of the lock. May be called again.
    ///
    /// Segments on their way stay for their consumers; a sweep removes them once they are old.
    fn close(&self) {
        drop(self.take());
    }

    /// Closes the descriptor and removes nothing, as when the process is killed. May be called again.
    fn forget(&self) {
        if let Some(owner) = self.take() {
            owner.forget();
        }
    }

    fn __repr__(&self) -> String {
        let is_open = self.owner.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        let state = if is_open { "open" } else { "closed" };
        format!("<mmcopy._native.SegmentOwner {} {state}>", self.instance_id)
    }
}

impl PySegmentOwner {
    fn opened(&self) -> Result<Arc<Owner>> {
        let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        owner.clone().ok_or_else(|| Error::Closed { what: format!("segment owner {}", self.instance_id) })
    }

    fn take(&self) -> Option<Arc<Owner>> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Removes segments of senders that are gone: (names removed, their bytes, why what should have gone is still there).
///
/// A sender that died goes at once, with its lock file; a segment whose sender closed properly goes when it was last
/// written at least orphan_grace_s seconds ago. Nothing else is touched, and nothing of other users unless we are root.
/// A lock file counts for segments of its own user. Several sweeps may run at once; each holds two descriptors at most.
/// SegmentNotFoundError, SegmentPermissionError or SegmentError when shm_dir cannot be listed, ConfigError for a bad
/// number of seconds.
#[pyfunction]
#[pyo3(signature = (shm_dir, *, orphan_grace_s = 60.0))]
pub(super) fn sweep(
    py: Python<'_>,
    shm_dir: PathBuf,
    orphan_grace_s: f64,
) -> PyResult<(Vec<String>, u64, Vec<String>)> {
    let grace = if orphan_grace_s == f64::INFINITY {
        Duration::MAX
    } else {
        Duration::try_from_secs_f64(orphan_grace_s).map_err(|_| Error::Grace { given: orphan_grace_s.to_string() })?
    };
    let swept = py.detach(|| sweeping::sweep(&shm_dir, grace))?;
    Ok((swept.names, swept.nbytes, swept.failures.iter().map(Error::with_path).collect()))
}

/// Sweeps a directory now and then, each time on a thread that ends with it, so that nothing waits for it.
#[pyclass(frozen, name = "Sweeper", module = "mmcopy._native")]
pub(super) struct PySweeper {
    sweeper: sweeper::Sweeper,
}

#[pymethods]
impl PySweeper {
    #[new]
    #[pyo3(
        signature = (shm_dir, *, every_s = Limit(sweeper::EVERY)),
        text_signature = "(shm_dir, *, every_s=60.0)"
    )]
    fn new(shm_dir: PathBuf, every_s: Limit) -> Self {
        Self { sweeper: sweeper::Sweeper::new(shm_dir, every_s.0) }
    }

    /// Starts a sweep when one is due: the first at once, each further one every_s later. Never blocks.
    ///
    /// What sweeps that have ended did since the last call: (segments removed, their bytes, failures, the last of those in
    /// words), or None for nothing. Does nothing in a forked child.
    fn sweep_if_due(&self) -> Option<(u64, u64, u64, String)> {
        self.sweeper.sweep_if_due();
        self.sweeper.take().map(|found| (found.segments, found.nbytes, found.failures, found.last_failure))
    }
}
