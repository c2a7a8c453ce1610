//! What a child made by `fork` keeps of ours: no descriptor, no shared memory, and no right to use an object.
//!
//! Close-on-exec covers children that start another program. A child that goes on in our image would share our sockets,
//! and a socket that somebody still has open does not tell the peer that we have died; it would keep the memory of arenas
//! and segments, too. So descriptors and mappings are listed here, and a handler that `fork` runs in the child closes
//! those and puts zeros in the place of these. What is not covered: what another thread gets from the kernel in the moment
//! of the fork and has not listed yet, and `clone` without the C library.
#![allow(unsafe_code)]

mod descriptor;
mod region;

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::Pid;

pub(crate) use self::descriptor::Descriptor;
pub(crate) use self::region::Region;

/// Bytes of the page that a child finds empty.
const PAGE_BYTES: usize = 4096;

/// The highest number that this process or one that it was forked from has taken.
static NUMBERS: AtomicU64 = AtomicU64::new(0);
/// This process's number, in a page that the kernel empties in a child; null before it was asked for.
static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// The same where the kernel does not empty pages. Only the fork handler clears it.
static PLAIN_WORD: AtomicU64 = AtomicU64::new(0);
static HAS_HANDLER: AtomicBool = AtomicBool::new(false);

/// The process that something belongs to. A process id alone would not do: a child in a new pid namespace can have its
/// parent's number. Asking the kernel for it would also cost more than all else that a small lease needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    /// No process has the number of one that it was forked from.
    number: u64,
    pid: Pid,
}

impl Process {
    /// The one that runs this.
    pub(crate) fn current() -> Self {
        // No lock: a child that is forked in the middle of this could not take it. Twice registered is harmless.
        if !HAS_HANDLER.load(Ordering::Acquire) {
            // SAFETY: the handler is a function of this program and does only what is allowed after a fork: atomic
            // operations and system calls. A refusal (no memory) leaves the page, or the process id.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            HAS_HANDLER.store(true, Ordering::Release);
        }
        Self { number: number(word()), pid: rustix::process::getpid() }
    }

    /// Whether this is still it, and not a child of it.
    pub(crate) fn is_current(self) -> bool {
        self.is_named_by(word())
    }

    fn is_named_by(self, word: &AtomicU64) -> bool {
        let is_same = word.load(Ordering::Relaxed) == self.number;
        is_same && (!ptr::eq(word, &raw const PLAIN_WORD) || self.pid == rustix::process::getpid())
    }

    /// Its number in its own pid namespace: for messages, not an identity.
    #[cfg(feature = "python")]
    pub(crate) fn pid(self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// A process that is not this one, though it has its process id.
    #[cfg(test)]
    pub(crate) fn elsewhere() -> Self {
        let here = Self::current();
        Self { number: here.number + 1, ..here }
    }
}

/// What the word says, once it says something. Relaxed: numbers are compared, and order nothing.
fn number(word: &AtomicU64) -> u64 {
    match word.load(Ordering::Relaxed) {
        0 => {
            let next = NUMBERS.fetch_add(1, Ordering::Relaxed) + 1;
            word.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|found| found, |_| next)
        }
        found => found,
    }
}

fn word() -> &'static AtomicU64 {
    let word = WORD.load(Ordering::Acquire);
    // SAFETY: it is null, or a word that lives as long as the program.
    unsafe { word.as_ref() }.unwrap_or_else(find_word)
}

#[cold]
fn find_word() -> &'static AtomicU64 {
    let fresh = emptied_page().unwrap_or_else(|| ptr::from_ref(&PLAIN_WORD).cast_mut());
    let found = WORD.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire);
    // The page of a thread that was second stays: it happens once in a process, if at all.
    let word = found.map_or_else(|first| first, |_| fresh);
    // SAFETY: no page is unmapped again, and the other is a static.
    unsafe { &*word }
}

/// A page that is zero here, and again in each child; None where the kernel has none (before Linux 4.14).
fn emptied_page() -> Option<*mut AtomicU64> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: no address is asked for, so nothing that is mapped already is touched.
    let page =
        unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), PAGE_BYTES, protection, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: this page was just mapped and nothing has its address.
    let advised = unsafe { rustix::mm::madvise(page, PAGE_BYTES, Advice::LinuxWipeOnFork) };
    if advised.is_err() {
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::munmap(page, PAGE_BYTES) };
        return None;
    }
    Some(page.cast())
}

extern "C" fn in_child() {
    // The kernel has done it where `clone` was called without the C library, and this where the kernel does not.
    word().store(0, Ordering::Relaxed);
    descriptor::close_all();
    region::replace_all();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The child's answer as an exit code; it may not use anything that another thread could have locked.
    pub(super) fn in_a_child(check: impl Fn() -> bool) -> bool {
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

    #[test]
    fn a_child_and_its_child_are_three_processes() {
        let parent = Process::current();
        assert!(in_a_child(|| {
            let child = Process::current();
            let is_new = child != parent && child.is_current() && !parent.is_current();
            is_new && in_a_child(|| !child.is_current() && !parent.is_current() && Process::current().is_current())
        }));
        assert!(parent.is_current() && Process::current() == parent);
    }

    #[test]
    fn the_page_alone_tells_a_child_from_its_parent() {
        let Some(page) = emptied_page() else { return };
        // SAFETY: it is never unmapped.
        let word = unsafe { &*page };
        let parent = Process { number: number(word), ..Process::current() };
        assert!(parent.is_named_by(word));
        assert!(in_a_child(|| !parent.is_named_by(word) && number(word) > parent.number));
    }

    #[test]
    fn without_the_page_the_process_id_does() {
        let here = Process { number: number(&PLAIN_WORD), ..Process::current() };
        assert!(here.is_named_by(&PLAIN_WORD));
        // The handler clears another word here, so that only the process id differs.
        assert!(in_a_child(|| PLAIN_WORD.load(Ordering::Relaxed) == here.number && !here.is_named_by(&PLAIN_WORD)));
    }
}
