//! A lease in shared memory: the record that its sender writes, and the two flags that each consumer writes.
//!
//! Every step that both sides take part in is here, over words that loom can replace. [`crate::arena`] has the table of
//! who orders what.

use super::sync::{Ordering, Word, fence};

/// Set in `written` when the sender gave up.
const ABORTED: u64 = 1 << 63;
/// `state` of a record that may be claimed.
const OPEN: u32 = 1;
/// `state` of a record that the sender takes back.
const CANCELLED: u32 = 2;

/// What a consumer's flag for this generation is: never 0, which fresh memory has.
pub(super) const fn flag_of(generation: u64) -> u32 {
    generation as u32
}

/// Whether a generation can be used: its flag must not be that of fresh memory.
pub(super) const fn is_usable(generation: u64) -> bool {
    flag_of(generation) != 0
}

/// A record as the sender writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) generation: u64,
    pub(super) offset: u64,
    pub(super) nbytes: u64,
    /// One bit a consumer.
    pub(super) consumers: u32,
}

/// How far the sender is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) nbytes: u64,
    pub(super) is_aborted: bool,
}

/// The words of one record. Only its sender can write them: the kernel maps them read-only elsewhere.
#[derive(Debug)]
pub(super) struct Record<'a, L: Word<u64>, S: Word<u32>> {
    pub(super) generation: &'a L,
    pub(super) offset: &'a L,
    pub(super) nbytes: &'a L,
    pub(super) consumers: &'a S,
    pub(super) state: &'a S,
    pub(super) written: &'a L,
}

/// One consumer's words for one record. Only this consumer writes them.
#[derive(Debug)]
pub(super) struct Flags<'a, S: Word<u32>> {
    pub(super) claim: &'a S,
    pub(super) release: &'a S,
}

impl<L: Word<u64>, S: Word<u32>> Record<'_, L, S> {
    /// Sender: a new lease. A reader that meets this half done finds generation 0 or two different ones.
    pub(super) fn publish(&self, entry: &Entry) {
        self.retire();
        self.offset.store(entry.offset, Ordering::Relaxed);
        self.nbytes.store(entry.nbytes, Ordering::Relaxed);
        self.consumers.store(entry.consumers, Ordering::Relaxed);
        self.state.store(OPEN, Ordering::Relaxed);
        self.written.store(0, Ordering::Relaxed);
        self.generation.store(entry.generation, Ordering::Release);
    }

    /// Sender: no lease is here any more.
    pub(super) fn retire(&self) {
        self.generation.store(0, Ordering::Relaxed);
        // A thread that sees what is stored after this sees that the generation has gone.
        fence(Ordering::Release);
    }

    /// Sender: these are left. Those that are not may not claim it any more.
    pub(super) fn keep_consumers(&self, consumers: u32) {
        self.consumers.store(consumers, Ordering::Relaxed);
    }

    /// Sender: it can no longer be claimed. Afterwards [`Flags::is_claimed`] is true for each consumer that has, or it
    /// will see this and let go.
    pub(super) fn cancel(&self) {
        self.state.store(CANCELLED, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Sender: all bytes before this are in place.
    pub(super) fn advance(&self, nbytes: u64) {
        self.written.store(nbytes, Ordering::Release);
    }

    /// Sender: no further bytes will come.
    pub(super) fn abort(&self, nbytes: u64) {
        self.written.store(nbytes | ABORTED, Ordering::Release);
    }

    /// Consumer: what the record says, when it is of this generation and stays so while it is read.
    pub(super) fn read(&self, generation: u64) -> Option<Entry> {
        if self.generation.load(Ordering::Acquire) != generation {
            return None;
        }
        let offset = self.offset.load(Ordering::Relaxed);
        let nbytes = self.nbytes.load(Ordering::Relaxed);
        let consumers = self.consumers.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        (self.generation.load(Ordering::Relaxed) == generation).then_some(Entry {
            generation,
            offset,
            nbytes,
            consumers,
        })
    }

    /// Consumer that has claimed it: how far the sender is. The bytes before that may be read.
    pub(super) fn written(&self) -> Written {
        let word = self.written.load(Ordering::Acquire);
        Written { nbytes: word & !ABORTED, is_aborted: word & ABORTED != 0 }
    }

    /// Consumer: whether it is still what it was, and not taken back.
    fn is_open(&self, generation: u64, consumer: u32) -> bool {
        let is_open =
            self.state.load(Ordering::Relaxed) == OPEN && self.consumers.load(Ordering::Relaxed) & consumer != 0;
        // A record that was published anew after being taken back is open again, and then its generation shows it.
        fence(Ordering::Acquire);
        is_open && self.generation.load(Ordering::Relaxed) == generation
    }
}

impl<S: Word<u32>> Flags<'_, S> {
    /// Consumer: says that it reads from now on; false when the sender has taken the lease back. One thread at a time.
    /// `consumer` is this consumer's bit.
    pub(super) fn claim<L: Word<u64>>(&self, record: &Record<'_, L, S>, generation: u64, consumer: u32) -> bool {
        self.claim.store(flag_of(generation), Ordering::Relaxed);
        // With the one in `cancel`: the sender sees this claim, or we see that it cancelled, or both.
        fence(Ordering::SeqCst);
        let is_open = record.is_open(generation, consumer);
        if !is_open {
            self.release(generation);
        }
        is_open
    }

    /// Consumer: all its reads are over.
    pub(super) fn release(&self, generation: u64) {
        self.release.store(flag_of(generation), Ordering::Release);
    }

    /// Sender, after [`Record::cancel`] or for the age of a lease: whether the consumer reads, or has read.
    pub(super) fn is_claimed(&self, generation: u64) -> bool {
        self.claim.load(Ordering::Acquire) == flag_of(generation)
    }

    /// Sender: whether the consumer's reads are over, and come before whatever we do next.
    pub(super) fn is_released(&self, generation: u64) -> bool {
        self.release.load(Ordering::Acquire) == flag_of(generation)
    }
}
