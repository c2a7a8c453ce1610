//! The one mapping from the crate's errors to the classes of `mmcopy.errors`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::Error;
use crate::{arena, endpoint};

const fn class_name(error: &Error) -> &'static str {
    match error {
        Error::UnknownDtype { .. } | Error::UnsupportedCast { .. } | Error::HalfACast { .. } => "DtypeError",
        Error::Lengths { .. }
        | Error::PartialElement { .. }
        | Error::TooManyBytes { .. }
        | Error::Overlap { .. }
        | Error::Name { .. }
        | Error::ChunkOrder { .. }
        | Error::PieceRange { .. }
        | Error::PieceNumbers { .. }
        | Error::NoSuch { .. }
        | Error::OneChunk { .. }
        | Error::ChunkIndex { .. } => "PayloadError",
        Error::Threads { .. } | Error::Grace { .. } | Error::Limit { .. } | Error::Spawn { .. } => "ConfigError",
        Error::NotFound { .. } => "SegmentNotFoundError",
        Error::Permission { .. } => "SegmentPermissionError",
        Error::NoSpace { .. } => "NoSpaceError",
        Error::Exists { .. } | Error::Kind { .. } | Error::Io { .. } => "SegmentError",
        Error::Size { .. } | Error::Range { .. } | Error::Truncated { .. } => "SegmentSizeError",
        Error::Timeout { .. } => TIMEOUT,
        Error::Closed { .. } | Error::Cancelled { .. } => "ClosedError",
        Error::Panicked { .. } => "MmcopyError",
        Error::Endpoint(fault) => endpoint_class_name(fault),
        Error::Arena(fault) => arena_class_name(fault),
    }
}

const fn endpoint_class_name(fault: &endpoint::Fault) -> &'static str {
    match fault {
        endpoint::Fault::Directory { .. }
        | endpoint::Fault::PathLength { .. }
        | endpoint::Fault::Io { .. }
        | endpoint::Fault::Protocol { .. }
        | endpoint::Fault::Descriptors { .. } => "EndpointError",
        endpoint::Fault::NobodyListens { .. } | endpoint::Fault::Gone { .. } => "EndpointGoneError",
        endpoint::Fault::User { .. } | endpoint::Fault::Refused { .. } => "EndpointRefusedError",
        endpoint::Fault::Timeout { .. } => TIMEOUT,
    }
}

const fn arena_class_name(fault: &arena::Fault) -> &'static str {
    match fault {
        arena::Fault::Option { .. } => "ConfigError",
        arena::Fault::Memory { .. } => "ArenaMemoryError",
        arena::Fault::NoConsumer { .. }
        | arena::Fault::Io { .. }
        | arena::Fault::Offered { .. }
        | arena::Fault::Consumers { .. } => "ArenaError",
        arena::Fault::Full { .. } | arena::Fault::Share { .. } => "ArenaFullError",
        arena::Fault::Forged { .. } => "LeaseForgedError",
        arena::Fault::UnknownArena { .. } => "LeaseUnknownArenaError",
        arena::Fault::Stale { .. }
        | arena::Fault::Repeated { .. }
        | arena::Fault::Aborted { .. }
        | arena::Fault::OwnerGone { .. }
        | arena::Fault::Busy { .. } => "LeaseError",
        arena::Fault::Timeout { .. } | arena::Fault::Closing { .. } => TIMEOUT,
    }
}

const TIMEOUT: &str = "MmcopyTimeoutError";

/// What was waited for: the attribute `what` of an `MmcopyTimeoutError`.
const fn timed_out(error: &Error) -> Option<&'static str> {
    match error {
        Error::Timeout { .. } => Some("receive"),
        Error::Endpoint(endpoint::Fault::Timeout { .. }) => Some("endpoint"),
        Error::Arena(arena::Fault::Timeout { .. }) => Some("lease"),
        Error::Arena(arena::Fault::Closing { .. }) => Some("arena"),
        _ => None,
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        Python::attach(|py| build(py, &error).unwrap_or_else(|failure| failure))
    }
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("mmcopy.errors").map(Bound::unbind))?;
    let class = module.bind(py).getattr(class_name(error))?;
    let message = error.to_string();
    if let Some(what) = timed_out(error) {
        return Ok(PyErr::from_value(class.call1((what, message))?));
    }
    let raised = match error.os() {
        // OSError takes these three and has errno, strerror and filename from them.
        Some((errno, path)) => class.call1((errno, message, path.as_os_str()))?,
        None => class.call1((message,))?,
    };
    Ok(PyErr::from_value(raised))
}
