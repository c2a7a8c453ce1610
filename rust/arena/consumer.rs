//! One worker that has the arena, as the sender sees it.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::pipe::PipeFlags;

use super::error::ArenaError;
use super::layout;
use super::mapping::Mapping;
use super::memfd;
use crate::endpoint::poll;
use crate::fork::Descriptor;

/// Its flags, and the end of a pipe whose other end it holds as long as it may read: the kernel tells when that has gone,
/// with its process or before. The socket does not serve for this: closing our end of it says nothing about its reads.
#[derive(Debug)]
pub(super) struct Consumer {
    pub(super) flags: Mapping,
    alive: Descriptor,
}

/// What the worker gets.
#[derive(Debug)]
pub(super) struct Passed {
    pub(super) flags: Descriptor,
    /// A child that is forked while the worker is waited for must not keep it: the worker would seem to live.
    pub(super) alive: Descriptor,
}

impl Consumer {
    pub(super) fn new(num_leases: u32) -> Result<(Self, Passed), ArenaError> {
        let nbytes = layout::flags_nbytes(num_leases);
        let (file, flags) = memfd::flags(nbytes)?;
        let pipe = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
        let (ours, theirs) =
            pipe.map_err(|errno| ArenaError::Io { operation: "pipe", errno: errno.raw_os_error(), nbytes: 0 })?;
        Ok((Self { flags, alive: Descriptor::new(ours) }, Passed { flags: file, alive: Descriptor::new(theirs) }))
    }

    /// Which of these have let go of the arena, or died.
    pub(super) fn gone<'a>(consumers: impl Iterator<Item = (usize, &'a Self)>) -> u32 {
        let (slots, consumers): (Vec<_>, Vec<_>) = consumers.unzip();
        let mut polled: Vec<_> = consumers.iter().map(|one| PollFd::new(&one.alive, PollFlags::empty())).collect();
        if poll(&mut polled, Some(Duration::ZERO)).is_err() {
            return 0; // asked again soon
        }
        let is_gone = |flags: PollFlags| flags.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL);
        let gone = slots.iter().zip(&polled).filter(|(_, polled)| is_gone(polled.revents()));
        gone.fold(0, |mask, (slot, _)| mask | 1 << slot)
    }
}
