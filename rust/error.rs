//! The one error type of the crate. Every variant carries the numbers that its message prints.

use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// What every fallible function of the crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Who owns a file that we may not open, as far as a `stat` could tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// Owner's user id.
    pub uid: u32,
    /// Permission bits.
    pub mode: u32,
}

/// Everything that can go wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A dtype name outside the closed table.
    #[error("unknown dtype {name:?}; known: {known}")]
    UnknownDtype {
        /// As given.
        name: String,
        /// Comma-separated names of the table.
        known: String,
    },
    /// A pair that is not cast between.
    #[error("no cast from {from} to {to}; supported: {supported}")]
    UnsupportedCast {
        /// Source dtype.
        from: &'static str,
        /// Target dtype.
        to: &'static str,
        /// Comma-separated pairs.
        supported: String,
    },
    /// One of two dtypes that go together is missing.
    #[error("src_dtype and dst_dtype go together: got {src_dtype} and {dst_dtype}")]
    HalfACast {
        /// Source dtype or "None".
        src_dtype: String,
        /// Target dtype or "None".
        dst_dtype: String,
    },
    /// Source and target differ in length.
    #[error("source has {src_nbytes} bytes, target has {dst_nbytes}; {wanted_nbytes} wanted")]
    Lengths {
        /// Bytes of the source.
        src_nbytes: usize,
        /// Bytes of the target.
        dst_nbytes: usize,
        /// Bytes that the target should have.
        wanted_nbytes: usize,
    },
    /// The bytes are not a whole number of elements.
    #[error("{nbytes} bytes are not a whole number of {dtype} elements of {itemsize} bytes")]
    PartialElement {
        /// Bytes given.
        nbytes: usize,
        /// Their dtype.
        dtype: &'static str,
        /// Bytes an element.
        itemsize: usize,
    },
    /// A cast whose result has more bytes than an address space.
    #[error("{elements} {dtype} elements are more bytes than can be addressed")]
    TooManyBytes {
        /// Number of elements.
        elements: usize,
        /// Their dtype.
        dtype: &'static str,
    },
    /// A cast onto its own input.
    #[error("source ({src_nbytes} bytes) and target ({dst_nbytes} bytes) of a cast share memory")]
    Overlap {
        /// Bytes of the source.
        src_nbytes: usize,
        /// Bytes of the target.
        dst_nbytes: usize,
    },
    /// A number of threads below one.
    #[error("num_threads must be at least 1, got {num_threads}")]
    Threads {
        /// As given.
        num_threads: i64,
    },
    /// A grace period that is negative or not a number.
    #[error("orphan_grace_s must be a number of seconds of at least 0, got {given}")]
    Grace {
        /// As given.
        given: String,
    },
    /// Not the name of a segment.
    #[error("bad segment name {name:?}: {reason}")]
    Name {
        /// As given.
        name: String,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// ENOENT.
    #[error("no such segment: consumed, taken back by its sender, or in another file system than {}", .path.parent().unwrap_or(Path::new("/")).display())]
    NotFound {
        /// The file.
        path: PathBuf,
    },
    /// EACCES, EPERM or EROFS.
    #[error("{operation} refused ({}): {}we are uid {euid}", strerror(*.errno), owned_by(*.ownership))]
    Permission {
        /// The file.
        path: PathBuf,
        /// The system call's errno.
        errno: i32,
        /// What was tried.
        operation: &'static str,
        /// Owner and mode of the file, when they could be read.
        ownership: Option<Ownership>,
        /// Our effective user id.
        euid: u32,
    },
    /// EEXIST.
    #[error("a file of this name exists already and is left alone")]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// Not a regular file.
    #[error("not a regular file but {kind}; it is left alone")]
    Kind {
        /// The file.
        path: PathBuf,
        /// The nearest errno.
        errno: i32,
        /// What it is instead.
        kind: &'static str,
    },
    /// ENOSPC, EDQUOT or ENOMEM.
    #[error("no space for {wanted_nbytes} bytes on {} ({}): {}", .mount.display(), strerror(*.errno), free(*.free_nbytes, *.free_files))]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// The system call's errno.
        errno: i32,
        /// Bytes asked for.
        wanted_nbytes: u64,
        /// Bytes that the file system had free right after, if known.
        free_nbytes: Option<u64>,
        /// Files that it could still hold, if known.
        free_files: Option<u64>,
        /// Where the file system is mounted.
        mount: PathBuf,
    },
    /// Any other failure of a system call.
    #[error("{operation} failed: {}", strerror(*.errno))]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system call's errno.
        errno: i32,
        /// What was tried.
        operation: &'static str,
    },
    /// The range is outside the file.
    #[error("segment {name:?}: wanted {wanted_nbytes} bytes at offset {offset}, but the file has {file_nbytes} bytes")]
    Size {
        /// Segment.
        name: String,
        /// First byte wanted.
        offset: u64,
        /// Bytes wanted.
        wanted_nbytes: u64,
        /// Bytes of the file.
        file_nbytes: u64,
    },
    /// An offset or length that no file can have.
    #[error(
        "segment {name:?}: offset {offset} and {wanted_nbytes} bytes wanted are not two numbers from 0 to 2**64 - 1; the file has {file_nbytes} bytes"
    )]
    Range {
        /// Segment.
        name: String,
        /// As given.
        offset: String,
        /// As given.
        wanted_nbytes: String,
        /// Bytes of the file.
        file_nbytes: u64,
    },
    /// A peer cut the file while it was read.
    #[error(
        "segment {name:?} was truncated while it was read: wanted {wanted_nbytes} bytes at offset {offset}, found {found_nbytes} (the file had {file_nbytes} bytes when it was opened)"
    )]
    Truncated {
        /// Segment.
        name: String,
        /// First byte wanted.
        offset: u64,
        /// Bytes wanted.
        wanted_nbytes: u64,
        /// Bytes that were still there.
        found_nbytes: u64,
        /// Bytes of the file when it was opened.
        file_nbytes: u64,
    },
    /// The pieces of a job are not numbered by chunk.
    #[error(
        "piece {piece} belongs to chunk {chunk}, but pieces come in the order of their chunks, without gaps: {expected} wanted"
    )]
    ChunkOrder {
        /// Place in the table.
        piece: usize,
        /// Its chunk.
        chunk: u64,
        /// Which chunks fit here.
        expected: String,
    },
    /// A piece of a job that is not inside its source or its slot.
    #[error(
        "piece {piece} of chunk {chunk}: wanted {wanted_nbytes} bytes at {start} of {kind} {index}, which has {nbytes} bytes"
    )]
    PieceRange {
        /// Place in the table.
        piece: usize,
        /// Its chunk.
        chunk: usize,
        /// "source", "slot", "item" or "base".
        kind: &'static str,
        /// Which one.
        index: u64,
        /// First byte wanted.
        start: u64,
        /// Bytes wanted.
        wanted_nbytes: u64,
        /// Bytes that there are.
        nbytes: u64,
    },
    /// A piece of a job names a source or slot that there is not.
    #[error("piece {piece} of chunk {chunk}: {kind} {index} wanted, but there are {count}")]
    NoSuch {
        /// Place in the table.
        piece: usize,
        /// Its chunk.
        chunk: u64,
        /// "source", "slot", "item" or "base".
        kind: &'static str,
        /// Which one.
        index: u64,
        /// How many there are.
        count: usize,
    },
    /// A chunk that the job does not have.
    #[error("chunk {index} wanted, but the job has {num_chunks}, counted from 0")]
    ChunkIndex {
        /// As given.
        index: String,
        /// Chunks of the job.
        num_chunks: usize,
    },
    /// More chunks than one slot can take.
    #[error("{num_chunks} chunks for one slot, want one")]
    OneChunk {
        /// Chunks of the pieces.
        num_chunks: usize,
    },
    /// A piece with a number that is none of its kind.
    #[error("piece {piece}: {given} is not five numbers from 0 to 2**64 - 1")]
    PieceNumbers {
        /// Place in the table.
        piece: usize,
        /// As given.
        given: String,
    },
    /// The limit of a wait is not a number.
    #[error("timeout_s must be a number of seconds, got {given}")]
    Limit {
        /// As given.
        given: String,
    },
    /// A wait reached its limit.
    #[error("{what} did not end within {waited:?}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// The limit.
        waited: std::time::Duration,
    },
    /// The job was cancelled before this chunk was there.
    #[error("the copy job was cancelled before chunk {chunk} was copied")]
    Cancelled {
        /// The chunk.
        chunk: usize,
    },
    /// The caller gave a wait up.
    #[error("{what} was interrupted after {waited:?}")]
    Interrupted {
        /// What was waited for.
        what: String,
        /// How long.
        waited: std::time::Duration,
    },
    /// A segment whose name is not accepted.
    #[error("segment {name:?} is refused: accepted names begin with {prefixes}")]
    NotAccepted {
        /// Its name.
        name: String,
        /// Comma-separated.
        prefixes: String,
    },
    /// A file of another user than the one that it is read for.
    #[error("{} belongs to user {uid}, and is read for user {wanted_uid}", .path.display())]
    Foreign {
        /// Its path.
        path: PathBuf,
        /// Its owner.
        uid: u32,
        /// Whose it should be.
        wanted_uid: u32,
    },
    /// Two items of one request name the same segment.
    #[error("segment {name:?} is named twice in one request")]
    NamedTwice {
        /// Its name.
        name: String,
    },
    /// A lease is wanted, and the item is not one.
    #[error("item {index} is not a lease")]
    NotALease {
        /// Which open item.
        index: usize,
    },
    /// Bytes in the message are wanted, and the item names shared memory.
    #[error("an item of a part must be in the message or open already")]
    NotInline,
    /// The code that copied a chunk panicked.
    #[error("copying chunk {chunk} ended in a panic")]
    Panicked {
        /// The chunk.
        chunk: usize,
    },
    /// The system refused a thread.
    #[error("the system refused thread {thread} of {num_threads}: {reason}")]
    Spawn {
        /// Which one, counted from 0.
        thread: usize,
        /// Threads wanted.
        num_threads: usize,
        /// The system's words.
        reason: String,
    },
    /// Use after `close`, or of an object that belongs to the process we were forked from.
    #[error("{what} is closed, or belongs to the process that this one was forked from")]
    Closed {
        /// The object.
        what: String,
    },
    /// Between a worker's endpoint and a sender's link.
    #[error(transparent)]
    Endpoint(#[from] crate::endpoint::EndpointError),
    /// Of an arena or a lease.
    #[error(transparent)]
    Arena(#[from] crate::arena::ArenaError),
}

impl Error {
    /// Turns the errno of a system call on `path` into the variant that fits. Looks at the file and its file system
    /// again for the numbers, and says less when it cannot.
    pub(crate) fn from_errno(errno: Errno, operation: &'static str, path: &Path, wanted_nbytes: u64) -> Self {
        let code = errno.raw_os_error();
        let path_owned = path.to_path_buf();
        match errno {
            Errno::NOENT => Self::NotFound { path: path_owned },
            Errno::EXIST => Self::Exists { path: path_owned },
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Self::Permission {
                ownership: rustix::fs::lstat(path)
                    .ok()
                    .map(|found| Ownership { uid: found.st_uid, mode: found.st_mode & 0o7777 }),
                path: path_owned,
                errno: code,
                operation,
                euid: rustix::process::geteuid().as_raw(),
            },
            Errno::NOSPC | Errno::DQUOT | Errno::NOMEM => {
                let directory = path.parent().unwrap_or(path);
                let room = rustix::fs::statvfs(directory).ok();
                Self::NoSpace {
                    errno: code,
                    wanted_nbytes,
                    free_nbytes: room.as_ref().map(|room| room.f_bavail.saturating_mul(room.f_frsize)),
                    free_files: room.as_ref().map(|room| room.f_favail),
                    mount: crate::namespace::mount_of(directory),
                    path: path_owned,
                }
            }
            _ => Self::Io { path: path_owned, errno: code, operation },
        }
    }

    /// The errno and file of an error that came from the operating system.
    pub fn os(&self) -> Option<(i32, &Path)> {
        match self {
            Self::NotFound { path } => Some((Errno::NOENT.raw_os_error(), path)),
            Self::Exists { path } => Some((Errno::EXIST.raw_os_error(), path)),
            Self::Permission { path, errno, .. }
            | Self::Kind { path, errno, .. }
            | Self::NoSpace { path, errno, .. }
            | Self::Io { path, errno, .. } => Some((*errno, path)),
            Self::Endpoint(fault) => fault.os(),
            _ => None,
        }
    }

    /// The message, behind the path of the file that it is about.
    pub fn with_path(&self) -> String {
        match self.os() {
            Some((_, path)) => format!("{}: {self}", path.display()),
            None => self.to_string(),
        }
    }
}

/// The system's words for an errno, without the "(os error 2)" that the standard library adds.
pub(crate) fn strerror(errno: i32) -> String {
    let mut text = std::io::Error::from_raw_os_error(errno).to_string();
    if let Some(end) = text.rfind(" (os error") {
        text.truncate(end);
    }
    text
}

fn owned_by(ownership: Option<Ownership>) -> String {
    ownership.map_or_else(String::new, |found| format!("owner uid {}, mode {:04o}; ", found.uid, found.mode))
}

fn free(nbytes: Option<u64>, files: Option<u64>) -> String {
    match (nbytes, files) {
        // tmpfs without a limit on inodes reports 0 of 0, so only the byte count is always meaningful.
        (Some(nbytes), Some(files)) => format!("{nbytes} bytes and {files} files free"),
        _ => "free space unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strerror_is_the_bare_text() {
        assert_eq!(strerror(Errno::NOENT.raw_os_error()), "No such file or directory");
    }

    #[test]
    fn permission_message_carries_owner_mode_and_our_uid() {
        let error = Error::Permission {
            path: "/dev/shm/x".into(),
            errno: Errno::ACCESS.raw_os_error(),
            operation: "open",
            ownership: Some(Ownership { uid: 1000, mode: 0o600 }),
            euid: 65534,
        };
        assert_eq!(error.to_string(), "open refused (Permission denied): owner uid 1000, mode 0600; we are uid 65534");
    }

    #[test]
    fn no_space_counts_the_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let error = Error::from_errno(Errno::NOSPC, "fallocate", &directory.path().join("x"), 77);
        let Error::NoSpace { wanted_nbytes: 77, free_nbytes: Some(free), mount, .. } = &error else {
            panic!("{error:?}");
        };
        assert!(*free > 0);
        assert!(directory.path().starts_with(mount), "{}", mount.display());
        assert!(error.to_string().contains("no space for 77 bytes on /"), "{error}");
    }
}
