//! A tensor that is sent: what `mmcopy.arrays.flatten` found, and the dtype that it arrives in.
#![allow(unsafe_code)] // an address is turned into memory to read

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use super::arguments::Conversion;
use super::buffers::ReadBuffer;
use crate::cast::Cast;
use crate::memory::Source;

/// One element of `Arena.send`'s argument.
pub(super) struct Outgoing<'py> {
    pub dtype: Bound<'py, PyString>,
    pub shape: Bound<'py, PyTuple>,
    /// After the cast.
    pub nbytes: usize,
    pub cast: Option<Cast>,
    bytes: Bytes<'py>,
}

/// Bytes in C order that stay where they are while this exists.
enum Bytes<'py> {
    Buffer(ReadBuffer),
    At { address: usize, nbytes: usize, keeps: Bound<'py, PyAny> },
}

/// Keeps the bytes of an [`Outgoing`].
#[allow(dead_code)] // held, not read
pub(super) enum Keeps {
    Buffer(ReadBuffer),
    Object(Py<PyAny>),
}

impl Outgoing<'_> {
    /// What keeps the bytes where they are, without the GIL's lifetime.
    pub(super) fn keeps(self) -> Keeps {
        match self.bytes {
            Bytes::Buffer(buffer) => Keeps::Buffer(buffer),
            Bytes::At { keeps, .. } => Keeps::Object(keeps.unbind()),
        }
    }

    pub(super) fn source(&self) -> Source<'_> {
        match &self.bytes {
            Bytes::Buffer(buffer) => buffer.source(),
            // SAFETY: M1. `flatten` has found these bytes in the storage of the tensor, which this keeps, and the length
            // was checked against isize::MAX. Resizing a storage while it is sent is as resizing it under torch itself.
            Bytes::At { address, nbytes, .. } => unsafe {
                Source::from_raw(std::ptr::with_exposed_provenance(*address), *nbytes)
            },
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Outgoing<'py> {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        type Flat<'py> = (Bound<'py, PyString>, Bound<'py, PyTuple>, usize, Bound<'py, PyAny>, usize);
        let ((src_dtype, shape, src_nbytes, source, address), dtype, nbytes): (Flat<'py>, Bound<'py, PyString>, usize) =
            given.extract()?;
        let bytes = if address == 0 {
            Bytes::Buffer(source.extract()?)
        } else if isize::try_from(src_nbytes).is_ok() {
            Bytes::At { address, nbytes: src_nbytes, keeps: source }
        } else {
            return Err(PyValueError::new_err(format!("{src_nbytes} bytes at an address cannot be")));
        };
        let mut outgoing = Self { dtype, shape, nbytes, cast: None, bytes };
        outgoing.cast = match Conversion::between(src_dtype.to_str()?, outgoing.dtype.to_str()?)? {
            Conversion::Cast(cast) => Some(cast),
            Conversion::Copy(dtype) => {
                dtype.elements(outgoing.source().nbytes())?;
                None
            }
        };
        Ok(outgoing)
    }
}
