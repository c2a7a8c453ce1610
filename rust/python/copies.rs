//! Copying between Python buffers.

use pyo3::prelude::*;

use super::arguments::{Conversion, Threads};
use super::buffers::{ReadBuffer, WriteBuffer};
use super::detached_when_big;
use crate::{cast, copy};

/// Copies src to dst, which has the same number of bytes.
///
/// Blocks until every byte is there; both may be reused right after. PayloadError when the lengths differ.
#[pyfunction]
#[pyo3(signature = (src, dst, *, num_threads = Threads::ONE), text_signature = "(src, dst, *, num_threads=1)")]
pub(super) fn copy_into(py: Python<'_>, src: ReadBuffer, dst: WriteBuffer, num_threads: Threads) -> PyResult<()> {
    Ok(detached_when_big(py, src.nbytes().max(dst.nbytes()), || copy::copy(src.source(), dst.target(), num_threads.0))?)
}

/// Casts the elements of src into dst.
///
/// Rounds to nearest, ties to even; NaN stays NaN. Equal dtypes are a plain copy. Blocks until every element is there;
/// both may be reused right after. DtypeError for a pair outside CASTS, DtypeError for a name outside DTYPES,
/// PayloadError when dst has the wrong length, src is not whole elements, or the two share memory.
#[pyfunction]
#[pyo3(
    signature = (src, src_dtype, dst, dst_dtype, *, num_threads = Threads::ONE),
    text_signature = "(src, src_dtype, dst, dst_dtype, *, num_threads=1)"
)]
pub(super) fn cast_into(
    py: Python<'_>,
    src: ReadBuffer,
    src_dtype: &str,
    dst: WriteBuffer,
    dst_dtype: &str,
    num_threads: Threads,
) -> PyResult<()> {
    let conversion = Conversion::between(src_dtype, dst_dtype)?;
    Ok(detached_when_big(py, src.nbytes().max(dst.nbytes()), || match conversion {
        Conversion::Cast(kind) => cast::cast(kind, src.source(), dst.target(), num_threads.0),
        Conversion::Copy(dtype) => {
            dtype.elements(src.source().nbytes())?;
            copy::copy(src.source(), dst.target(), num_threads.0)
        }
    })?)
}
