//! The directory that sockets live in: private to its owner, and cleared of what dead workers left.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::EndpointError;
use super::socket;
use crate::entry::{self, Identity};
use crate::fork::Process;

const PREFIX: &str = "mmcopy-";
const SUFFIX: &str = ".sock";
/// A socket has this suffix until it listens, so that nobody takes it for a dead worker's meanwhile.
const NEW_SUFFIX: &str = ".new";
/// A socket that does not listen yet is a dead worker's when it is as old as this.
const NEW_GRACE: Duration = Duration::from_secs(60);
/// `sun_path` less its NUL.
const MOST_PATH_BYTES: usize = 107;

/// Creates the directory when it is missing (mode 0700, or 0711 when other users are allowed), and checks that it is
/// ours and that nobody else can write to it.
pub(super) fn prepare(directory: &Path, is_for_others: bool) -> Result<(), EndpointError> {
    let failed = |operation| move |errno| io(directory, errno, operation);
    let mode = if is_for_others { 0o711 } else { 0o700 };
    let is_created = match rustix::fs::mkdir(directory, Mode::from_raw_mode(mode)) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(errno) => return Err(failed("creating the endpoint directory")(errno)),
    };
    let refused = |reason| EndpointError::Directory { path: directory.to_path_buf(), reason };
    // Whose it is can be asked of any directory, also of one that we may not read.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(directory, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::LOOP | Errno::NOTDIR => refused("it is a symbolic link or no directory".to_owned()),
        errno => failed("opening the endpoint directory")(errno),
    })?;
    let found = rustix::fs::fstat(&opened).map_err(failed("fstat"))?;
    let euid = rustix::process::geteuid().as_raw();
    if found.st_uid != euid {
        return Err(refused(format!(
            "it belongs to uid {}, we are uid {euid}: remove it, or choose another",
            found.st_uid
        )));
    }
    if is_created {
        // The umask may have taken bits away. The path is still that directory, which is ours.
        rustix::fs::chmod(directory, Mode::from_raw_mode(mode)).map_err(failed("chmod"))?;
        return Ok(());
    }
    let (forbidden, wanted) = if is_for_others { (0o022, "0711 or less") } else { (0o077, "0700") };
    let found_mode = found.st_mode & 0o7777;
    if found_mode & forbidden != 0 {
        return Err(refused(format!("others may use it: its mode is {found_mode:04o}, {wanted} wanted")));
    }
    Ok(())
}

/// Where the worker of this instance listens.
pub(super) fn socket_path(directory: &Path, instance: u64) -> Result<PathBuf, EndpointError> {
    let path = directory.join(format!("{PREFIX}{instance:016x}{SUFFIX}"));
    check_length(&path)?;
    Ok(path)
}

/// A path that does not fit a socket address is refused with the numbers.
pub(super) fn check_length(path: &Path) -> Result<(), EndpointError> {
    let nbytes = path.as_os_str().len();
    if nbytes > MOST_PATH_BYTES {
        return Err(EndpointError::PathLength { path: path.to_path_buf(), nbytes, most_bytes: MOST_PATH_BYTES });
    }
    Ok(())
}

/// A socket that listens at this path, and which file that is.
pub(super) fn listen(path: &Path, is_for_others: bool) -> Result<(OwnedFd, Identity), EndpointError> {
    let new = path.with_extension(&NEW_SUFFIX[1..]);
    let listening = listen_at(&new, is_for_others).and_then(|(socket, identity)| {
        rustix::fs::rename(&new, path).map_err(|errno| io(path, errno, "rename"))?;
        Ok((socket, identity))
    });
    if listening.is_err() {
        // The error that brought us here is the one to report. The name is new and ours.
        let _ = rustix::fs::unlink(&new);
    }
    listening
}

fn listen_at(path: &Path, is_for_others: bool) -> Result<(OwnedFd, Identity), EndpointError> {
    let failed = |operation| move |errno| io(path, errno, operation);
    let socket = socket::unconnected().map_err(failed("socket"))?;
    let address = socket::address(path).map_err(failed("making a socket address"))?;
    rustix::net::bind(&socket, &address).map_err(failed("bind"))?;
    let found = rustix::fs::lstat(path).map_err(failed("lstat"))?;
    let mode = if is_for_others { 0o666 } else { 0o600 };
    rustix::fs::chmod(path, Mode::from_raw_mode(mode)).map_err(failed("chmod"))?;
    rustix::net::listen(&socket, 128).map_err(failed("listen"))?;
    Ok((socket, Identity::of(&found)))
}

/// Removes the sockets of our user's workers that are dead: nobody accepts a connection there. How many. What cannot be
/// looked at is passed over.
pub(super) fn sweep(directory: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    entries.flatten().filter(|entry| is_dead(entry) == Some(true)).filter(|entry| remove(&entry.path())).count()
}

fn is_dead(entry: &std::fs::DirEntry) -> Option<bool> {
    let name = entry.file_name().into_string().ok()?;
    let stem = name.strip_prefix(PREFIX)?;
    let (digits, is_new) = match stem.strip_suffix(SUFFIX) {
        Some(digits) => (digits, false),
        None => (stem.strip_suffix(NEW_SUFFIX)?, true),
    };
    let is_id = digits.len() == 16 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let path = entry.path();
    let found = rustix::fs::lstat(&path).ok()?;
    let is_ours = FileType::from_raw_mode(found.st_mode) == FileType::Socket
        && found.st_uid == rustix::process::geteuid().as_raw();
    if !is_id || !is_ours {
        return Some(false);
    }
    if is_new {
        let made = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(u64::try_from(found.st_mtime).ok()?))?;
        return Some(made.elapsed().ok()? >= NEW_GRACE);
    }
    let socket = socket::unconnected().ok()?;
    Some(rustix::net::connect(&socket, &socket::address(&path).ok()?) == Err(Errno::CONNREFUSED))
}

fn remove(path: &Path) -> bool {
    // A name is random and used once, so what is there is what was looked at.
    rustix::fs::unlink(path).is_ok()
}

/// Removes the socket of a worker that ends, while it still is that file.
pub(super) fn remove_own(path: &Path, identity: Identity, owner: Process) {
    // What cannot be removed is a dead worker's from now on, and the next sweep's work.
    let _ = entry::remove(path, identity, owner);
}

pub(super) fn io(path: &Path, errno: Errno, operation: &'static str) -> EndpointError {
    EndpointError::Io { path: path.to_path_buf(), errno: errno.raw_os_error(), operation }
}
