//! The sender's end.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use super::frame::{Message, Offer};
use super::socket::{Deadline, Socket};
use super::{EndpointError, credentials, directory, socket};
use crate::fork::Process;
use crate::memory::Source;
use crate::owner::{self, Owner, Written};
use crate::{Error, Result};

/// How long to wait before connecting again to a worker whose queue of connections is full.
const RETRY: Duration = Duration::from_millis(1);

/// A connection to a worker. Dropping it closes it.
#[derive(Debug)]
pub struct SenderLink {
    socket: Socket,
    is_closed: AtomicBool,
    path: PathBuf,
    instance: u64,
    worker_instance: u64,
    turn: Turn,
    process: Process,
}

/// Whether a worker can read what we write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probed {
    /// It read back what we wrote.
    pub is_shared: bool,
    /// What happened, in words.
    pub reason: String,
}

impl SenderLink {
    /// Connects and says Hello. The worker must be of our user or of one of these.
    pub fn connect(path: &Path, limit: Duration, allowed_uids: &[u32]) -> Result<Self> {
        let process = Process::current();
        let deadline = Deadline::after(limit);
        directory::check_length(path)?;
        let socket = connected(path, deadline)?;
        let uid = credentials::peer_uid(socket.as_fd()).map_err(io(path, "getsockopt(SO_PEERCRED)"))?;
        credentials::check("worker", uid, allowed_uids)?;
        let instance = owner::random_bits().map_err(io(path, "getrandom"))?;
        let link = Self {
            socket,
            is_closed: AtomicBool::new(false),
            path: path.to_path_buf(),
            instance,
            worker_instance: 0,
            turn: Turn::default(),
            process,
        };
        match link.ask(&Message::Hello { instance }, &[], deadline, "connecting")? {
            Message::Hello { instance } => Ok(Self { worker_instance: instance, ..link }),
            other => Err(unexpected(&other).into()),
        }
    }

    /// Where the worker listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The worker's random number.
    pub const fn worker_instance(&self) -> u64 {
        self.worker_instance
    }

    /// Our own random number on this link.
    pub const fn instance(&self) -> u64 {
        self.instance
    }

    /// Whether it was closed, the worker has gone, or it belongs to the process that this one was forked from.
    pub fn is_closed(&self) -> bool {
        !self.process.is_current() || self.is_closed.load(Ordering::Relaxed) || self.socket.is_gone()
    }

