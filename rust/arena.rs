//! The arena: memory that a sender and its workers on the host map once, and use again and again.
//!
//! # What there is
//!
//! A sender has one arena. Three kinds of memfd, all sealed against shrinking and growing:
//!
//! * **data**: the bytes of all leases. Sealed against new writable mappings (`F_SEAL_FUTURE_WRITE`) once the sender has
//!   its own, so the kernel keeps workers from writing to it.
//! * **control**: a header and one record a lease, written by the sender alone and sealed like the data.
//! * **flags**: one file for each worker, two words a lease, written by that worker alone. The sender maps all of them, a
//!   worker sees its own and no other's.
//!
//! So a worker that writes garbage wherever it can reaches its own flags: it can let go of its own leases too early, and
//! get wrong pixels itself. The free list, who has which lease, and when a block comes back are in the sender's private
//! memory ([`table`](self)), and of the flags it only ever asks whether a word equals one value.
//!
//! # A lease
//!
//! ```text
//!                take                    commit               every consumer released or died
//!   free ------------------> writing ------------------> out -----------------------------------> free
//!    ^                          | abort                   | cancel, or unclaimed for too long
//!    |                          v                         v
//!    +---------------------- taken back: nobody can claim it any more;
//!       those that have        consumers that have claimed it may read until they release
//!       released or died
//! ```
//!
//! The handle can be sent as soon as the lease is taken; a consumer reads as far as the watermark says. A block belongs to
//! one lease, or to the leases of one group side by side, and is given out again when all of them are over *and* nobody on
//! the sender's side can write to it any more: a running `write` or a view keeps it, whatever else happens.
//!
//! A consumer *claims* a lease before it reads. Without that the sender could never take back a lease whose message was
//! lost, because a consumer might just be reading it.
//!
//! # Who orders what
//!
//! `g` is the lease's generation, which no other lease of the arena has; `m` its lower 32 bits, never 0. A flag is 32 bits
//! wide so that a GPU's stream can write it.
//!
//! | word | writer | store | reader | load | what it orders |
//! | --- | --- | --- | --- | --- | --- |
//! | record: generation | sender | 0 relaxed, fence release, the other words relaxed, `g` release | consumer | acquire, the other words relaxed, fence acquire, again relaxed | a record that is read whole is of one generation |
//! | record: written | sender | release, under a lock that every writing thread took after its stores | consumer | acquire | the bytes below it come before the reads |
//! | record: state, against flag: claim | sender: cancelled relaxed, fence seq-cst, then loads the claim | | consumer: claim relaxed, fence seq-cst, then loads the state | | one of the two sees the other: no lease is both read and given out |
//! | flag: release | consumer, `m` release; or its GPU's stream, after the copy | | sender | acquire | all reads come before the next writes to the block |
//!
//! A flag that is left from an earlier lease in the same record names another generation and says nothing; the sender
//! passes over a generation whose `m` a flag happens to hold. A flag that is written late, or twice, is the same.
//!
//! The consumer's end of a pipe tells the sender that it lives: it is closed with the process, or when the [`Map`] is
//! dropped, whichever is first. The link's socket tells the consumer that the sender lives, but not the sender that the
//! consumer has stopped reading: either side can close it earlier.
//!
//! # What is not defended against
//!
//! A consumer that claims leases and lives without releasing them holds them: giving them to others would be worse. It
//! gets no more while it holds its share and there are other consumers: twice of what would be left. A Python program that keeps writing through a reserved array after committing it changes what consumers read.

mod blocks;
mod budget;
mod consumer;
mod error;
mod group;
mod handle;
mod later;
mod layout;
mod map;
mod mapping;
mod memfd;
mod options;
mod pass;
mod progress;
mod reclaim;
mod record;
mod sender;
mod sync;
mod table;
mod writing;

pub use budget::{Available, GroupLimit, MemoryBudget};
pub use error::ArenaError;
pub use group::{Part, write_all};
pub use handle::{LEASE_PREFIX, LeaseHandle};
pub use later::Later;
pub use map::{Claim, Flag, Map};
pub use options::{HugePages, Options, Report, Statistics};
pub use sender::Arena;
pub use table::MAX_CONSUMERS;
pub use writing::{View, Writing};

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
