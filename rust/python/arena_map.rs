//! An arena that a sender handed over, and its leases.
#![allow(unsafe_code)] // the buffer protocol's function is unsafe to call, and Python calls it

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::arena::handle_of;
use super::arguments::Limit;
use super::{exports, interruptible};
use crate::arena::{Claim, Map};

/// A sender's arena, mapped as long as this or one of its leases lives.
#[pyclass(frozen, name = "ArenaMap", module = "mmcopy._native")]
pub(super) struct PyArenaMap {
    map: Arc<Map>,
}

#[pymethods]
impl PyArenaMap {
    /// The random part of its leases' names: 16 hexadecimal digits.
    #[getter]
    fn instance_id(&self) -> String {
        format!("{:016x}", self.map.instance())
    }

    /// Our number as a consumer.
    #[getter]
    fn slot(&self) -> u32 {
        self.map.slot()
    }

    /// Whether the kernel keeps everyone but the sender from writing to the data.
    #[getter]
    fn read_only(&self) -> bool {
        self.map.is_read_only()
    }

    /// Address of the data, for registering it with CUDA.
    #[getter]
    fn data_address(&self) -> usize {
        self.map.data_span().0
    }

    /// Bytes of the data.
    #[getter]
    fn data_nbytes(&self) -> usize {
        self.map.data_span().1
    }

    /// Address of our flags, for registering them with CUDA.
    #[getter]
    fn flags_address(&self) -> usize {
        self.map.flags_span().0
    }

    /// Bytes of our flags.
    #[getter]
    fn flags_nbytes(&self) -> usize {
        self.map.flags_span().1
    }

    /// Whether the connection to the sender has ended.
    #[getter]
    fn owner_gone(&self) -> bool {
        self.map.is_owner_gone()
    }

    /// Leases that are claimed and not released.
    #[getter]
    fn num_held(&self) -> usize {
        self.map.num_held()
    }

    /// Checks a handle and tells its sender that we read it from now on. Never blocks.
    ///
    /// LeaseForgedError, LeaseError, LeaseUnknownArenaError, ClosedError.
    fn claim(
        &self,
        name: &Bound<'_, PyString>,
        offset: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
        owner_id: &Bound<'_, PyString>,
    ) -> PyResult<PyLease> {
        let claim = self.map.claim(&handle_of(name, offset, nbytes, owner_id)?)?;
        Ok(PyLease { map: Arc::clone(&self.map), claim, releases_when_dropped: false })
    }

    /// Whether the two are the same mapping.
    fn is_same(&self, other: &Bound<'_, Self>) -> bool {
        Arc::ptr_eq(&self.map, &other.get().map)
    }

    fn __repr__(&self) -> String {
        let state = if self.map.is_owner_gone() { "sender gone" } else { "connected" };
        let (slot, nbytes) = (self.slot(), self.data_nbytes());
        format!("<mmcopy._native.ArenaMap {} as consumer {slot}, {nbytes} bytes, {state}>", self.instance_id())
    }
}

impl PyArenaMap {
    pub(super) fn new(map: Arc<Map>) -> Self {
        Self { map }
    }

    pub(super) fn core(&self) -> Arc<Map> {
        Arc::clone(&self.map)
    }
}

/// A lease that we may read until we release it. Its buffer is the memory itself, read-only.
#[pyclass(frozen, name = "Lease", module = "mmcopy._native")]
pub(super) struct PyLease {
    map: Arc<Map>,
    claim: Claim,
    releases_when_dropped: bool,
}

#[pymethods]
impl PyLease {
    /// Name of its handle.
    #[getter]
    fn name(&self) -> String {
        self.claim.handle().name()
    }

    /// First byte in the arena's data.
    #[getter]
    fn offset(&self) -> u64 {
        self.claim.offset()
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.claim.nbytes()
    }

    /// Bytes that the sender has written. Never blocks. LeaseError.
    fn written(&self) -> PyResult<u64> {
        Ok(self.map.written(&self.claim)?)
    }

    /// Blocks, without the GIL, until the sender has written upto bytes; how many are there, which can be more.
    ///
    /// LeaseError, MmcopyTimeoutError.
    fn wait_written(&self, py: Python<'_>, upto: u64, timeout_s: Limit) -> PyResult<u64> {
        match self.map.written(&self.claim) {
            Ok(there) if there >= upto.min(self.claim.nbytes()) => Ok(there),
            _ => interruptible(py, |asked| self.map.wait_written(&self.claim, upto, timeout_s.0, asked)),
        }
    }

    /// Tells the sender that our reads are over. False when that was said already. ClosedError in a forked child.
    fn release(&self) -> PyResult<bool> {
        Ok(self.map.release(&self.claim)?)
    }

    /// Where the word is that tells the sender that our reads are over, and what to write: (address, value).
    #[getter]
    fn release_flag(&self) -> (usize, u32) {
        let flag = self.map.release_flag(&self.claim);
        (flag.address, flag.value)
    }

    /// Another party writes the flag, a GPU's stream for example: release does nothing any more. False when it is not held.
    fn defer_release(&self) -> PyResult<bool> {
        Ok(self.map.defer_release(&self.claim)?)
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let lease = slf.get();
        lease.map.check_process()?;
        // SAFETY: Python calls this to export `slf`, which keeps the mapping.
        unsafe { exports::read_only(slf.as_any(), lease.map.source(&lease.claim), view, flags) }
    }

    fn __repr__(&self) -> String {
        format!("<mmcopy._native.Lease {} {} bytes>", self.name(), self.nbytes())
    }
}

impl PyLease {
    /// Dropping this, and every buffer of it, releases it.
    pub(super) const fn released_when_dropped(map: Arc<Map>, claim: Claim) -> Self {
        Self { map, claim, releases_when_dropped: true }
    }
}

impl Drop for PyLease {
    fn drop(&mut self) {
        if self.releases_when_dropped {
            // A forked child has nothing to release.
            let _ = self.map.release(&self.claim);
        }
    }
}