    /// Ends the connection. A call that waits for the worker in another thread ends too. May be called again.
    pub fn close(&self) {
        if self.process.is_current() {
            self.is_closed.store(true, Ordering::Relaxed);
            // The descriptor is closed when the link is dropped, so that no call meets another file of its number.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }

    /// Writes 32 random bytes as a segment and lets the worker read them. What is wrong with the shared memory on either
    /// side is the answer; what is wrong with the link is an error. Nothing is left behind.
    pub fn probe(&self, shm_dir: &Path, limit: Duration) -> Result<Probed> {
        let deadline = Deadline::after(limit);
        self.check_open()?;
        let not_shared = |reason| Ok(Probed { is_shared: false, reason });
        let probe = match Probe::write(shm_dir) {
            Ok(probe) => probe,
            Err(error) => return not_shared(format!("we cannot write to {}: {error}", shm_dir.display())),
        };
        let name = probe.segment.name().to_string();
        let question = Message::Probe { name, offset: 0, nbytes: probe.nonce.len() as u32 };
        match self.ask(&question, &[], deadline, "the worker's answer to a probe")? {
            Message::ProbeRead { bytes } if bytes == probe.nonce => Ok(Probed {
                is_shared: true,
                reason: format!("the worker read {} bytes that we wrote to {}", bytes.len(), shm_dir.display()),
            }),
            Message::ProbeRead { .. } => not_shared("the worker read other bytes than we wrote".to_owned()),
            Message::ProbeFailed { errno, reason } => {
                not_shared(format!("the worker cannot read our segment (errno {errno}): {reason}"))
            }
            other => Err(unexpected(&other).into()),
        }
    }

    /// Hands an arena over and waits until the worker has mapped it.
    pub(crate) fn offer(&self, offer: Offer, descriptors: &[BorrowedFd<'_>], limit: Duration) -> Result<()> {
        let deadline = Deadline::after(limit);
        match self.ask(&Message::Offer(offer), descriptors, deadline, "the worker's answer to an arena")? {
            Message::Accepted { instance } if instance == offer.instance => Ok(()),
            other => Err(unexpected(&other).into()),
        }
    }

    /// Sends a question and waits for its answer. A refusal is an error.
    fn ask(
        &self,
        question: &Message,
        descriptors: &[BorrowedFd<'_>],
        deadline: Deadline,
        what: &str,
    ) -> Result<Message> {
        self.check_open()?;
        let turn = self.turn.take(deadline, what)?;
        let sent = self.socket.send_until(question, turn.sequence, descriptors, deadline, what);
        if let Err(fault) = sent {
            // A worker that refuses us says why before it hangs up.
            return Err(refusal(&self.socket).unwrap_or(fault).into());
        }
        loop {
            let arrived = self.socket.receive_until(deadline, what).map_err(|fault| self.explained(fault))?;
            match arrived.message {
                Message::Refused { errno, reason } => return Err(EndpointError::Refused { reason, errno }.into()),
                message if arrived.sequence == turn.sequence => return Ok(message),
                // The answer to a question whose limit was reached.
                _ if arrived.sequence < turn.sequence => {}
                message => {
                    let reason = format!(
                        "{} answers question {}, of which {} is the last",
                        message.kind_name(),
                        arrived.sequence,
                        turn.sequence
                    );
                    return Err(EndpointError::Protocol { reason }.into());
                }
            }
        }
    }

    /// A connection that we ended ourselves is closed, not gone.
    fn explained(&self, fault: EndpointError) -> Error {
        match fault {
            EndpointError::Gone { .. } if self.is_closed.load(Ordering::Relaxed) => self.closed(),
            fault => fault.into(),
        }
    }

    fn closed(&self) -> Error {
        Error::Closed { what: format!("the link to {}", self.path.display()) }
    }

    fn check_open(&self) -> Result<()> {
        if self.process.is_current() && !self.is_closed.load(Ordering::Relaxed) { Ok(()) } else { Err(self.closed()) }
    }
}

fn connected(path: &Path, deadline: Deadline) -> std::result::Result<Socket, EndpointError> {
    let address = socket::address(path).map_err(io(path, "making a socket address"))?;
    let fd = socket::unconnected().map_err(io(path, "socket"))?;
    loop {
        match rustix::net::connect(&fd, &address) {
            Ok(()) => return Ok(Socket::new(fd, "worker")),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if !deadline.left().is_zero() => std::thread::sleep(RETRY.min(deadline.left())),
            Err(Errno::AGAIN) => {
                let what = format!("connecting to {}", path.display());
                return Err(EndpointError::Timeout { what, waited: deadline.limit });
            }
            Err(errno @ (Errno::CONNREFUSED | Errno::NOENT)) => {
                return Err(EndpointError::NobodyListens { path: path.to_path_buf(), errno: errno.raw_os_error() });
            }
            Err(errno) => return Err(directory::io(path, errno, "connect")),
        }
    }
}

fn refusal(socket: &Socket) -> Option<EndpointError> {
    while let Ok(Some(arrived)) = socket.receive() {
        if let Message::Refused { errno, reason } = arrived.message {
            return Some(EndpointError::Refused { reason, errno });
        }
    }
    None
}

fn unexpected(message: &Message) -> EndpointError {
    EndpointError::Protocol { reason: format!("{} is no answer to what was asked", message.kind_name()) }
}

fn io(path: &Path, operation: &'static str) -> impl FnOnce(Errno) -> EndpointError {
    move |errno| directory::io(path, errno, operation)
}

/// A segment that is gone when this is dropped. Its owner's lock lets the next sender clear up after a killed one.
struct Probe {
    segment: Written,
    nonce: Vec<u8>,
    _owner: Owner,
}

impl Probe {
    fn write(shm_dir: &Path) -> Result<Self> {
        let owner = Owner::create(shm_dir)?;
        let mut nonce = Vec::with_capacity(32);
        for _ in 0..4 {
            let bits = owner::random_bits().map_err(|errno| Error::from_errno(errno, "getrandom", shm_dir, 0))?;
            nonce.extend(bits.to_ne_bytes());
        }
        let segment = owner.write(Source::from_slice(&nonce), None, NonZeroUsize::MIN)?;
        Ok(Self { segment, nonce, _owner: owner })
    }
}

/// One question at a time, and its number.
#[derive(Debug, Default)]
struct Turn {
    state: Mutex<TurnState>,
    is_free: Condvar,
}

#[derive(Debug, Default)]
struct TurnState {
    is_taken: bool,
    last: u64,
}

struct Taken<'a> {
    turn: &'a Turn,
    sequence: u64,
}

impl Turn {
    fn take(&self, deadline: Deadline, what: &str) -> std::result::Result<Taken<'_>, EndpointError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.is_taken {
            let left = deadline.left();
            if left.is_zero() {
                return Err(EndpointError::Timeout { what: what.to_owned(), waited: deadline.limit });
            }
            state = self.is_free.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_taken = true;
        state.last += 1;
        Ok(Taken { turn: self, sequence: state.last })
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.turn.state.lock().unwrap_or_else(PoisonError::into_inner).is_taken = false;
        self.turn.is_free.notify_one();
    }
}
