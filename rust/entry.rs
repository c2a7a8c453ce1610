//! Directory entries: one is removed only while it still is the file that we mean.

use std::path::Path;

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use crate::fork::Process;
use crate::{Error, Result};

/// What tells one file of a host from every other, as long as it is open anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    pub(crate) const fn of(found: &Stat) -> Self {
        Self { device: found.st_dev, inode: found.st_ino }
    }
}

/// Removes the entry when it still is this very file. False when the entry is gone or is another file. Whoever calls
/// keeps the file open, so its inode number cannot have been given to another file.
///
/// The one place where a file that others know is removed: it is `owner`'s to do, the process that made the file or that it
/// was handed to, and no process's that was forked from it.
pub(crate) fn remove(path: &Path, identity: Identity, owner: Process) -> Result<bool> {
    if !owner.is_current() {
        return Err(Error::Closed { what: format!("{}, which is the parent process's", path.display()) });
    }
    let failed = |errno| Error::from_errno(errno, "unlink", path, 0);
    if !is_at(path, identity).map_err(failed)? {
        return Ok(false);
    }
    match rustix::fs::unlink(path) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(failed(errno)),
    }
}

/// Whether the entry is this very file.
pub(crate) fn is_at(path: &Path, identity: Identity) -> std::result::Result<bool, Errno> {
    match rustix::fs::lstat(path) {
        Ok(found) => Ok(Identity::of(&found) == identity),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// The kind in words, for anything but a regular file.
pub(crate) fn unusual_kind(found: &Stat) -> Option<&'static str> {
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => None,
        FileType::Directory => Some("a directory"),
        FileType::Symlink => Some("a symbolic link"),
        FileType::Fifo => Some("a FIFO"),
        FileType::Socket => Some("a socket"),
        FileType::CharacterDevice => Some("a character device"),
        FileType::BlockDevice => Some("a block device"),
        FileType::Unknown => Some("a file of unknown kind"),
    }
}
