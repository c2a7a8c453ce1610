//! One connection: whole frames, never blocking, descriptors counted.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::EndpointError;
use super::frame::{MAX_FRAME_BYTES, Message};
use crate::fork::Descriptor;

/// Room for more descriptors than any frame has, so that surplus ones are seen, and closed.
const ROOM: usize = 8;

/// A connected or listening socket.
#[derive(Debug)]
pub(super) struct Socket {
    fd: Descriptor,
    peer: &'static str,
}

/// A frame that has arrived.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) message: Message,
    pub(super) sequence: u64,
    pub(super) descriptors: Vec<OwnedFd>,
    /// Some of its descriptors are lost, because this process may open no more: that is no fault of the peer's.
    pub(super) lost: Option<EndpointError>,
}

/// A socket without an owner yet.
pub(super) fn unconnected() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// The address of this path; `ENAMETOOLONG` when it does not fit.
pub(super) fn address(path: &Path) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new(path)
}

impl Socket {
    /// `peer` is what errors call the other end.
    pub(super) fn new(fd: OwnedFd, peer: &'static str) -> Self {
        Self { fd: Descriptor::new(fd), peer }
    }

    /// Sends one frame. False when the peer does not take its frames.
    pub(super) fn send(
        &self,
        message: &Message,
        sequence: u64,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<bool, EndpointError> {
        let frame = message.encode(sequence);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ROOM))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(EndpointError::Protocol { reason: format!("{} descriptors in one frame", descriptors.len()) });
        }
        loop {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.fd, &[IoSlice::new(&frame)], &mut ancillary, flags) {
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(self.failed("sendmsg", errno)),
            }
        }
    }

    /// The next frame; None when there is none yet.
    pub(super) fn receive(&self) -> Result<Option<Arrived>, EndpointError> {
        let mut buffer = [0_u8; MAX_FRAME_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ROOM))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut has_been_reset = false;
        let found = loop {
            match rustix::net::recvmsg(&self.fd, &mut [IoSliceMut::new(&mut buffer)], &mut ancillary, flags) {
                Ok(found) => break found,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                // A peer that hangs up without reading all is reported before what it said last, such as why.
                Err(Errno::CONNRESET) if !has_been_reset => has_been_reset = true,
                Err(errno) => return Err(self.failed("recvmsg", errno)),
            }
        };
        let mut descriptors = Vec::new();
        for part in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = part {
                descriptors.extend(passed);
            }
        }
        if found.bytes == 0 {
            return Err(EndpointError::Gone { peer: self.peer });
        }
        if found.flags.contains(ReturnFlags::TRUNC) {
            return Err(EndpointError::Protocol { reason: format!("a frame of more than {MAX_FRAME_BYTES} bytes") });
        }
        let (message, sequence) = Message::decode(&buffer[..found.bytes.min(MAX_FRAME_BYTES)])?;
        let wanted = message.num_descriptors();
        let is_cut = found.flags.contains(ReturnFlags::CTRUNC);
        if is_cut || descriptors.len() < wanted {
            let fault = EndpointError::Descriptors { wanted, found: descriptors.len(), limit: open_files_limit() };
            if is_cut && descriptors.len() < wanted {
                return Ok(Some(Arrived { message, sequence, descriptors: Vec::new(), lost: Some(fault) }));
            }
            return Err(fault);
        }
        if descriptors.len() > wanted {
            let reason = format!("{} with {} descriptors, {wanted} wanted", message.kind_name(), descriptors.len());
            return Err(EndpointError::Protocol { reason });
        }
        Ok(Some(Arrived { message, sequence, descriptors, lost: None }))
    }

    /// Whether the peer has closed its end. What it sent before may still be waiting. A signal or a lack of memory says
    /// nothing of the peer.
    pub(super) fn is_gone(&self) -> bool {
        let mut polled = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        while let Err(errno) = poll(&mut polled, Some(Duration::ZERO)) {
            if errno != Errno::INTR {
                return false;
            }
        }
        polled[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL)
    }

    /// Waits for the next frame.
    pub(super) fn receive_until(&self, deadline: Deadline, what: &str) -> Result<Arrived, EndpointError> {
        loop {
            if let Some(arrived) = self.receive()? {
                return Ok(arrived);
            }
            self.wait(PollFlags::IN, deadline, what)?;
        }
    }

    /// Waits until the peer takes the frame.
    pub(super) fn send_until(
        &self,
        message: &Message,
        sequence: u64,
        descriptors: &[BorrowedFd<'_>],
        deadline: Deadline,
        what: &str,
    ) -> Result<(), EndpointError> {
        while !self.send(message, sequence, descriptors)? {
            self.wait(PollFlags::OUT, deadline, what)?;
        }
        Ok(())
    }

    fn wait(&self, events: PollFlags, deadline: Deadline, what: &str) -> Result<(), EndpointError> {
        let left = deadline.left();
        if left.is_zero() {
            return Err(EndpointError::Timeout { what: what.to_owned(), waited: deadline.limit });
        }
        let mut polled = [PollFd::new(&self.fd, events)];
        match poll(&mut polled, Some(left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(self.failed("poll", errno)),
        }
    }

    fn failed(&self, operation: &'static str, errno: Errno) -> EndpointError {
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => EndpointError::Gone { peer: self.peer },
            errno => EndpointError::Io { path: Path::new("").into(), errno: errno.raw_os_error(), operation },
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A limit and when it is reached.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    end: Option<Instant>,
    pub(super) limit: Duration,
}

impl Deadline {
    pub(super) fn after(limit: Duration) -> Self {
        Self { end: Instant::now().checked_add(limit), limit }
    }

    pub(super) fn left(self) -> Duration {
        self.end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
    }
}

/// Without a limit it waits for ever.
pub(crate) fn poll(polled: &mut [PollFd<'_>], limit: Option<Duration>) -> Result<usize, Errno> {
    // What is too long for a timespec is longer than anybody waits.
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    rustix::event::poll(polled, limit.as_ref())
}

fn open_files_limit() -> String {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or_else(|| "any number".to_owned(), |limit| limit.to_string())
}
