//! What can go wrong with an arena and its leases.

use std::time::Duration;

/// A failure of an arena.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// A setting that no arena can have.
    #[error("{setting} is {found}, want {wanted}")]
    Option {
        /// Its name.
        setting: &'static str,
        /// As given.
        found: String,
        /// What is allowed.
        wanted: String,
    },
    /// More memory than there is.
    #[error(
        "an arena of {wanted_nbytes} bytes is refused: {available_nbytes} bytes are available ({limited_by}), and at most {most_nbytes} of them are taken"
    )]
    Memory {
        /// Bytes of data and control.
        wanted_nbytes: u64,
        /// Bytes that are available.
        available_nbytes: u64,
        /// Bytes that an arena may take.
        most_nbytes: u64,
        /// Which limit that is.
        limited_by: String,
    },
    /// A system call failed.
    #[error("{operation} failed for {nbytes} bytes: {}", crate::error::strerror(*.errno))]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The system call's errno.
        errno: i32,
        /// How many bytes it was about.
        nbytes: u64,
    },
    /// No room for a lease within the limit.
    #[error(
        "the arena has no room for {wanted_nbytes} bytes in {num_leases} leases after {waited:?}: {free_nbytes} of {data_nbytes} bytes are free, the largest block that is sure to be found has {largest_nbytes}, {free_leases} leases are free"
    )]
    Full {
        /// Bytes wanted, in whole blocks.
        wanted_nbytes: u64,
        /// Leases wanted.
        num_leases: usize,
        /// How long it was waited.
        waited: Duration,
        /// Bytes free.
        free_nbytes: u64,
        /// Bytes of the arena.
        data_nbytes: u64,
        /// Bytes that one allocation finds for certain.
        largest_nbytes: u64,
        /// Lease records free.
        free_leases: usize,
    },
    /// A consumer holds more than its share, and did not let go of it within the limit.
    #[error(
        "consumer {slot} gets no {wanted_nbytes} bytes more after {waited:?}: it holds {held_nbytes}, and {free_nbytes} of {data_nbytes} bytes are free for all consumers"
    )]
    Share {
        /// The consumer.
        slot: usize,
        /// Bytes wanted, in whole blocks.
        wanted_nbytes: u64,
        /// How long it was waited.
        waited: Duration,
        /// Bytes that it holds.
        held_nbytes: u64,
        /// Bytes free.
        free_nbytes: u64,
        /// Bytes of the arena.
        data_nbytes: u64,
    },
    /// A consumer that there is not.
    #[error("consumer {slot} is not connected to this arena")]
    NoConsumer {
        /// As given.
        slot: u32,
    },
    /// All numbers for consumers are taken.
    #[error("{most} consumers have this arena already")]
    Consumers {
        /// How many there may be.
        most: usize,
    },
    /// What was offered is no arena.
    #[error("the arena that was offered is refused: {reason}")]
    Offered {
        /// Why, with the numbers.
        reason: String,
    },
    /// A handle that no arena made.
    #[error("forged lease {name:?}: {reason}")]
    Forged {
        /// Its name.
        name: String,
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// A handle of an arena that is not mapped here.
    #[error("lease {name:?} is of an arena that is not mapped here: {why}")]
    UnknownArena {
        /// Its name.
        name: String,
        /// Why it was not found.
        why: &'static str,
    },
    /// A lease that is over.
    #[error("lease {name:?} is over: {reason}")]
    Stale {
        /// Its name.
        name: String,
        /// Why, with the numbers.
        reason: String,
    },
    /// A lease that this consumer has received already.
    #[error("lease {name:?} was received already and is {state}")]
    Repeated {
        /// Its name.
        name: String,
        /// "still held" or "released".
        state: &'static str,
    },
    /// The sender gave up while it wrote.
    #[error("lease {name:?} was given up by its sender after {written_nbytes} of {nbytes} bytes")]
    Aborted {
        /// Its name.
        name: String,
        /// Bytes that were written.
        written_nbytes: u64,
        /// Bytes of the lease.
        nbytes: u64,
    },
    /// The sender died, or closed its connection, while it wrote.
    #[error("lease {name:?}: its sender has gone after {written_nbytes} of {nbytes} bytes, {wanted_nbytes} wanted")]
    OwnerGone {
        /// Its name.
        name: String,
        /// Bytes that were written.
        written_nbytes: u64,
        /// Bytes that were waited for.
        wanted_nbytes: u64,
        /// Bytes of the lease.
        nbytes: u64,
    },
    /// The sender did not write that far in time.
    #[error("lease {name:?}: {written_nbytes} of {wanted_nbytes} bytes were written within {waited:?}")]
    Timeout {
        /// Its name.
        name: String,
        /// Bytes that were written.
        written_nbytes: u64,
        /// Bytes that were waited for.
        wanted_nbytes: u64,
        /// The limit.
        waited: Duration,
    },
    /// A lease that is written to right now, or was.
    #[error("lease {name:?} is being written, or was written already")]
    Busy {
        /// Its name.
        name: String,
    },
    /// The thread that gives blocks back did not end in time.
    #[error("closing the arena did not end within {waited:?}")]
    Closing {
        /// The limit.
        waited: Duration,
    },
}
