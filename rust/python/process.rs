//! Which process an object belongs to.

use pyo3::prelude::*;

use crate::fork::Process;

/// A process, distinguished from its forked children also where a child has the number of its parent.
///
/// Compares by value and can be hashed.
#[pyclass(frozen, eq, hash, name = "Process", module = "mmcopy._native")]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct PyProcess(pub(super) Process);

#[pymethods]
impl PyProcess {
    /// The process that calls this.
    #[staticmethod]
    fn current() -> Self {
        Self(Process::current())
    }

    /// Whether the calling process is still this one, and not a child that was forked from it.
    fn is_current(&self) -> bool {
        self.0.is_current()
    }

    /// Its number in its own pid namespace: for messages, not an identity.
    #[getter]
    fn pid(&self) -> i32 {
        self.0.pid()
    }
}
