//! Python buffers as memory that others may write: a thread that holds the same buffer, or another process when the
//! buffer is a shared mapping (M1).
//!
//! Why that is no undefined behaviour of ours: while the buffer is exported its owner may not free or resize it, so
//! address and length hold; what a racing writer does to the bytes changes only the bytes.
#![allow(unsafe_code)]

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

use crate::memory::{Source, Target};

/// A C-contiguous buffer to read. Exported until it is dropped.
pub(super) struct ReadBuffer(PyUntypedBuffer);

/// A C-contiguous, writable buffer. Exported until it is dropped.
pub(super) struct WriteBuffer(PyUntypedBuffer);

/// Memory to write for the length of one call: a buffer, or (address, nbytes) of memory that the caller keeps.
pub(super) enum Base {
    Buffer(WriteBuffer),
    Span(usize, usize),
}

impl ReadBuffer {
    pub(super) fn source(&self) -> Source<'_> {
        // SAFETY: M1. The exporter keeps `len_bytes` contiguous bytes at `buf_ptr` valid while the buffer is exported,
        // which is as long as `self` lives; Py_ssize_t bounds the length.
        unsafe { Source::from_raw(self.0.buf_ptr().cast_const().cast(), self.0.len_bytes()) }
    }

    /// For an item, which drops this buffer last.
    pub(super) fn lasting_source(&self) -> Source<'static> {
        // SAFETY: M5. The one who asks, an item of a request, keeps the buffer exported as long as it exists.
        unsafe { self.source().lasting() }
    }

    pub(super) fn nbytes(&self) -> u64 {
        self.0.len_bytes() as u64
    }
}

impl WriteBuffer {
    pub(super) fn target(&self) -> Target<'_> {
        // SAFETY: M1. As for ReadBuffer, and the exporter said that the bytes may be written. Python code has no Rust
        // references to them.
        unsafe { Target::from_raw(self.0.buf_ptr().cast(), self.0.len_bytes()) }
    }

    /// For a job, whose owner drops this buffer after the job's end.
    pub(super) fn lasting_target(&self) -> Target<'static> {
        // SAFETY: M5. The one who asks, CopyJob, keeps the buffer exported until its job is over.
        unsafe { self.target().lasting() }
    }

    pub(super) fn nbytes(&self) -> u64 {
        self.0.len_bytes() as u64
    }
}

impl Base {
    pub(super) fn target(&self) -> Target<'_> {
        match self {
            Self::Buffer(buffer) => buffer.target(),
            // SAFETY: M1. Python code that names memory by its address keeps it during the call; the length was checked.
            Self::Span(address, nbytes) => unsafe {
                Target::from_raw(std::ptr::with_exposed_provenance_mut(*address), *nbytes)
            },
        }
    }
}

impl FromPyObject<'_, '_> for Base {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if let Ok((address, nbytes)) = given.extract::<(usize, usize)>() {
            if nbytes > isize::MAX as usize || address.checked_add(nbytes).is_none() {
                return Err(PyBufferError::new_err(format!("{nbytes} bytes at {address:#x} are not addressable")));
            }
            return Ok(Self::Span(address, nbytes));
        }
        given.extract().map(Self::Buffer)
    }
}

impl FromPyObject<'_, '_> for ReadBuffer {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        contiguous(&given).map(Self)
    }
}

impl FromPyObject<'_, '_> for WriteBuffer {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let buffer = contiguous(&given)?;
        if buffer.readonly() {
            let message = format!("a writable buffer is needed, got {} read-only bytes", buffer.len_bytes());
            return Err(PyBufferError::new_err(message));
        }
        Ok(Self(buffer))
    }
}

fn contiguous(given: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    let buffer = PyUntypedBuffer::get(given)?;
    if !buffer.is_c_contiguous() {
        let message = format!(
            "a C-contiguous buffer is needed, got shape {:?} with strides {:?}",
            buffer.shape(),
            buffer.strides()
        );
        return Err(PyBufferError::new_err(message));
    }
    Ok(buffer)
}
