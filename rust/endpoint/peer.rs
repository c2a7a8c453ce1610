//! One sender, as the worker's thread sees it.

use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;

use super::EndpointError;
use super::arenas::Arenas;
use super::credentials;
use super::frame::{MAX_PROBE_BYTES, Message, Offer};
use super::socket::{Arrived, Deadline, Socket};
use crate::arena::Map;
use crate::memory::Target;
use crate::name::SegmentName;
use crate::segment::Segment;
use crate::{Error, Result};

/// Frames that one sender may have answered before the others' turn.
const FRAMES_A_TURN: usize = 16;

/// Arenas over one connection at most; a sender has one.
const ARENAS_A_LINK: usize = 4;

/// What answering needs to know.
#[derive(Debug)]
pub(super) struct ServerConfig {
    pub(super) instance: u64,
    pub(super) shm_dir: PathBuf,
    pub(super) accept_prefixes: Vec<String>,
    pub(super) allowed_uids: Vec<u32>,
    pub(super) arenas: Arc<Arenas>,
}

/// A connected sender.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) socket: Socket,
    /// Its user, as the kernel reports it.
    uid: u32,
    stage: Stage,
    arenas: Arc<Arenas>,
    /// What this sender has handed over.
    maps: Vec<Arc<Map>>,
}

#[derive(Debug)]
enum Stage {
    /// It has to say Hello by then.
    New(Deadline),
    /// It has.
    Known,
}

impl Peer {
    /// Looks at who it is; one that is not allowed gets a refusal.
    pub(super) fn new(
        fd: OwnedFd,
        hello_by: Deadline,
        config: &ServerConfig,
    ) -> std::result::Result<Self, EndpointError> {
        let socket = Socket::new(fd, "sender");
        let uid = credentials::peer_uid(std::os::fd::AsFd::as_fd(&socket))
            .map_err(|errno| super::directory::io(&config.shm_dir, errno, "getsockopt(SO_PEERCRED)"))?;
        if let Err(fault) = credentials::check("sender", uid, &config.allowed_uids) {
            refuse(&socket, &fault);
            return Err(fault);
        }
        Ok(Self { socket, uid, stage: Stage::New(hello_by), arenas: Arc::clone(&config.arenas), maps: Vec::new() })
    }

    /// When it is cut off unless it says Hello.
    pub(super) const fn hello_by(&self) -> Option<Deadline> {
        match self.stage {
            Stage::New(deadline) => Some(deadline),
            Stage::Known => None,
        }
    }

    /// Answers what has arrived. An error ends the connection.
    pub(super) fn serve(&mut self, config: &ServerConfig) -> std::result::Result<(), EndpointError> {
        for _ in 0..FRAMES_A_TURN {
            let Some(arrived) = self.socket.receive()? else { break };
            let sequence = arrived.sequence;
            let answer = self.answer(arrived, config)?;
            if !self.socket.send(&answer, sequence, &[])? {
                return Err(EndpointError::Protocol { reason: "the sender does not take its answers".to_owned() });
            }
        }
        Ok(())
    }

    fn answer(&mut self, arrived: Arrived, config: &ServerConfig) -> std::result::Result<Message, EndpointError> {
        // The connection stays: its end would tell the sender that we have died.
        if let (Stage::Known, Some(fault)) = (&self.stage, arrived.lost) {
            return Ok(Message::Refused { errno: Errno::MFILE.raw_os_error(), reason: fault.to_string() });
        }
        match (&self.stage, arrived.message) {
            (Stage::New(_), Message::Hello { .. }) => {
                self.stage = Stage::Known;
                Ok(Message::Hello { instance: config.instance })
            }
            (Stage::Known, Message::Probe { name, offset, nbytes }) => {
                Ok(probe(config, self.uid, &name, offset, nbytes))
            }
            (Stage::Known, Message::Offer(offer)) => Ok(self.take(offer, arrived.descriptors)),
            (stage, message) => {
                let when = if matches!(stage, Stage::New(_)) { "before Hello" } else { "from a sender" };
                Err(EndpointError::Protocol { reason: format!("{} {when}", message.kind_name()) })
            }
        }
    }

    fn take(&mut self, offer: Offer, descriptors: Vec<OwnedFd>) -> Message {
        if self.maps.len() >= ARENAS_A_LINK {
            let reason = format!("{} arenas came over this connection already", self.maps.len());
            return Message::Refused { errno: 0, reason };
        }
        let taken = Map::new(offer, descriptors).map_err(|fault| fault.to_string()).and_then(|map| {
            let map = Arc::new(map);
            self.arenas.add(&map).map(|()| map)
        });
        match taken {
            Ok(map) => {
                self.maps.push(map);
                Message::Accepted { instance: offer.instance }
            }
            Err(reason) => Message::Refused { errno: 0, reason },
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        for map in &self.maps {
            self.arenas.remove(map);
        }
    }
}

/// Says why before the connection ends; nothing is owed to one who does not listen.
pub(super) fn refuse(socket: &Socket, fault: &EndpointError) {
    let _ = socket.send(&Message::Refused { errno: 0, reason: fault.to_string() }, 0, &[]);
}

fn probe(config: &ServerConfig, uid: u32, name: &str, offset: u64, nbytes: u32) -> Message {
    match read(config, uid, name, offset, nbytes) {
        Ok(bytes) => Message::ProbeRead { bytes },
        Err(error) => {
            Message::ProbeFailed { errno: error.os().map_or(-1, |(errno, _)| errno), reason: error.to_string() }
        }
    }
}

fn read(config: &ServerConfig, uid: u32, name: &str, offset: u64, nbytes: u32) -> Result<Vec<u8>> {
    let name = SegmentName::parse(name)?;
    if !config.accept_prefixes.iter().any(|prefix| name.as_str().starts_with(prefix)) {
        return Err(Error::Name {
            name: name.to_string(),
            reason: "it does not begin with a prefix that this worker accepts",
        });
    }
    let segment = Segment::open(&config.shm_dir, &name)?;
    // A sender probes with a file of its own: we read nothing for it that its user might not be allowed to read.
    if segment.uid() != uid {
        let (path, uid_found) = (name.path_in(&config.shm_dir), segment.uid());
        return Err(Error::Foreign { path, uid: uid_found, wanted_uid: uid });
    }
    let mut bytes = vec![0; (nbytes as usize).min(MAX_PROBE_BYTES)];
    segment.read_into(Target::from_slice(&mut bytes), offset, NonZeroUsize::MIN)?;
    Ok(bytes)
}
