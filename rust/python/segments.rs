//! Segments, their names and their namespace.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;

use super::arena::cast_of;
use super::arguments::{Name, Threads, u64_of};
use super::buffers::{ReadBuffer, WriteBuffer};
use super::detached_when_big;
use super::process::PyProcess;
use crate::segment::Segment;
use crate::{Error, Result, namespace, segment};

/// Which shared-memory file system this directory is on: "<boot id>:<st_dev>", "" when unknown.
#[pyfunction]
#[pyo3(signature = (shm_dir = PathBuf::from("/dev/shm")), text_signature = "(shm_dir='/dev/shm')")]
pub(super) fn shm_namespace_id(shm_dir: PathBuf) -> String {
    namespace::shm_namespace_id(&shm_dir)
}

/// The name without "/" in front, when it is one path component of at most 255 bytes without NUL; else PayloadError.
#[pyfunction]
pub(super) fn validate_segment_name(name: Name) -> String {
    name.0.to_string()
}

/// Creates a segment (mode 0600, exactly as long as its contents) and fills it from src; the file's bytes.
///
/// With src_dtype and dst_dtype the elements are cast on the way. Blocks until the segment is complete; src may be reused
/// right after. On any error no file is left: SegmentError, NoSpaceError, SegmentPermissionError,
/// SegmentNotFoundError (no such directory), SegmentError, PayloadError, DtypeError.
#[pyfunction]
#[pyo3(
    signature = (shm_dir, name, src, *, src_dtype = None, dst_dtype = None, num_threads = Threads::ONE),
    text_signature = "(shm_dir, name, src, *, src_dtype=None, dst_dtype=None, num_threads=1)"
)]
pub(super) fn write_segment(
    py: Python<'_>,
    shm_dir: PathBuf,
    name: Name,
    src: ReadBuffer,
    src_dtype: Option<&str>,
    dst_dtype: Option<&str>,
    num_threads: Threads,
) -> PyResult<u64> {
    let cast = cast_of(&src, src_dtype, dst_dtype)?;
    // A cast makes at most four bytes of one.
    let nbytes = src.nbytes().saturating_mul(if cast.is_some() { 4 } else { 1 });
    Ok(detached_when_big(py, nbytes, || segment::write(&shm_dir, &name.0, src.source(), cast, num_threads.0))?)
}

/// Removes a segment by name, for a sender that takes back its own. False when it is gone already. ClosedError when we are
/// not owner, the sender's process.
#[pyfunction]
pub(super) fn unlink_segment(
    py: Python<'_>,
    shm_dir: PathBuf,
    name: Name,
    owner: &Bound<'_, PyProcess>,
) -> PyResult<bool> {
    let owner = owner.get().0;
    // How many pages are freed here is not known before.
    Ok(py.detach(|| segment::unlink(&shm_dir, &name.0, owner))?)
}

/// An open segment, to be read and removed by its consumer. A context manager: leaving it closes the file and does not
/// remove the name. May be used by several threads at once.
#[pyclass(frozen, name = "Segment", module = "mmcopy._native")]
pub(super) struct PySegment {
    /// Name of the segment, without "/" in front.
    #[pyo3(get)]
    name: String,
    /// Bytes of the file when it was opened.
    #[pyo3(get)]
    file_nbytes: u64,
    /// User id of the file's owner.
    #[pyo3(get)]
    uid: u32,
    /// A reader has its own reference, so that a close in another thread cannot close the file under it.
    file: Mutex<Option<Arc<Segment>>>,
}

#[pymethods]
impl PySegment {
    /// Opens a segment for reading. Never blocks and follows no symbolic link.
    ///
    /// SegmentNotFoundError, SegmentPermissionError, SegmentError (not a regular file, among others) or PayloadError.
    #[staticmethod]
    fn open(shm_dir: PathBuf, name: Name) -> PyResult<Self> {
        let segment = Segment::open(&shm_dir, &name.0)?;
        Ok(Self {
            name: segment.name().to_string(),
            file_nbytes: segment.file_nbytes(),
            uid: segment.uid(),
            file: Mutex::new(Some(Arc::new(segment))),
        })
    }

    /// Raises SegmentSizeError unless offset + nbytes is inside the file as it was opened.
    fn check(&self, offset: &Bound<'_, PyAny>, nbytes: &Bound<'_, PyAny>) -> PyResult<()> {
        let segment = self.opened()?;
        match (u64_of(offset)?, u64_of(nbytes)?) {
            (Some(offset), Some(nbytes)) => Ok(segment.check(offset, nbytes)?),
            _ => Err(self.out_of_range(offset, nbytes)?),
        }
    }

    /// Fills dst with the bytes from offset on.
    ///
    /// Blocks until every byte is there. SegmentSizeError when the range is not inside the file, or when a peer cut the
    /// file while it was read (then dst holds anything). Never SIGBUS.
    #[pyo3(
        signature = (dst, offset, *, num_threads = Threads::ONE),
        text_signature = "($self, dst, offset, *, num_threads=1)"
    )]
    fn read_into(
        &self,
        py: Python<'_>,
        dst: WriteBuffer,
        offset: &Bound<'_, PyAny>,
        num_threads: Threads,
    ) -> PyResult<()> {
        let segment = self.opened()?;
        let Some(from) = u64_of(offset)? else {
            return Err(self.out_of_range(offset, dst.nbytes().into_pyobject(py)?.as_any())?);
        };
        Ok(detached_when_big(py, dst.nbytes(), || segment.read_into(dst.target(), from, num_threads.0))?)
    }

    /// Removes the name, at most once and only while it still names this very file.
    ///
    /// True when this call removed it, False when it was gone already. The open file can still be read.
    fn unlink(&self, py: Python<'_>) -> PyResult<bool> {
        let segment = self.opened()?;
        Ok(detached_when_big(py, self.file_nbytes, || segment.unlink())?)
    }

    /// Closes the file; the name stays. May be called again; every other call raises ClosedError from then on.
    ///
    /// The memory of a removed segment is freed here.
    fn close(&self, py: Python<'_>) {
        let file = self.take();
        detached_when_big(py, self.file_nbytes, || drop(file));
    }

    fn __enter__(slf: Py<Self>) -> PyResult<Py<Self>> {
        slf.get().opened()?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exc_info))]
    fn __exit__(&self, py: Python<'_>, _exc_info: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let state = if self.opened().is_ok() { "open" } else { "closed" };
        format!("<mmcopy._native.Segment {:?} {} bytes, uid {}, {state}>", self.name, self.file_nbytes, self.uid)
    }
}

impl PySegment {
    /// Closes it without letting the file go.
    pub(super) fn take(&self) -> Option<Arc<Segment>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn opened(&self) -> Result<Arc<Segment>> {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.clone().ok_or_else(|| Error::Closed { what: format!("segment {:?}", self.name) })
    }

    fn out_of_range(&self, offset: &Bound<'_, PyAny>, nbytes: &Bound<'_, PyAny>) -> PyResult<PyErr> {
        Ok(Error::Range {
            name: self.name.clone(),
            offset: offset.str()?.to_string(),
            wanted_nbytes: nbytes.str()?.to_string(),
            file_nbytes: self.file_nbytes,
        }
        .into())
    }
}
