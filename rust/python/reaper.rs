//! Closing segments off the caller's path.

use pyo3::prelude::*;

use super::arguments::Limit;
use super::segments::PySegment;
use crate::reaper::Reaper;

/// Closes segments on a thread of its own, which starts with the first one.
#[pyclass(frozen, name = "Reaper", module = "mmcopy._native")]
pub(super) struct PyReaper {
    reaper: Reaper,
}

#[pymethods]
impl PyReaper {
    #[new]
    fn new() -> Self {
        Self { reaper: Reaper::new() }
    }

    /// Closes these segments soon; to their users they are closed at once. Never blocks.
    fn close_later(&self, segments: Vec<Bound<'_, PySegment>>) {
        self.reaper.close_later(segments.iter().filter_map(|segment| segment.get().take()));
    }

    /// Segments handed over and not closed yet.
    #[getter]
    fn pending(&self) -> usize {
        self.reaper.pending()
    }

    /// Blocks until all is closed and the thread has ended; False at the limit. A later close_later starts it again.
    fn join(&self, py: Python<'_>, timeout_s: Limit) -> bool {
        py.detach(|| self.reaper.join(timeout_s.0))
    }

    fn __repr__(&self) -> String {
        format!("<mmcopy._native.Reaper {} pending>", self.reaper.pending())
    }
}
