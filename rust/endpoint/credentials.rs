//! Who is at the other end, as the kernel says.
//!
//! Not rustix's `socket_peercred`: its process id cannot be 0, and 0 is what the kernel says of a peer in a pid namespace
//! that we cannot see into. Only the user is looked at here.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use super::EndpointError;

/// The user that connected, or that listened when we connected.
pub(super) fn peer_uid(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut nbytes = size_of::<libc::ucred>() as libc::socklen_t;
    let place = (&raw mut found).cast();
    // SAFETY: `place` has `nbytes` bytes, which is what this option fills, and any bits are a valid ucred.
    let done =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, place, &raw mut nbytes) };
    if done == 0 {
        Ok(found.uid)
    } else {
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}

/// Our own user and those listed, no other.
pub(super) fn check(peer: &'static str, uid: u32, allowed_uids: &[u32]) -> Result<(), EndpointError> {
    let ours = rustix::process::geteuid().as_raw();
    if uid == ours || allowed_uids.contains(&uid) {
        return Ok(());
    }
    let mut allowed = format!("{ours} (ours)");
    for uid in allowed_uids {
        allowed.push_str(&format!(", {uid}"));
    }
    Err(EndpointError::User { peer, uid, allowed })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn our_own_pair_has_our_uid() {
        let (one, _two) = UnixStream::pair().unwrap();
        assert_eq!(peer_uid(one.as_fd()), Ok(rustix::process::geteuid().as_raw()));
        assert_eq!(peer_uid(tempfile::tempfile().unwrap().as_fd()), Err(Errno::NOTSOCK));
    }

    #[test]
    fn others_are_refused_with_the_numbers() {
        let ours = rustix::process::geteuid().as_raw();
        check("sender", ours, &[]).unwrap();
        check("sender", ours + 1, &[7, ours + 1]).unwrap();
        let refused = check("sender", ours + 1, &[7]).unwrap_err();
        assert_eq!(refused.to_string(), format!("the sender has uid {}; allowed: {ours} (ours), 7", ours + 1));
    }
}
