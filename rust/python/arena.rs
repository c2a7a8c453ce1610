//! A sender's arena, and a lease while it is written.
#![allow(unsafe_code)] // the buffer protocol's two functions are unsafe to call, and Python calls them

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use super::arguments::{Conversion, Limit, Threads, u64_of};
use super::buffers::ReadBuffer;
use super::endpoint::PySenderLink;
use super::outgoing::{Keeps, Outgoing};
use super::{SIGNALS_EVERY, detached_when_big, exports, tensors};
use crate::Error;
use crate::arena::{Arena, ArenaError, HugePages, Later, LeaseHandle, Options, Part, Writing, write_all};
use crate::cast::Cast;

/// Whether a handle's name is a lease's.
#[pyfunction]
pub(super) fn is_lease_name(name: &Bound<'_, PyString>) -> bool {
    LeaseHandle::is_lease_name(&name.to_string_lossy())
}

/// The random part of the arena that a lease's handle names: 16 hexadecimal digits. LeaseForgedError.
#[pyfunction]
pub(super) fn lease_arena_id(
    name: &Bound<'_, PyString>,
    offset: &Bound<'_, PyAny>,
    nbytes: &Bound<'_, PyAny>,
    owner_id: &Bound<'_, PyString>,
) -> PyResult<String> {
    Ok(format!("{:016x}", handle_of(name, offset, nbytes, owner_id)?.instance()))
}

/// The four fields as they come off the wire.
pub(super) fn handle_of(
    name: &Bound<'_, PyString>,
    offset: &Bound<'_, PyAny>,
    nbytes: &Bound<'_, PyAny>,
    owner_id: &Bound<'_, PyString>,
) -> PyResult<LeaseHandle> {
    // What has no UTF-8 is no lease's name either.
    let (name, owner_id) = (name.to_string_lossy(), owner_id.to_string_lossy());
    match (u64_of(offset)?, u64_of(nbytes)?) {
        (Some(offset), Some(nbytes)) => Ok(LeaseHandle::parse(&name, offset, nbytes, &owner_id).map_err(Error::from)?),
        _ => {
            let reason = format!("offset {offset} and {nbytes} bytes are not two numbers from 0 to 2**64 - 1");
            Err(Error::from(ArenaError::Forged { name: name.chars().take(100).collect(), reason }).into())
        }
    }
}

/// Memory that a sender and its workers map once and use again and again.
#[pyclass(frozen, name = "Arena", module = "mmcopy._native")]
pub(super) struct PyArena {
    arena: Arena,
}

