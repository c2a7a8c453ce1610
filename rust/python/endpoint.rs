//! A worker's socket, and a sender's connection to it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::arena_map::PyArenaMap;
use super::arguments::Limit;
use crate::endpoint::{Options, SenderLink, WorkerEndpoint};
use crate::{Error, Result};

/// A socket that senders on this host connect to, served by one thread.
#[pyclass(frozen, name = "WorkerEndpoint", module = "mmcopy._native")]
pub(super) struct PyWorkerEndpoint {
    endpoint: WorkerEndpoint,
}

#[pymethods]
impl PyWorkerEndpoint {
    #[new]
    #[allow(clippy::too_many_arguments)]
    #[pyo3(
        signature = (directory, *, shm_dir, accept_prefixes, allowed_uids, max_links, max_arenas, max_arena_bytes, hello_timeout_s),
        text_signature = "(directory, *, shm_dir, accept_prefixes, allowed_uids, max_links, max_arenas, max_arena_bytes, hello_timeout_s)"
    )]
    fn new(
        py: Python<'_>,
        directory: PathBuf,
        shm_dir: PathBuf,
        accept_prefixes: Vec<String>,
        allowed_uids: Vec<u32>,
        max_links: usize,
        max_arenas: usize,
        max_arena_bytes: u64,
        hello_timeout_s: Limit,
    ) -> PyResult<Self> {
        let hello_limit = hello_timeout_s.0;
        let options = Options {
            directory,
            shm_dir,
            accept_prefixes,
            allowed_uids,
            max_links,
            max_arenas,
            max_arena_bytes,
            hello_limit,
        };
        Ok(Self { endpoint: py.detach(|| WorkerEndpoint::create(options))? })
    }

    /// Path of the socket, which a sender needs.
    #[getter]
    fn path(&self) -> PathBuf {
        self.endpoint.path().to_path_buf()
    }

    /// The random part of the path: 16 hexadecimal digits.
    #[getter]
    fn instance_id(&self) -> String {
        format!("{:016x}", self.endpoint.instance())
    }

    /// Whether it was closed, or belongs to the process that this one was forked from.
    #[getter]
    fn closed(&self) -> bool {
        self.endpoint.is_closed()
    }

    /// What has happened: links, accepted, refused_users, faults, last_fault, swept (sockets), and what senders that are gone
    /// left in shm_dir: segments_swept, sweep_failures, last_sweep_failure. ClosedError in a forked child.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.endpoint.statistics()?;
        let all = PyDict::new(py);
        all.set_item("links", found.links)?;
        all.set_item("accepted", found.accepted)?;
        all.set_item("refused_users", found.refused_users)?;
        all.set_item("faults", found.faults)?;
        all.set_item("last_fault", found.last_fault)?;
        all.set_item("swept", found.swept)?;
        all.set_item("segments_swept", found.leftovers.segments)?;
        all.set_item("sweep_failures", found.leftovers.failures)?;
        all.set_item("last_sweep_failure", found.leftovers.last_failure)?;
        Ok(all)
    }

    /// The arenas of all senders that are connected, the newest last.
    fn arenas(&self) -> Vec<PyArenaMap> {
        self.endpoint.arenas().into_iter().map(PyArenaMap::new).collect()
    }

    /// The arena of these 16 hexadecimal digits while its sender is connected, else None.
    fn find_arena(&self, instance_id: &str) -> Option<PyArenaMap> {
        let instance = u64::from_str_radix(instance_id, 16).ok()?;
        self.endpoint.find_arena(instance).map(PyArenaMap::new)
    }

    /// Blocks, without the GIL, until more than seen arenas were handed over since the start; how many were.
    fn wait_arena(&self, py: Python<'_>, seen: u64, timeout_s: Limit) -> PyResult<u64> {
        Ok(py.detach(|| self.endpoint.wait_arena(seen, timeout_s.0))?)
    }

    /// Removes the socket, ends every connection and the thread; blocks for the thread. May be called again.
    /// MmcopyTimeoutError at the limit. Does nothing in a forked child.
    fn close(&self, py: Python<'_>, timeout_s: Limit) -> PyResult<()> {
        Ok(py.detach(|| self.endpoint.close(timeout_s.0))?)
    }

    fn __repr__(&self) -> String {
        let state = if self.endpoint.is_closed() { "closed" } else { "open" };
        format!("<mmcopy._native.WorkerEndpoint {} {state}>", self.endpoint.path().display())
    }
}

impl PyWorkerEndpoint {
    pub(super) const fn core(&self) -> &WorkerEndpoint {
        &self.endpoint
    }
}

/// A sender's connection to a worker's endpoint. May be used by several threads, one after another.
#[pyclass(frozen, name = "SenderLink", module = "mmcopy._native")]
pub(super) struct PySenderLink {
    /// Path of the worker's socket.
    #[pyo3(get)]
    path: PathBuf,
    /// The random part of the worker's path: 16 hexadecimal digits.
    #[pyo3(get)]
    worker_id: String,
    /// A call has its own reference, so that a close in another thread cannot close the socket under it.
    link: Mutex<Option<Arc<SenderLink>>>,
}

#[pymethods]
impl PySenderLink {
    /// Connects and says Hello. Blocks without the GIL.
    ///
    /// EndpointGoneError (no worker listens there), EndpointRefusedError (by either side: the user), EndpointError
    /// (a path too long, among others), MmcopyTimeoutError.
    #[staticmethod]
    #[pyo3(signature = (path, *, timeout_s, allowed_uids), text_signature = "(path, *, timeout_s, allowed_uids)")]
    fn connect(py: Python<'_>, path: PathBuf, timeout_s: Limit, allowed_uids: Vec<u32>) -> PyResult<Self> {
        let link = py.detach(|| SenderLink::connect(&path, timeout_s.0, &allowed_uids))?;
        let worker_id = format!("{:016x}", link.worker_instance());
        Ok(Self { path, worker_id, link: Mutex::new(Some(Arc::new(link))) })
    }

    /// Whether the worker can read what we write to shm_dir: (yes or no, what happened in words).
    ///
    /// Writes 32 random bytes as a segment, lets the worker read them, and removes it. Blocks without the GIL.
    /// EndpointGoneError, MmcopyTimeoutError, EndpointError, ClosedError.
    #[pyo3(signature = (shm_dir, *, timeout_s), text_signature = "($self, shm_dir, *, timeout_s)")]
    fn probe(&self, py: Python<'_>, shm_dir: PathBuf, timeout_s: Limit) -> PyResult<(bool, String)> {
        let link = self.opened()?;
        let probed = py.detach(|| link.probe(&shm_dir, timeout_s.0))?;
        Ok((probed.is_shared, probed.reason))
    }

    /// Whether it was closed, the worker has gone, or it belongs to the process that this one was forked from.
    #[getter]
    fn closed(&self) -> bool {
        self.opened().map_or(true, |link| link.is_closed())
    }

    /// Ends the connection, and with it calls that wait in other threads. Never blocks. May be called again.
    fn close(&self) {
        let link = self.link.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(link) = link {
            link.close();
        }
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { "closed" } else { "open" };
        format!("<mmcopy._native.SenderLink {} {state}>", self.path.display())
    }
}

impl PySenderLink {
    pub(super) fn opened(&self) -> Result<Arc<SenderLink>> {
        let link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        link.clone().ok_or_else(|| Error::Closed { what: format!("the link to {}", self.path.display()) })
    }
}
