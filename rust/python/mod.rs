//! The Python module `mmcopy._native`: the only place that knows PyO3, one file per noun.
//!
//! When the GIL is released: for every call that touches at least [`GIL_RELEASE_BYTES`] bytes, for every call that
//! walks a directory or creates a lock file, and for every wait. Smaller calls keep it: on a shared-memory file system
//! they take microseconds and cannot block, whereas a thread that has let go of the GIL may wait five milliseconds to get
//! it back.
//!
//! The caller's buffers are exported for the length of one call, and those of a copy job until it is over, so they cannot
//! be resized or freed under a copy.

mod arena;
mod arena_map;
mod arguments;
mod buffers;
mod copies;
mod endpoint;
mod errors;
mod exports;
mod machine;
mod outgoing;
mod owner;
mod pool;
mod process;
mod request;
mod segments;
mod tensors;

use std::time::Duration;

use pyo3::prelude::*;

/// A call on at least this many bytes releases the GIL.
const GIL_RELEASE_BYTES: u64 = 65536;

/// How often a wait looks whether a signal came, whose handler may end it.
const SIGNALS_EVERY: Duration = Duration::from_millis(100);

/// Runs `work`, without the GIL when it touches enough bytes for that.
fn detached_when_big<T: Send>(py: Python<'_>, nbytes: u64, work: impl FnOnce() -> T + Send) -> T {
    if nbytes >= GIL_RELEASE_BYTES { py.detach(work) } else { work() }
}

/// Runs a wait without the GIL. `work` asks about every 50 ms whether it is to end, which it is when a signal handler of
/// Python's raises; that error is the result.
fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&(dyn Fn() -> bool + Sync)) -> crate::Result<T> + Send,
) -> PyResult<T> {
    let raised = std::sync::Mutex::new(None);
    let keep = |error| *raised.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error);
    let asked = || Python::attach(|py| py.check_signals().map_err(keep).is_err());
    let outcome = py.detach(|| work(&asked));
    match raised.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(outcome?),
    }
}

/// The native part of mmcopy: segments in shared memory, their names and owners, and copying with a cast.
#[pymodule]
mod _native {
    use pyo3::prelude::*;
    use pyo3::types::{PyDict, PyFrozenSet};

    use crate::arena::LEASE_PREFIX;
    use crate::cast::Cast;
    use crate::dtype::Dtype;

    #[pymodule_export]
    use super::arena::{PyArena, PyLaterWrite, PyLeaseWriter, is_lease_name, lease_arena_id};
    #[pymodule_export]
    use super::arena_map::{PyArenaMap, PyLease};
    #[pymodule_export]
    use super::copies::{cast_into, copy_into};
    #[pymodule_export]
    use super::endpoint::{PySenderLink, PyWorkerEndpoint};
    #[pymodule_export]
    use super::machine::{available_cores, memory_budget};
    #[pymodule_export]
    use super::owner::{PySegmentOwner, PySweeper, sweep};
    #[pymodule_export]
    use super::pool::{PyCopyJob, PyCopyPool, start_copy_threads};
    #[pymodule_export]
    use super::process::PyProcess;
    #[pymodule_export]
    use super::request::{PyChunkTable, PyExtents, PyKeptLeases, PyRequest, PyRequestOpener};
    #[pymodule_export]
    use super::segments::{PySegment, shm_namespace_id, unlink_segment, validate_segment_name, write_segment};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        let dtypes = PyDict::new(py);
        for dtype in Dtype::ALL {
            dtypes.set_item(dtype.name(), dtype.itemsize())?;
        }
        let casts = Cast::ALL.map(|cast| (cast.from().name(), cast.to().name()));
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("DEBUG_BUILD", cfg!(debug_assertions))?;
        module.add("DTYPES", dtypes)?;
        module.add("CASTS", PyFrozenSet::new(py, casts)?)?;
        module.add("GIL_RELEASE_BYTES", super::GIL_RELEASE_BYTES)?;
        module.add("LEASE_PREFIX", LEASE_PREFIX)
    }
}
