//! The one mapping from the crate's errors to the classes of `mmcopy.errors`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::Error;
use crate::{arena, endpoint};

const fn class_name(error: &Error) -> &'static str {
    match error {
        Error::UnknownDtype { .. } => "UnknownDtypeError",
        Error::UnsupportedCast { .. } | Error::HalfACast { .. } => "CastError",
        Error::Lengths { .. } | Error::PartialElement { .. } | Error::TooManyBytes { .. } | Error::Overlap { .. } => {
            "PayloadError"
        }
        Error::Threads { .. } | Error::Grace { .. } | Error::Limit { .. } | Error::Spawn { .. } => "ConfigError",
        Error::Name { .. } => "SegmentNameError",
        Error::NotFound { .. } => "SegmentNotFoundError",
        Error::Permission { .. } => "SegmentPermissionError",
        Error::Exists { .. } => "SegmentExistsError",
        Error::Kind { .. } => "SegmentKindError",
        Error::NoSpace { .. } => "NoSpaceError",
        Error::Io { .. } => "SegmentIoError",
        Error::Size { .. } | Error::Range { .. } | Error::Truncated { .. } => "SegmentSizeError",
        Error::ChunkOrder { .. }
        | Error::PieceRange { .. }
        | Error::PieceNumbers { .. }
        | Error::NoSuch { .. }
        | Error::OneChunk { .. }
        | Error::ChunkIndex { .. } => "CopyPlanError",
        Error::Timeout { .. } => "ReceiveTimeoutError",
        Error::Closed { .. } | Error::Cancelled { .. } => "ClosedError",
        Error::Panicked { .. } => "MmcopyError",
        Error::Endpoint(fault) => endpoint_class_name(fault),
        Error::Arena(fault) => arena_class_name(fault),
    }
}

const fn endpoint_class_name(fault: &endpoint::Fault) -> &'static str {
    match fault {
        endpoint::Fault::Directory { .. } | endpoint::Fault::PathLength { .. } => "EndpointDirectoryError",
        endpoint::Fault::Io { .. } => "EndpointIoError",
        endpoint::Fault::NobodyListens { .. } | endpoint::Fault::Gone { .. } => "EndpointGoneError",
        endpoint::Fault::User { .. } | endpoint::Fault::Refused { .. } => "EndpointRefusedError",
        endpoint::Fault::Protocol { .. } | endpoint::Fault::Descriptors { .. } => "EndpointProtocolError",
        endpoint::Fault::Timeout { .. } => "EndpointTimeoutError",
    }
}

const fn arena_class_name(fault: &arena::Fault) -> &'static str {
    match fault {
        arena::Fault::Option { .. } => "ConfigError",
        arena::Fault::NoConsumer { .. } => "ArenaConsumerError",
        arena::Fault::Memory { .. } => "ArenaMemoryError",
        arena::Fault::Io { .. } | arena::Fault::Offered { .. } | arena::Fault::Consumers { .. } => "ArenaError",
        arena::Fault::Full { .. } | arena::Fault::Share { .. } => "ArenaFullError",
        arena::Fault::Forged { .. } => "LeaseForgedError",
        arena::Fault::UnknownArena { .. } => "LeaseUnknownArenaError",
        arena::Fault::Stale { .. } => "LeaseStaleError",
        arena::Fault::Repeated { .. } => "LeaseRepeatedError",
        arena::Fault::Aborted { .. } => "LeaseAbortedError",
        arena::Fault::OwnerGone { .. } => "LeaseOwnerGoneError",
        arena::Fault::Busy { .. } => "LeaseBusyError",
        arena::Fault::Timeout { .. } | arena::Fault::Closing { .. } => "LeaseTimeoutError",
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
    let raised = match error.os() {
        // OSError takes these three and has errno, strerror and filename from them.
        Some((errno, path)) => class.call1((errno, message, path.as_os_str()))?,
        None => class.call1((message,))?,
    };
    Ok(PyErr::from_value(raised))
}
