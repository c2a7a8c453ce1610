//! The worker's end: a socket that listens, and the thread that answers.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::EndpointError;
use super::arenas::Arenas;
use super::directory;
use super::peer::{Peer, ServerConfig};
use super::socket::{Deadline, poll};
use crate::arena::{LeaseHandle, Map};
use crate::entry::Identity;
use crate::fork::{Descriptor, Process};
use crate::sweeper::{self, Found, Sweeper};
use crate::{Error, Result, owner};

/// How long accepting rests when the process has no descriptor left for a connection.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// How a worker listens.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the socket is made; created when it is missing.
    pub directory: PathBuf,
    /// Where probed segments are looked for.
    pub shm_dir: PathBuf,
    /// Only segments whose names begin so are opened for a probe.
    pub accept_prefixes: Vec<String>,
    /// Users besides our own that may connect.
    pub allowed_uids: Vec<u32>,
    /// Senders at once; further ones are refused.
    pub max_links: usize,
    /// Arenas at once; further ones are refused.
    pub max_arenas: usize,
    /// Bytes of all arenas together; one that would be too much is refused.
    pub max_arena_bytes: u64,
    /// How long a new connection has to say Hello.
    pub hello_limit: Duration,
}

/// What has happened at an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Senders that are connected and have said Hello or still may.
    pub links: usize,
    /// Connections accepted so far.
    pub accepted: u64,
    /// Connections ended because the peer's user is not allowed.
    pub refused_users: u64,
    /// Connections ended for another fault of the peer's.
    pub faults: u64,
    /// The last fault.
    pub last_fault: String,
    /// Sockets of dead workers that were removed at the start.
    pub swept: usize,
    /// What senders that are gone left in shared memory.
    pub leftovers: Found,
}

/// A worker's socket and its thread. Dropping it closes it.
#[derive(Debug)]
pub struct WorkerEndpoint {
    instance: u64,
    path: PathBuf,
    identity: Identity,
    shared: Arc<Shared>,
    /// Until it is closed.
    wake: Mutex<Option<Arc<Descriptor>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: Process,
}

#[derive(Debug)]
struct Shared {
    config: ServerConfig,
    is_closing: AtomicBool,
    max_links: usize,
    hello_limit: Duration,
    sweeper: Sweeper,
    statistics: Mutex<Statistics>,
    has_ended: Mutex<bool>,
    ended: Condvar,
}

impl WorkerEndpoint {
    /// Listens, with a thread that answers. Sockets of our user's dead workers in the directory are removed first.
    pub fn create(options: Options) -> Result<Self> {
        let process = Process::current();
        let is_for_others = !options.allowed_uids.is_empty();
        directory::check_length(&options.directory.join("mmcopy-0123456789abcdef.sock"))?;
        directory::prepare(&options.directory, is_for_others)?;
        let swept = directory::sweep(&options.directory);
        let failed = |operation| {
            let path = options.directory.clone();
            move |errno: Errno| EndpointError::Io { path, errno: errno.raw_os_error(), operation }
        };
        let instance = owner::random_bits().map_err(failed("getrandom"))?;
        let path = directory::socket_path(&options.directory, instance)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(Descriptor::new(wake.map_err(failed("eventfd"))?));
        let (listener, identity) = directory::listen(&path, is_for_others)?;
        let listener = Descriptor::new(listener);
        let sweeper = Sweeper::new(options.shm_dir.clone(), sweeper::EVERY);
        let shared = Arc::new(Shared {
            config: ServerConfig {
                instance,
                shm_dir: options.shm_dir,
                accept_prefixes: options.accept_prefixes,
                allowed_uids: options.allowed_uids,
                arenas: Arc::new(Arenas::new(options.max_arenas, options.max_arena_bytes)),
            },
            is_closing: AtomicBool::new(false),
            max_links: options.max_links,
            hello_limit: options.hello_limit,
            sweeper,
            statistics: Mutex::new(Statistics { swept, ..Statistics::default() }),
            has_ended: Mutex::new(false),
            ended: Condvar::new(),
        });
        let (serving, waking) = (Arc::clone(&shared), Arc::clone(&wake));
        let started =
            Builder::new().name("mmcopy-endpoint".to_owned()).spawn(move || serving.serve(&waking, &listener));
        let thread = started.map_err(|error| {
            directory::remove_own(&path, identity, process);
            Error::Spawn { thread: 0, num_threads: 1, reason: error.to_string() }
        })?;
        Ok(Self {
            instance,
            path,
            identity,
            shared,
            wake: Mutex::new(Some(wake)),
            thread: Mutex::new(Some(thread)),
            process,
        })
    }