#[pymethods]
impl PyArena {
    #[new]
    #[pyo3(
        signature = (
            data_nbytes, *, num_leases = None, huge_pages = "transparent", num_threads = Threads::ONE,
            unclaimed_timeout_s = Limit(Duration::from_secs(60))
        ),
        text_signature = "(data_nbytes, *, num_leases=None, huge_pages='transparent', num_threads=1, unclaimed_timeout_s=60.0)"
    )]
    fn new(
        py: Python<'_>,
        data_nbytes: usize,
        num_leases: Option<u32>,
        huge_pages: &str,
        num_threads: Threads,
        unclaimed_timeout_s: Limit,
    ) -> PyResult<Self> {
        let huge_pages = match huge_pages {
            "off" => HugePages::Off,
            "transparent" => HugePages::Transparent,
            "reserved" => HugePages::Reserved,
            other => {
                let wanted = "\"off\", \"transparent\" or \"reserved\"".to_owned();
                let fault = ArenaError::Option { setting: "huge_pages", found: format!("{other:?}"), wanted };
                return Err(Error::from(fault).into());
            }
        };
        let options = Options {
            data_nbytes,
            num_leases,
            huge_pages,
            num_threads: num_threads.0,
            unclaimed_limit: unclaimed_timeout_s.0,
        };
        Ok(Self { arena: py.detach(|| Arena::create(&options))? })
    }

    /// The random part of its leases' names: 16 hexadecimal digits.
    #[getter]
    fn instance_id(&self) -> String {
        format!("{:016x}", self.arena.instance())
    }

    /// Bytes of the data.
    #[getter]
    fn data_nbytes(&self) -> usize {
        self.arena.data_nbytes()
    }

    /// How the memory turned out: noexec, read_only, huge_pages, huge_nbytes, huge_pages_setting, num_threads.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.arena.report();
        let all = PyDict::new(py);
        all.set_item("noexec", found.is_noexec)?;
        all.set_item("read_only", found.is_read_only_for_consumers)?;
        let huge_pages = match found.huge_pages {
            HugePages::Off => "off",
            HugePages::Transparent => "transparent",
            HugePages::Reserved => "reserved",
        };
        all.set_item("huge_pages", huge_pages)?;
        all.set_item("huge_nbytes", found.huge_nbytes)?;
        all.set_item("huge_pages_setting", found.huge_pages_setting)?;
        all.set_item("num_threads", found.num_threads)?;
        Ok(all)
    }

    /// What is out now and what has happened so far. ClosedError in a forked child.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.arena.statistics()?;
        let all = PyDict::new(py);
        let numbers = [
            ("data_nbytes", found.data_nbytes),
            ("used_nbytes", found.used_nbytes),
            ("largest_free_nbytes", found.largest_free_nbytes),
            ("num_leases", u64::from(found.num_leases)),
            ("leases_out", found.leases_out as u64),
            ("consumers", found.consumers as u64),
            ("taken", found.taken),
            ("committed", found.committed),
            ("aborted", found.aborted),
            ("released", found.released),
            ("cancelled", found.cancelled),
            ("expired", found.expired),
            ("full", found.full),
            ("consumers_connected", found.consumers_connected),
            ("consumers_gone", found.consumers_gone),
        ];
        for (name, number) in numbers {
            all.set_item(name, number)?;
        }
        all.set_item("held", found.held.to_vec())?;
        Ok(all)
    }

    /// Gives the arena to the worker at the other end of the link; its number as a consumer. Blocks without the GIL.
    ///
    /// Keep the link open as long as the worker shall receive leases. ArenaError and EndpointRefusedError leave it open;
    /// EndpointGoneError, EndpointError and MmcopyTimeoutError close it. ClosedError: the arena or the link was closed.
    #[pyo3(signature = (link, *, timeout_s), text_signature = "($self, link, *, timeout_s)")]
    fn hand_over(&self, py: Python<'_>, link: &Bound<'_, PySenderLink>, timeout_s: Limit) -> PyResult<u32> {
        let link = link.get().opened()?;
        Ok(py.detach(|| self.arena.hand_over(&link, timeout_s.0))?)
    }

    /// Leases of these sizes, side by side, for these consumers; all or none. Blocks without the GIL until there is room.
    ///
    /// ArenaFullError at the limit, or at once for what can never fit; ArenaError for a consumer that has gone;
    /// ClosedError. Signals are handled meanwhile, and what a handler raises ends the wait.
    #[pyo3(signature = (sizes, consumers, *, timeout_s), text_signature = "($self, sizes, consumers, *, timeout_s)")]
    fn take(
        &self,
        py: Python<'_>,
        sizes: Vec<usize>,
        consumers: Vec<u32>,
        timeout_s: Limit,
    ) -> PyResult<Vec<PyLeaseWriter>> {
        Ok(self.taken(py, &sizes, &consumers, timeout_s.0)?.into_iter().map(PyLeaseWriter::new).collect())
    }

    /// The tensors of one request as leases side by side, written and committed; the TensorData of each. All or none: after
    /// an error nothing is out. Blocks as take, then until all is written, without the GIL when it is much; the sources may
    /// be reused right after.
    ///
    /// As take; PayloadError for a size that is not the source's after the cast, DtypeError.
    #[pyo3(
        signature = (tensors, consumers, *, timeout_s, num_threads),
        text_signature = "($self, tensors, consumers, *, timeout_s, num_threads)"
    )]
    fn send<'py>(
        &self,
        py: Python<'py>,
        tensors: Vec<Outgoing<'py>>,
        consumers: Vec<u32>,
        timeout_s: Limit,
        num_threads: Threads,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let sizes: Vec<usize> = tensors.iter().map(|tensor| tensor.nbytes).collect();
        // From here on an error drops the leases, which gives up those that are not committed.
        let leases = self.taken(py, &sizes, &consumers, timeout_s.0)?;
        let Some(owner_id) = leases.first().map(|lease| PyString::new(py, &lease.handle().owner_id())) else {
            return Ok(Vec::new());
        };
        let described = leases
            .iter()
            .zip(&tensors)
            .map(|(lease, tensor)| tensors::of_lease(lease.handle(), &owner_id, &tensor.dtype, &tensor.shape));
        let described = described.collect::<PyResult<Vec<_>>>()?;
        let parts: Vec<Part<'_>> = leases
            .iter()
            .zip(&tensors)
            .map(|(writing, tensor)| Part { writing, source: tensor.source(), cast: tensor.cast })
            .collect();
        let nbytes: usize = parts.iter().zip(&sizes).map(|(part, nbytes)| part.source.nbytes().max(*nbytes)).sum();
        let written = detached_when_big(py, nbytes as u64, || write_all(&parts, num_threads.0));
        // What a signal's handler raises would otherwise be raised behind this call, and the handles be lost.
        if let Err(error) = written.map_err(PyErr::from).and_then(|()| py.check_signals()) {
            for lease in &leases {
                let _ = self.arena.cancel(lease.handle()); // those that were committed
            }
            return Err(error);
        }
        Ok(described)
    }

    /// Takes a lease back that was handed out: who has not begun to read it cannot any more. False when it is over. One
    /// that is still being written is written to the end, though no consumer reads it. Never blocks. LeaseForgedError, LeaseUnknownArenaError,
    /// ClosedError.
    fn cancel(
        &self,
        name: &Bound<'_, PyString>,
        offset: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
        owner_id: &Bound<'_, PyString>,
    ) -> PyResult<bool> {
        Ok(self.arena.cancel(&handle_of(name, offset, nbytes, owner_id)?)?)
    }

    /// Whether it was closed, or belongs to the process that this one was forked from.
    #[getter]
    fn closed(&self) -> bool {
        self.arena.is_closed()
    }

    /// Gives out no further lease and ends the thread. Leases that are out stay readable. May be called again.
    /// MmcopyTimeoutError at the limit. Does nothing in a forked child.
    fn close(&self, py: Python<'_>, timeout_s: Limit) -> PyResult<()> {
        Ok(py.detach(|| self.arena.close(timeout_s.0))?)
    }

    fn __repr__(&self) -> String {
        let state = if self.arena.is_closed() { "closed" } else { "open" };
        format!("<mmcopy._native.Arena {:016x} {} bytes, {state}>", self.arena.instance(), self.arena.data_nbytes())
    }
}

