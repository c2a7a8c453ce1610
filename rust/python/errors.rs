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
        | Error::ChunkIndex { .. }
        | Error::NotAccepted { .. }
        | Error::NamedTwice { .. }
        | Error::NotALease { .. }
        | Error::NotInline => "PayloadError",
        Error::Threads { .. } | Error::Grace { .. } | Error::Limit { .. } | Error::Spawn { .. } => "ConfigError",
        Error::NotFound { .. } => "SegmentNotFoundError",
        Error::Permission { .. } | Error::Foreign { .. } => "SegmentPermissionError",
        Error::NoSpace { .. } => "NoSpaceError",
        Error::Exists { .. } | Error::Kind { .. } | Error::Io { .. } => "SegmentError",
        Error::Size { .. } | Error::Range { .. } | Error::Truncated { .. } => "SegmentSizeError",
        Error::Timeout { .. } => TIMEOUT,
        Error::Closed { .. } | Error::Cancelled { .. } => "ClosedError",
        Error::Panicked { .. } | Error::Interrupted { .. } => "MmcopyError",
        Error::Endpoint(fault) => endpoint_class_name(fault),
        Error::Arena(fault) => arena_class_name(fault),
    }
}

const fn endpoint_class_name(fault: &endpoint::EndpointError) -> &'static str {
    match fault {
        endpoint::EndpointError::Directory { .. }
        | endpoint::EndpointError::PathLength { .. }
        | endpoint::EndpointError::Io { .. }
        | endpoint::EndpointError::Protocol { .. }
        | endpoint::EndpointError::Descriptors { .. } => "EndpointError",
        endpoint::EndpointError::NobodyListens { .. } | endpoint::EndpointError::Gone { .. } => "EndpointGoneError",
        endpoint::EndpointError::User { .. } | endpoint::EndpointError::Refused { .. } => "EndpointRefusedError",
        endpoint::EndpointError::Timeout { .. } => TIMEOUT,
    }
}

const fn arena_class_name(fault: &arena::ArenaError) -> &'static str {
    match fault {
        arena::ArenaError::Option { .. } => "ConfigError",
        arena::ArenaError::Memory { .. } => "ArenaMemoryError",
        arena::ArenaError::NoConsumer { .. }
        | arena::ArenaError::Io { .. }
        | arena::ArenaError::Offered { .. }
        | arena::ArenaError::Consumers { .. } => "ArenaError",
        arena::ArenaError::Full { .. } | arena::ArenaError::Share { .. } => "ArenaFullError",
        arena::ArenaError::Forged { .. } => "LeaseForgedError",
        arena::ArenaError::UnknownArena { .. } => "LeaseUnknownArenaError",
        arena::ArenaError::Stale { .. }
        | arena::ArenaError::Repeated { .. }
        | arena::ArenaError::Aborted { .. }
        | arena::ArenaError::OwnerGone { .. }
        | arena::ArenaError::Busy { .. } => "LeaseError",
        arena::ArenaError::Timeout { .. } | arena::ArenaError::Closing { .. } => TIMEOUT,
    }
}

const TIMEOUT: &str = "MmcopyTimeoutError";

/// What was waited for: the attribute `what` of an `MmcopyTimeoutError`.
const fn timed_out(error: &Error) -> Option<&'static str> {
    match error {
        Error::Timeout { .. } => Some("receive"),
        Error::Endpoint(endpoint::EndpointError::Timeout { .. }) => Some("endpoint"),
        Error::Arena(arena::ArenaError::Timeout { .. }) => Some("lease"),
        Error::Arena(arena::ArenaError::Closing { .. }) => Some("arena"),
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
