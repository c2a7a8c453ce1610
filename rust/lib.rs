//! mmcopy moves tensors that are already preprocessed from a gateway process to inference workers on the same host.
//!
//! This crate is the part below Python: segments (one tensor in one file of a shared-memory file system), their names
//! and owners, the table of dtypes, and copying, with or without a cast, by several threads. It reads no environment
//! and knows no Python outside `python`, which is compiled with the feature of that name.
//!
//! # The rules of the memory
//!
//! A `SAFETY` comment cites these by name.
//!
//! * **M1** Memory that someone else may write at any moment (another process, or a Python thread that holds the same
//!   buffer) is never a `&[u8]` or `&mut [u8]`. It is a raw pointer and a length, kept in [`memory::Source`] or
//!   [`memory::Target`], and it is touched only by `ptr::copy`-like operations whose every bit pattern is valid, or by
//!   the kernel. A race there gives wrong data; it cannot give a wrong length, pointer or enum.
//! * **M2** Sizes come from `fstat` and are checked (`offset + nbytes`, without overflow) before a byte is read.
//! * **M3** Space is reserved before it is written, and files are written by `pwrite` and read by `pread`, never
//!   through a mapping: a full file system is an error, a peer that truncates a file causes a short read, and neither
//!   is a SIGBUS.
//! * **M4** One `pread` or `pwrite` moves at most `0x7fff_f000` bytes, so all of them loop.
//!
//! * **M5** A [`pool::Job`] touches its sources and slots until it is over and never after: it is over when every chunk
//!   is copied, or when `cancel`, a dropped `Job` or a `wait` that returned the job's error has seen the last running
//!   chunk end. Memory that a job was given outlives it. A step of a [`workers::Plan`] runs only while the call of
//!   `Plan::run` has not returned.
//!
//! Unsafe code is allowed in `memory` (M1), `transfer` (the two system calls), `streaming` (stores past the cache), `fork`
//! (the handler in a child, and a page that is empty there), `pool::steps` and `pool::shared` (a closure that other
//! threads call, M5, and one object a process), `endpoint::credentials` (one socket option), `arena::mapping` (M1), `request` (M5) and the
//! conversion of a Python buffer into memory and back; it is denied everywhere else.

pub mod arena;
pub mod cast;
pub mod copy;
pub mod dtype;
pub mod endpoint;
pub mod error;
pub mod memory;
pub mod name;
pub mod namespace;
pub mod owner;
pub mod pool;
pub mod reaper;
pub mod request;
pub mod segment;
pub mod streaming;
pub mod sweep;
pub mod sweeper;
pub mod transfer;
pub mod workers;

mod entry;
mod fork;

#[cfg(feature = "python")]
mod python;

pub use error::{Error, Result};