    /// A random number that no other endpoint has.
    pub const fn instance(&self) -> u64 {
        self.instance
    }

    /// Where it listens, which a sender needs to know.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The arenas of all senders that are connected, the newest last.
    pub fn arenas(&self) -> Vec<Arc<Map>> {
        if self.process.is_current() { self.shared.config.arenas.all() } else { Vec::new() }
    }

    /// The arena of this random number, while its sender is connected.
    pub fn find_arena(&self, instance: u64) -> Option<Arc<Map>> {
        if self.process.is_current() { self.shared.config.arenas.find(instance) } else { None }
    }

    /// The arena of a lease, while its sender is connected.
    pub fn find_arena_of(&self, handle: &LeaseHandle) -> Option<Arc<Map>> {
        if self.process.is_current() { self.shared.config.arenas.find_for(handle) } else { None }
    }

    /// Blocks until more than `seen` arenas were handed over since the start; how many were.
    pub fn wait_arena(&self, seen: u64, limit: Duration) -> Result<u64> {
        self.check_process()?;
        Ok(self.shared.config.arenas.wait(seen, limit))
    }

    /// What has happened so far.
    pub fn statistics(&self) -> Result<Statistics> {
        self.check_process()?;
        let mut statistics = self.shared.statistics();
        if let Some(found) = self.shared.sweeper.take() {
            statistics.leftovers.add(found);
        }
        Ok(statistics.clone())
    }

    /// Whether it was closed, or belongs to the process that this one was forked from.
    pub fn is_closed(&self) -> bool {
        !self.process.is_current() || self.shared.is_closing.load(Ordering::Relaxed)
    }

    /// Removes the socket, ends every connection and the thread. May be called again; does nothing in a forked child.
    pub fn close(&self, limit: Duration) -> Result<()> {
        if !self.process.is_current() {
            return Ok(());
        }
        if !self.shared.is_closing.swap(true, Ordering::Relaxed) {
            directory::remove_own(&self.path, self.identity, self.process);
        }
        if let Some(wake) = self.wake.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            // It can only fail when the counter is full, and then the thread is awake.
            let _ = rustix::io::write(wake.as_ref(), &1_u64.to_ne_bytes());
        }
        let deadline = Deadline::after(limit);
        let mut has_ended = self.shared.has_ended.lock().unwrap_or_else(PoisonError::into_inner);
        while !*has_ended {
            let left = deadline.left();
            if left.is_zero() {
                return Err(EndpointError::Timeout { what: "closing the endpoint".to_owned(), waited: limit }.into());
            }
            has_ended = self.shared.ended.wait_timeout(has_ended, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(has_ended);
        self.wake.lock().unwrap_or_else(PoisonError::into_inner).take();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A panic of the thread has been printed, and its connections are gone.
        let _ = thread.map(JoinHandle::join);
        Ok(())
    }

    fn check_process(&self) -> Result<()> {
        if self.process.is_current() { Ok(()) } else { Err(Error::Closed { what: "the endpoint".to_owned() }) }
    }
}

impl Drop for WorkerEndpoint {
    fn drop(&mut self) {
        if self.process.is_current() {
            let _ = self.close(Duration::from_secs(10));
        } else {
            // The handle names a thread that this process does not have.
            std::mem::forget(self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

/// Says that the thread has ended, also when it panics.
struct Ending<'a>(&'a Shared);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        *self.0.has_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.ended.notify_all();
    }
}

impl Shared {
    fn statistics(&self) -> MutexGuard<'_, Statistics> {
        self.statistics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, wake: &Descriptor, listener: &Descriptor) {
        let _ending = Ending(self);
        let mut peers: Vec<Peer> = Vec::new();
        let mut rest_until: Option<Instant> = None;
        while !self.is_closing.load(Ordering::Relaxed) {
            self.sweeper.sweep_if_due();
            let is_accepting = rest_until.is_none_or(|until| Instant::now() >= until);
            let ready = self.wait([wake, listener], &peers, if is_accepting { None } else { rest_until });
            let mut number = 0;
            peers.retain_mut(|peer| {
                let events = ready.get(number).copied().unwrap_or(PollFlags::empty());
                number += 1;
                self.keep(peer, events)
            });
            if is_accepting {
                rest_until = self.accept(listener, &mut peers);
            }
            self.statistics().links = peers.len();
        }
    }

