//! The worker's socket and the sender's end of it.
//!
//! A worker listens on `<directory>/mmcopy-<16 hex digits>.sock`, an `AF_UNIX` socket of type `SOCK_SEQPACKET` in a
//! directory that nobody else can write to. A sender that was told the path connects, and from then on the open
//! connection is what tells each side that the other is alive: the kernel closes it with the process, in whatever
//! namespace that runs. Three things go over it:
//!
//! * `Hello`: both sides name their instance and protocol version.
//! * `Probe`: the sender asks the worker to read a few bytes of a segment, by the rules of [`crate::segment`]. That is
//!   the proof that both see one file system and that the worker's user may read there; equal namespace ids prove less.
//! * `Offer`: the sender hands an arena over, as four descriptors ([`crate::arena`]).
//!
//! Trust: both sides check the other's user by `SO_PEERCRED` (their own, or one of an explicit list), and neither trusts
//! what it receives. A frame that is truncated, unknown, too long, or carries descriptors that it should not carry ends
//! that connection and nothing else; the descriptors are closed.
//!
//! Threads: one a worker, which waits in `poll` for all connections and is woken by an eventfd to end. It never blocks on
//! a peer: frames are small, answers are sent without waiting, and a peer that does not take its answers is cut off.
//! A sender's calls run on the caller's thread, one after another, each with a limit.
//!
//! After `fork` the child owns nothing: its copies of the sockets are closed by [`crate::fork`], and every call says
//! [`crate::Error::Closed`].

mod arenas;
mod credentials;
mod directory;
mod error;
mod frame;
mod link;
mod peer;
mod server;
mod socket;

pub use error::EndpointError;
pub(crate) use frame::Offer;
pub use frame::{MAX_PROBE_BYTES, MAX_TEXT_BYTES};
pub use link::{Probed, SenderLink};
pub use server::{Options, Statistics, WorkerEndpoint};
pub(crate) use socket::poll;

#[cfg(test)]
mod tests;