/// A lease that is not finished. Its buffer is the memory itself; dropping it gives it up unless it was committed.
#[pyclass(frozen, name = "LeaseWriter", module = "mmcopy._native")]
pub(super) struct PyLeaseWriter {
    writing: Arc<Writing>,
}

#[pymethods]
impl PyLeaseWriter {
    /// Name of its handle.
    #[getter]
    fn name(&self) -> String {
        self.writing.handle().name()
    }

    /// First byte in the arena's data.
    #[getter]
    fn offset(&self) -> u64 {
        self.writing.handle().offset()
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.writing.handle().nbytes()
    }

    /// Owner in its handle.
    #[getter]
    fn owner_id(&self) -> String {
        self.writing.handle().owner_id()
    }

    /// Fills the whole lease from src, cast on the way when dtypes are given. Once a lease. Consumers see each step as soon
    /// as all before it are there. Blocks until all is written, without the GIL when it is big; commits nothing.
    ///
    /// PayloadError when the lengths differ, DtypeError, LeaseError, ClosedError.
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
    ) -> PyResult<()> {
        let cast = cast_of(&src, src_dtype, dst_dtype)?;
        let nbytes = src.nbytes().max(self.nbytes());
        Ok(detached_when_big(py, nbytes, || self.writing.write(src.source(), cast, num_threads.0))?)
    }

    /// Begins to fill the whole lease from a tensor, and to commit it behind the last byte, by threads of the process.
    ///
    /// PayloadError when the lengths differ, LeaseError, ClosedError. Blocks only where the system refused every thread.
    #[pyo3(signature = (tensor, *, num_threads), text_signature = "($self, tensor, *, num_threads)")]
    fn write_later(&self, py: Python<'_>, tensor: Outgoing<'_>, num_threads: Threads) -> PyResult<PyLaterWrite> {
        // SAFETY: M5. What is returned keeps the bytes, and drops them behind the writing.
        let (source, cast) = (unsafe { tensor.source().lasting() }, tensor.cast);
        let later = py.detach(|| self.writing.write_later(source, cast, num_threads.0))?;
        Ok(PyLaterWrite { later, _keeps: tensor.keeps() })
    }

    /// What goes into the message, which may be sent before it is written. The lease must have the bytes of this dtype and
    /// shape: that is not checked.
    fn describe<'py>(
        &self,
        py: Python<'py>,
        dtype: &Bound<'py, PyString>,
        shape: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let handle = self.writing.handle();
        tensors::of_lease(handle, &PyString::new(py, &handle.owner_id()), dtype, shape)
    }

    /// All bytes are in place: consumers may read them. LeaseError while a write runs, ClosedError when it is over.
    fn commit(&self) -> PyResult<()> {
        Ok(self.writing.commit()?)
    }

    /// Gives it up: consumers get an error instead of the rest. Does nothing when it is over.
    fn abort(&self) {
        self.writing.abort();
    }

    /// Whether it was committed or given up.
    #[getter]
    fn over(&self) -> bool {
        self.writing.is_over()
    }

    /// Buffers of it that exist. Its block is not given to another lease before they have gone.
    #[getter]
    fn num_views(&self) -> usize {
        self.writing.num_views()
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let lease = slf.get().writing.view()?;
        // SAFETY: Python calls this to export `slf`, and `__releasebuffer__` for each export.
        unsafe { exports::writable(slf.as_any(), lease, view, flags) }
    }

    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: Python calls this once for each buffer that `__getbuffer__` filled.
        unsafe { exports::release(view) }
    }

    fn __repr__(&self) -> String {
        let state = if self.writing.is_over() { "over" } else { "open" };
        format!("<mmcopy._native.LeaseWriter {} {} bytes, {state}>", self.name(), self.nbytes())
    }
}

