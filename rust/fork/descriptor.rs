//! Descriptors that no child keeps.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use super::Process;

/// Descriptors that are listed at most; more are simply not closed in a child.
const CAPACITY: usize = 4096;
const FREE: i32 = -1;

static LISTED: [AtomicI32; CAPACITY] = [const { AtomicI32::new(FREE) }; CAPACITY];
/// Where a free place may be.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// A descriptor that no child keeps: there its number is closed, or another file's. Ask whether it [is here](Self::is_here)
/// before it is used.
#[derive(Debug)]
pub(crate) struct Descriptor {
    fd: ManuallyDrop<OwnedFd>,
    place: Option<usize>,
    process: Process,
}

impl Descriptor {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        let process = Process::current();
        let place = list(fd.as_raw_fd());
        Self { fd: ManuallyDrop::new(fd), place, process }
    }

    /// Whether this is the process that opened it, and not a child of that.
    pub(crate) fn is_here(&self) -> bool {
        self.process.is_current()
    }

    /// The process that opened it.
    pub(crate) const fn process(&self) -> Process {
        self.process
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if self.is_here() {
            // Before the number is free for somebody else's file.
            if let Some(place) = self.place {
                LISTED[place].store(FREE, Ordering::Relaxed);
            }
            // SAFETY: this is the only place that drops it, once. In a child the handler has closed it already.
            unsafe { ManuallyDrop::drop(&mut self.fd) }
        }
    }
}

fn list(number: i32) -> Option<usize> {
    let first = NEXT.load(Ordering::Relaxed);
    let take = |place: &usize| {
        let listed = &LISTED[*place];
        listed.load(Ordering::Relaxed) == FREE
            && listed.compare_exchange(FREE, number, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    let place = (0..CAPACITY).map(|step| (first + step) % CAPACITY).find(take)?;
    NEXT.store((place + 1) % CAPACITY, Ordering::Relaxed);
    Some(place)
}

/// For the handler in a child.
pub(super) fn close_all() {
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
    use super::super::tests::in_a_child;
    use super::*;

    fn is_open(number: i32) -> bool {
        // SAFETY: asking for the flags of any number is allowed.
        unsafe { libc::fcntl(number, libc::F_GETFD) != -1 }
    }

    #[test]
    fn a_child_has_none_of_the_descriptors_and_the_parent_all() {
        let descriptors: Vec<_> = (0..100).map(|_| Descriptor::new(tempfile::tempfile().unwrap().into())).collect();
        let numbers: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd().as_raw_fd()).collect();
        let is_listed = |number| LISTED.iter().any(|place| place.load(Ordering::Relaxed) == number);
        assert!(numbers.iter().all(|number| is_listed(*number)));
        assert!(in_a_child(|| {
            numbers.iter().all(|number| !is_open(*number)) && descriptors.iter().all(|descriptor| !descriptor.is_here())
        }));
        assert!(descriptors.iter().all(Descriptor::is_here));
        assert!(numbers.iter().all(|number| is_open(*number)));
        drop(descriptors);
        assert!(numbers.iter().all(|number| !is_listed(*number) || is_open(*number)));
    }
}
