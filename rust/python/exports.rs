//! Memory of an arena as a Python buffer.
//!
//! Why the address stays valid: the exported buffer holds a reference to its Python object, which keeps the mapping, and a
//! writable one holds a `View`, which keeps the block from being given to another lease. What others write there
//! meanwhile changes bytes and nothing else (M1).
#![allow(unsafe_code)]

use std::ffi::c_int;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::arena::View;
use crate::memory::Source;

/// Fills `view` with read-only bytes.
///
/// # Safety
///
/// * `view` is what Python handed to `__getbuffer__` of `object`.
/// * The bytes stay valid while `object` lives.
pub(super) unsafe fn read_only(
    object: &Bound<'_, PyAny>,
    bytes: Source<'_>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    // SAFETY: the caller's promise; the buffer takes a reference to `object`.
    unsafe { fill(object, bytes.as_ptr().cast_mut(), bytes.nbytes(), true, view, flags) }
}

/// Fills `view` with writable bytes, and keeps the lease's view in it until [`release`].
///
/// # Safety
///
/// * `view` is what Python handed to `__getbuffer__` of `object`, whose `__releasebuffer__` calls [`release`].
pub(super) unsafe fn writable(
    object: &Bound<'_, PyAny>,
    lease: View,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let target = lease.target();
    // SAFETY: the caller's promise; the bytes stay valid while `lease` lives, which `view` keeps.
    unsafe { fill(object, target.as_mut_ptr(), target.nbytes(), false, view, flags) }?;
    // SAFETY: `view` is valid, and `internal` is the exporter's to use.
    unsafe { (*view).internal = Box::into_raw(Box::new(lease)).cast() };
    Ok(())
}

/// Lets go of what [`writable`] kept.
///
/// # Safety
///
/// * `view` was filled by [`writable`] and is released once.
pub(super) unsafe fn release(view: *mut ffi::Py_buffer) {
    // SAFETY: the caller's promise.
    let kept = unsafe { (*view).internal.cast::<View>() };
    if !kept.is_null() {
        // SAFETY: `writable` made it from a box, and this is the only place that takes it back.
        drop(unsafe { Box::from_raw(kept) });
    }
}

/// # Safety
///
/// * `view` is what Python handed to `__getbuffer__` of `object`.
/// * The bytes stay valid until the buffer is released.
unsafe fn fill(
    object: &Bound<'_, PyAny>,
    start: *mut u8,
    nbytes: usize,
    is_read_only: bool,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("no place for the buffer"));
    }
    // No loss: a mapping is smaller than isize::MAX.
    let length = nbytes as ffi::Py_ssize_t;
    // SAFETY: the caller's promise; the function checks the flags and raises by itself.
    let done = unsafe {
        ffi::PyBuffer_FillInfo(view, object.as_ptr(), start.cast(), length, c_int::from(is_read_only), flags)
    };
    if done == 0 { Ok(()) } else { Err(PyErr::fetch(object.py())) }
}
