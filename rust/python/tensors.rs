//! Instances of `mmcopy.tensors`' classes for what was made here. They are not validated: their fields are right by
//! construction. What comes from outside goes through the classes' own constructors.
#![allow(unsafe_code)] // frozen classes are filled below their own __init__ and __setattr__

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyInt, PyString, PyTuple, PyType};

use crate::arena::LeaseHandle;

struct Classes {
    tensor_data: Py<PyType>,
    shm_handle: Py<PyType>,
}

/// The TensorData of a lease. `dtype` is of the table and `shape` a tuple of int, whose bytes are the lease's.
pub(super) fn of_lease<'py>(
    handle: &LeaseHandle,
    owner_id: &Bound<'py, PyString>,
    dtype: &Bound<'py, PyString>,
    shape: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = dtype.py();
    let classes = classes(py)?;
    let payload = bare(classes.shm_handle.bind(py))?;
    set(&payload, intern!(py, "name"), PyString::new(py, &handle.name()).as_any())?;
    set(&payload, intern!(py, "offset"), PyInt::new(py, handle.offset()).as_any())?;
    set(&payload, intern!(py, "nbytes"), PyInt::new(py, handle.nbytes()).as_any())?;
    set(&payload, intern!(py, "owner_id"), owner_id.as_any())?;
    let data = bare(classes.tensor_data.bind(py))?;
    set(&data, intern!(py, "dtype"), dtype.as_any())?;
    set(&data, intern!(py, "shape"), shape.as_any())?;
    set(&data, intern!(py, "payload"), &payload)?;
    Ok(data)
}

fn classes(py: Python<'_>) -> PyResult<&Classes> {
    static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();
    CLASSES.get_or_try_init(py, || {
        let module = py.import("mmcopy.tensors")?;
        let class = |name| Ok::<_, PyErr>(module.getattr(name)?.cast_into::<PyType>()?.unbind());
        Ok(Classes { tensor_data: class("TensorData")?, shm_handle: class("ShmHandle")? })
    })
}

/// An instance of a class that has slots and neither `__new__` nor a base other than object, with no slot set.
fn bare<'py>(class: &Bound<'py, PyType>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: it allocates by the type, which lives, and looks at neither argument.
    let made = unsafe { ffi::PyType_GenericNew(class.as_type_ptr(), std::ptr::null_mut(), std::ptr::null_mut()) };
    // SAFETY: a new reference, or null with an error set.
    unsafe { Bound::from_owned_ptr_or_err(class.py(), made) }
}

/// `object.__setattr__`, since the classes' own refuses.
fn set(instance: &Bound<'_, PyAny>, name: &Bound<'_, PyString>, value: &Bound<'_, PyAny>) -> PyResult<()> {
    // SAFETY: three objects that live.
    let done = unsafe { ffi::PyObject_GenericSetAttr(instance.as_ptr(), name.as_ptr(), value.as_ptr()) };
    if done == 0 { Ok(()) } else { Err(PyErr::fetch(instance.py())) }
}
