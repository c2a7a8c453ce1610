//! What can go wrong between two ends.

use std::path::PathBuf;
use std::time::Duration;

/// A failure of an endpoint or a link.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// The directory is not one that a socket may be put into.
    #[error("endpoint directory {} is refused: {reason}", .path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Which rule it breaks, with the numbers.
        reason: String,
    },
    /// The path does not fit a socket address.
    #[error(
        "socket path {path:?} has {nbytes} bytes, at most {most_bytes} fit a unix socket address: choose a shorter directory"
    )]
    PathLength {
        /// The path.
        path: PathBuf,
        /// Its length.
        nbytes: usize,
        /// The limit.
        most_bytes: usize,
    },
    /// A system call failed.
    #[error("{operation} failed: {}", crate::error::strerror(*.errno))]
    Io {
        /// The socket or directory.
        path: PathBuf,
        /// The system call's errno.
        errno: i32,
        /// What was tried.
        operation: &'static str,
    },
    /// No worker listens there.
    #[error("no worker listens there: {}", crate::error::strerror(*.errno))]
    NobodyListens {
        /// The socket.
        path: PathBuf,
        /// The system call's errno.
        errno: i32,
    },
    /// The other end has gone.
    #[error("the {peer} has gone: the connection is closed")]
    Gone {
        /// "worker" or "sender".
        peer: &'static str,
    },
    /// The peer's user is not one of those allowed.
    #[error("the {peer} has uid {uid}; allowed: {allowed}")]
    User {
        /// "worker" or "sender".
        peer: &'static str,
        /// The peer's user.
        uid: u32,
        /// Comma-separated.
        allowed: String,
    },
    /// The peer said no.
    #[error("refused by the worker: {reason}")]
    Refused {
        /// In the peer's words.
        reason: String,
        /// Its errno, or 0.
        errno: i32,
    },
    /// A frame that breaks the protocol.
    #[error("protocol error: {reason}")]
    Protocol {
        /// Which rule, with the numbers.
        reason: String,
    },
    /// Descriptors were lost on the way.
    #[error(
        "descriptors were lost on the way: {found} of {wanted} arrived; at most {limit} may be open in this process (ulimit -n)"
    )]
    Descriptors {
        /// How many belong to the frame.
        wanted: usize,
        /// How many came.
        found: usize,
        /// The soft limit of open descriptors.
        limit: String,
    },
    /// The peer did not answer in time.
    #[error("{what} did not end within {waited:?}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// The limit.
        waited: Duration,
    },
}

impl EndpointError {
    /// The errno and file, for what came from the operating system.
    pub(crate) fn os(&self) -> Option<(i32, &std::path::Path)> {
        match self {
            Self::Io { path, errno, .. } | Self::NobodyListens { path, errno } if !path.as_os_str().is_empty() => {
                Some((*errno, path))
            }
            _ => None,
        }
    }
}
