//! What a child made by `fork` keeps of ours: no descriptor, and no right to use an object.
//!
//! Close-on-exec covers children that start another program. A child that goes on in our image would share our sockets,
//! and a socket that somebody still has open does not tell the peer that we have died. So descriptors that mean "this
//! process is alive" are listed here, and a handler that `fork` runs in the child closes them there. What is not covered:
//! a descriptor that another thread gets from the kernel in the moment of the fork and has not listed yet, and `clone`
//! without the C library.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use rustix::process::Pid;

/// Descriptors that are listed at most; more are simply not closed in a child.
const CAPACITY: usize = 1024;
const FREE: i32 = -1;

static FORKS: AtomicU64 = AtomicU64::new(0);
static LISTED: [AtomicI32; CAPACITY] = [const { AtomicI32::new(FREE) }; CAPACITY];
static HANDLER: Once = Once::new();

/// The process that something belongs to. A process id alone would not do: a child in a new pid namespace can have its
/// parent's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    pid: Pid,
    forks: u64,
}

impl Process {
    /// The one that runs this.
    pub(crate) fn current() -> Self {
        // SAFETY: the handler is a function of this program and does only what is allowed after a fork: atomic
        // operations and `close`. A refusal (no memory) leaves the process id.
        HANDLER.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) });
        Self { pid: rustix::process::getpid(), forks: FORKS.load(Ordering::Relaxed) }
    }

    /// Whether this is still it, and not a child of it.
    pub(crate) fn is_current(self) -> bool {
        self == Self::current()
    }

    /// Its number in its own pid namespace: for messages, not an identity.
    #[cfg(feature = "python")]
    pub(crate) fn pid(self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// A process that is not this one, though it has its number.
    #[cfg(test)]
    pub(crate) fn elsewhere() -> Self {
        let here = Self::current();
        Self { forks: here.forks + 1, ..here }
    }
}

/// A descriptor that no child keeps.
#[derive(Debug)]
pub(crate) struct Descriptor {
    fd: ManuallyDrop<OwnedFd>,
    place: Option<usize>,
    process: Process,
}

impl Descriptor {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        let process = Process::current();
        let number = fd.as_raw_fd();
        let is_taken =
            |place: &AtomicI32| place.compare_exchange(FREE, number, Ordering::Relaxed, Ordering::Relaxed).is_err();
        let place = LISTED.iter().position(|place| !is_taken(place));
        Self { fd: ManuallyDrop::new(fd), place, process }
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if self.process.is_current() {
            // Before the number is free for somebody else's file.
            if let Some(place) = self.place {
                LISTED[place].store(FREE, Ordering::Relaxed);
            }
            // SAFETY: this is the only place that drops it, once. In a child the handler has closed it already.
            unsafe { ManuallyDrop::drop(&mut self.fd) }
        }
    }
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for place in &LISTED {
        let number = place.swap(FREE, Ordering::Relaxed);
        if number != FREE {
            // SAFETY: the number is that of a `Descriptor`, which is inherited from now on and does not use it.
            unsafe { libc::close(number) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The child's answer as an exit code; it may not use anything that another thread could have locked.
    fn in_a_child(check: impl Fn() -> bool) -> bool {
        // SAFETY: the child does system calls and atomic operations only, and leaves without running destructors.
        match unsafe { libc::fork() } {
            0 => {
                let code = i32::from(!check());
                // SAFETY: it ends this process.
                unsafe { libc::_exit(code) }
            }
            child => {
                let mut status = 0;
                // SAFETY: `status` is a valid place for the answer.
                let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
                waited == child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
            }
        }
    }

    fn is_open(number: i32) -> bool {
        // SAFETY: asking for the flags of any number is allowed.
        unsafe { libc::fcntl(number, libc::F_GETFD) != -1 }
    }

    #[test]
    fn a_child_has_none_of_the_descriptors_and_the_parent_all() {
        let descriptor = Descriptor::new(tempfile::tempfile().unwrap().into());
        let number = descriptor.as_fd().as_raw_fd();
        let process = Process::current();
        assert!(process.is_current());
        assert!(in_a_child(|| !is_open(number) && !process.is_current()));
        assert!(is_open(number) && process.is_current());
        drop(descriptor);
        assert!(LISTED.iter().all(|place| place.load(Ordering::Relaxed) != number) || is_open(number));
    }
}