/// A lease that is being filled. Dropping it ends that first.
#[pyclass(frozen, name = "LaterWrite", module = "mmcopy._native")]
pub(super) struct PyLaterWrite {
    // Fields are dropped in this order: the bytes stay until they are written (M5).
    later: Later,
    _keeps: Keeps,
}

#[pymethods]
impl PyLaterWrite {
    /// Whether all is written. Never blocks.
    fn done(&self) -> bool {
        self.later.is_over()
    }

    /// Blocks, without the GIL, until all is written and committed; False at the limit. LeaseError, ClosedError: the lease
    /// was given up before.
    fn wait(&self, py: Python<'_>, timeout_s: Limit) -> PyResult<bool> {
        Ok(py.detach(|| self.later.wait(timeout_s.0))?)
    }
}

impl PyArena {
    fn taken(&self, py: Python<'_>, sizes: &[usize], consumers: &[u32], limit: Duration) -> PyResult<Vec<Writing>> {
        let begun = Instant::now();
        // A thread that has let go of the GIL may wait for it.
        if let Some(taken) = self.arena.take_within(sizes, consumers, begun, limit, Duration::ZERO)? {
            return Ok(taken);
        }
        loop {
            let taken = py.detach(|| self.arena.take_within(sizes, consumers, begun, limit, SIGNALS_EVERY))?;
            if let Some(taken) = taken {
                return Ok(taken);
            }
            py.check_signals()?;
        }
    }
}

impl PyLeaseWriter {
    fn new(writing: Writing) -> Self {
        Self { writing: Arc::new(writing) }
    }
}

/// The cast that two dtypes ask for, once the source is a whole number of elements.
pub(super) fn cast_of(src: &ReadBuffer, src_dtype: Option<&str>, dst_dtype: Option<&str>) -> PyResult<Option<Cast>> {
    match Conversion::optional(src_dtype, dst_dtype)? {
        None => Ok(None),
        Some(Conversion::Cast(cast)) => Ok(Some(cast)),
        Some(Conversion::Copy(dtype)) => {
            dtype.elements(src.source().nbytes())?;
            Ok(None)
        }
    }
}
