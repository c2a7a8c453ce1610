//! Mappings that no child keeps.

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::Advice;

use super::Process;

/// Regions that are listed at most; more are simply not there in a child.
const CAPACITY: usize = 1024;

/// A place is free while `start` is 0, and holds while `nbytes` is not.
struct Place {
    start: AtomicUsize,
    nbytes: AtomicUsize,
}

static LISTED: [Place; CAPACITY] =
    [const { Place { start: AtomicUsize::new(0), nbytes: AtomicUsize::new(0) } }; CAPACITY];

/// A shared mapping of which a child has none of the memory. In its place the child has zeros of its own: an object or a
/// numpy array that still has the address reads those, and neither a hole nor what the child maps there later.
#[derive(Debug)]
pub(crate) struct Region {
    place: Option<usize>,
    process: Process,
}

impl Region {
    /// # Safety
    ///
    /// * `start` is what `mmap` returned for `nbytes` bytes, at least 1.
    /// * They are mapped until [`Region::end`] was called.
    pub(crate) unsafe fn new(start: *mut u8, nbytes: usize) -> Self {
        let process = Process::current();
        let address = start.expose_provenance();
        let take = |place: &Place| {
            place.start.load(Ordering::Relaxed) == 0
                && place.start.compare_exchange(0, address, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let place = LISTED.iter().position(take);
        match place {
            Some(place) => LISTED[place].nbytes.store(nbytes, Ordering::Release),
            None => {
                // SAFETY: the caller's promise. Where the kernel refuses, a child keeps the memory as long as it lives.
                let _ = unsafe { rustix::mm::madvise(start.cast(), nbytes, Advice::LinuxDontFork) };
            }
        }
        Self { place, process }
    }

    /// Whether the memory is the mapping's, and not what a child has in its place.
    pub(crate) fn is_here(&self) -> bool {
        self.process.is_current()
    }

    /// Takes it off the list; whether the caller has to unmap it. Not in a child: what is there may be another's.
    pub(crate) fn end(&self) -> bool {
        let is_here = self.is_here();
        if let Some(place) = self.place.filter(|_| is_here) {
            LISTED[place].nbytes.store(0, Ordering::Relaxed);
            LISTED[place].start.store(0, Ordering::Release);
        }
        is_here
    }
}

/// For the handler in a child.
pub(super) fn replace_all() {
    for place in &LISTED {
        let (nbytes, start) = (place.nbytes.swap(0, Ordering::Acquire), place.start.swap(0, Ordering::Relaxed));
        // One that another thread was about to list or to unmap when the process forked stays.
        if start != 0 && nbytes != 0 {
            replace(ptr::with_exposed_provenance_mut(start), nbytes);
        }
    }
}

fn replace(start: *mut libc::c_void, nbytes: usize) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // Where memory is not overcommitted the kernel may refuse what can be written to.
    for protection in [libc::PROT_READ | libc::PROT_WRITE, libc::PROT_READ] {
        // SAFETY: these pages are a `Region`'s, which is inherited from now on, and whose views are of plain bytes.
        if unsafe { libc::mmap(start, nbytes, protection, flags, -1, 0) } != libc::MAP_FAILED {
            return;
        }
    }
    // SAFETY: as above.
    unsafe { libc::munmap(start, nbytes) };
}

#[cfg(test)]
mod tests {
    use super::super::tests::in_a_child;
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags};

    const NBYTES: usize = 3 * 4096 + 5;

    fn shared() -> *mut u8 {
        // SAFETY: no address is asked for, so nothing that is mapped already is touched.
        let mapped = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), NBYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)
        };
        mapped.unwrap().cast()
    }

    #[test]
    fn a_child_has_zeros_of_its_own_in_its_place() {
        let start = shared();
        // SAFETY: it was just mapped, and is unmapped behind `end`.
        let region = unsafe { Region::new(start, NBYTES) };
        let last = NBYTES - 1;
        // SAFETY: `start` has NBYTES bytes, of which there is no reference.
        let put = |at: usize, byte: u8| unsafe { start.wrapping_add(at).write_volatile(byte) };
        put(0, 7);
        put(last, 9);
        // SAFETY: as above.
        let read = |at: usize| unsafe { start.wrapping_add(at).read_volatile() };
        assert!(in_a_child(|| {
            let is_empty = !region.is_here() && read(0) == 0 && read(last) == 0;
            put(0, 1);
            is_empty && read(0) == 1 && !region.end()
        }));
        assert_eq!((read(0), read(last), region.is_here()), (7, 9, true));
        assert!(region.end());
        assert!(LISTED.iter().all(|place| place.start.load(Ordering::Relaxed) != start.addr()));
        // SAFETY: nothing uses it any more.
        unsafe { rustix::mm::munmap(start.cast(), NBYTES) }.unwrap();
    }
}