    /// Sleeps until something happens; what happened at each peer.
    fn wait(&self, [wake, listener]: [&Descriptor; 2], peers: &[Peer], rest_until: Option<Instant>) -> Vec<PollFlags> {
        let listening = if rest_until.is_none() { PollFlags::IN } else { PollFlags::empty() };
        let mut polled = vec![PollFd::new(wake, PollFlags::IN), PollFd::new(listener, listening)];
        polled.extend(peers.iter().map(|peer| PollFd::new(&peer.socket, PollFlags::IN)));
        let hellos = peers.iter().filter_map(Peer::hello_by).map(Deadline::left);
        let rest = rest_until.map(|until| until.saturating_duration_since(Instant::now()));
        match poll(&mut polled, hellos.chain(rest).chain([self.sweeper.due_in()]).min()) {
            Ok(_) => polled[2..].iter().map(PollFd::revents).collect(),
            Err(Errno::INTR) => Vec::new(),
            // No memory, or a bug; not at full speed.
            Err(_) => {
                std::thread::sleep(ACCEPT_REST);
                Vec::new()
            }
        }
    }

    /// Serves one peer; false when it is over.
    fn keep(&self, peer: &mut Peer, events: PollFlags) -> bool {
        let outcome = if events.is_empty() { Ok(()) } else { peer.serve(&self.config) };
        match outcome {
            Ok(()) if peer.hello_by().is_some_and(|by| by.left().is_zero()) => {
                let what = "saying Hello after connecting".to_owned();
                self.note(&EndpointError::Timeout { what, waited: self.hello_limit });
                false
            }
            Ok(()) => true,
            Err(EndpointError::Gone { .. }) => false,
            Err(fault) => {
                super::peer::refuse(&peer.socket, &fault);
                self.note(&fault);
                false
            }
        }
    }

    /// Takes the connections that wait; until when to rest.
    fn accept(&self, listener: &Descriptor, peers: &mut Vec<Peer>) -> Option<Instant> {
        loop {
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(fd) => self.admit(fd, peers),
                Err(Errno::AGAIN) => return None,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => return Instant::now().checked_add(ACCEPT_REST),
            }
        }
    }

    fn admit(&self, fd: OwnedFd, peers: &mut Vec<Peer>) {
        self.statistics().accepted += 1;
        match Peer::new(fd, Deadline::after(self.hello_limit), &self.config) {
            Ok(peer) if peers.len() >= self.max_links => {
                let fault = EndpointError::Refused {
                    reason: format!("{} senders are connected already", peers.len()),
                    errno: 0,
                };
                super::peer::refuse(&peer.socket, &fault);
                self.note(&fault);
            }
            Ok(peer) => peers.push(peer),
            Err(fault) => self.note(&fault),
        }
    }

    fn note(&self, fault: &EndpointError) {
        let mut statistics = self.statistics();
        if matches!(fault, EndpointError::User { .. }) {
            statistics.refused_users += 1;
        } else {
            statistics.faults += 1;
        }
        statistics.last_fault = fault.to_string();
    }
}
