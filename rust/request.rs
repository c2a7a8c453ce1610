//! What one receive has open: the segments, leases and inline bytes of its items.
//!
//! A segment was handed over, so it is the receiver's to unlink, on success and on error alike. The order is: open (all
//! items, or none), unlink the names behind the first copy, close. A lease is claimed, read where its sender wrote it,
//! and released: by the host, or by a release flag behind the last copy out of it. A claim that nothing became of is
//! released when its request is dropped.

mod open;
mod read;
mod runs;

use std::any::Any;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::arena::{Claim, Flag, LeaseHandle, Map};
use crate::fork::Process;
use crate::memory::Source;
use crate::name::SegmentName;
use crate::pool::CopySource;
use crate::reaper::Reaper;
use crate::segment::Segment;
use crate::{Error, Result};

pub use self::read::{Extent, Extents};
pub use self::runs::{Growing, Run};

/// Below this, freeing a segment's pages takes no longer than handing it to another thread.
const REAP_BYTES: u64 = 1 << 20;
/// Segments that may wait to be freed. Beyond that the receiver frees them itself: shared memory cannot fill up.
const REAP_BACKLOG: usize = 8;

/// Keeps the bytes of an inline item valid.
pub type Keeps = Box<dyn Any + Send + Sync>;
/// Finds the mapped arena of a lease.
pub type FindArena = Box<dyn Fn(&LeaseHandle) -> Option<Arc<Map>> + Send + Sync>;
/// Asked during a wait about every 50 ms; true ends the wait.
pub type Interrupted<'a> = &'a (dyn Fn() -> bool + Sync);

/// Where requests open their items. What a process was handed is its own: a child that was forked from it opens nothing.
pub struct Opener {
    shm_dir: PathBuf,
    accept_prefixes: Vec<String>,
    find_arena: Option<FindArena>,
    limit: Duration,
    /// Frees the pages of large segments.
    pub reaper: Reaper,
    process: Process,
}

/// One item of a request, as its handle says.
pub enum Item {
    /// Bytes in the message.
    Inline(Arc<Entry>),
    /// A segment's name, first byte and bytes.
    Segment {
        /// The name, or why it is invalid.
        name: Result<SegmentName>,
        /// First byte.
        offset: u64,
        /// Bytes.
        nbytes: u64,
    },
    /// A lease, or why its handle is invalid.
    Lease {
        /// The handle.
        handle: Result<LeaseHandle>,
        /// Bytes.
        nbytes: u64,
    },
}

/// An item that is open. Dropping a lease releases it, unless copies out of it were queued.
pub struct Entry {
    body: Body,
    nbytes: u64,
}

enum Body {
    Inline {
        bytes: Source<'static>,
        _keeps: Keeps,
    },
    Segment {
        segment: Arc<Segment>,
        offset: u64,
    },
    Lease {
        map: Arc<Map>,
        claim: Claim,
        /// Copies out of it may be queued, or a view of it exists: it is released behind them.
        is_kept: AtomicBool,
    },
}

/// The items of one receive. Thread-safe; meant for one thread at a time.
pub struct Request {
    opener: Arc<Opener>,
    items: Vec<Item>,
    deadline: Option<Instant>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What is open, in the order of the items.
    entries: Vec<Arc<Entry>>,
    /// Segments that are open and not unlinked.
    named: Vec<Arc<Segment>>,
    /// Items that opening came to.
    num_tried: usize,
    /// Items that cannot be opened here.
    missing: Vec<usize>,
    /// Leases that copies read from, and that are not handed on yet.
    begun: Vec<Arc<Entry>>,
}

/// Leases that copies read from. Dropping this does not release them, since a copy may still read them.
pub struct Kept(Vec<Arc<Entry>>);

/// What giving back came to.
#[derive(Debug, Default)]
pub struct GivenBack {
    /// Items that are no longer in shared memory because of this call.
    pub num_items: usize,
    /// Segments whose names were removed.
    pub num_removed: usize,
    /// Leases that were released.
    pub num_released: usize,
    /// What could not be given back, and why.
    pub failures: Vec<(String, Error)>,
}

impl Item {
    /// An item in the message. `bytes` are valid as long as `keeps` exists.
    pub fn inline(bytes: Source<'static>, keeps: Keeps) -> Self {
        let nbytes = bytes.nbytes() as u64;
        Self::Inline(Arc::new(Entry { body: Body::Inline { bytes, _keeps: keeps }, nbytes }))
    }

    /// An item that these four fields of a message name.
    pub fn named(name: &str, offset: u64, nbytes: u64, owner_id: &str) -> Self {
        if LeaseHandle::is_lease_name(name) {
            let handle = LeaseHandle::parse(name, offset, nbytes, owner_id).map_err(Error::from);
            Self::Lease { handle, nbytes }
        } else {
            Self::Segment { name: SegmentName::parse(name), offset, nbytes }
        }
    }

    /// Bytes.
    pub fn nbytes(&self) -> u64 {
        match self {
            Self::Inline(entry) => entry.nbytes,
            Self::Segment { nbytes, .. } | Self::Lease { nbytes, .. } => *nbytes,
        }
    }

    /// The word for its payload in metrics.
    pub const fn path(&self) -> &'static str {
        match self {
            Self::Inline(_) => "inline",
            Self::Segment { .. } => "segment",
            Self::Lease { .. } => "lease",
        }
    }
}

impl Entry {
    /// Bytes.
    pub const fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Whether it is a lease.
    pub const fn is_lease(&self) -> bool {
        matches!(self.body, Body::Lease { .. })
    }

    /// What the copy threads read, and where it begins there. The bytes stay valid as long as this exists (M5).
    pub fn copy_source(&self) -> (CopySource, u64) {
        match &self.body {
            Body::Inline { bytes, .. } => (CopySource::Memory(*bytes), 0),
            Body::Segment { segment, offset } => (CopySource::Segment(Arc::clone(segment)), *offset),
            Body::Lease { map, claim, .. } => (CopySource::Memory(lasting(map, claim)), 0),
        }
    }

    fn lease(&self) -> Option<(&Arc<Map>, &Claim)> {
        match &self.body {
            Body::Lease { map, claim, .. } => Some((map, claim)),
            _ => None,
        }
    }

    /// Keeps a lease from being released by the request; true when this call did.
    fn keep(&self) -> bool {
        match &self.body {
            Body::Lease { is_kept, .. } => !is_kept.swap(true, Ordering::Relaxed),
            _ => false,
        }
    }

    fn is_kept(&self) -> bool {
        matches!(&self.body, Body::Lease { is_kept, .. } if is_kept.load(Ordering::Relaxed))
    }

    fn wait_written(&self, upto: u64, deadline: Option<Instant>, interrupted: Interrupted<'_>) -> Result<u64> {
        let Some((map, claim)) = self.lease() else { return Ok(self.nbytes) };
        match map.written(claim) {
            Ok(there) if there >= upto => Ok(there),
            _ => map.wait_written(claim, upto, left(deadline), interrupted),
        }
    }

    fn release(&self, given_back: &mut GivenBack) {
        let Some((map, claim)) = self.lease() else { return };
        match map.release(claim) {
            Ok(is_first) => given_back.num_released += usize::from(is_first),
            Err(error) => given_back.failures.push((format!("lease {}", claim.handle().name()), error)),
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if !self.is_kept()
            && let Some((map, claim)) = self.lease()
        {
            // There is no caller left to report an error to.
            let _ = map.release(claim);
        }
    }
}

impl Request {
    /// A request with nothing open yet.
    pub fn new(opener: &Arc<Opener>, items: Vec<Item>) -> Self {
        let deadline = Instant::now().checked_add(opener.limit);
        Self { opener: Arc::clone(opener), items, deadline, state: Mutex::default() }
    }

    /// Its items.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// What is open, in the order of the items.
    pub fn entries(&self) -> Vec<Arc<Entry>> {
        self.lock().entries.clone()
    }

    /// A request of these alone. They stay this one's to close.
    pub fn select(&self, entries: Vec<Arc<Entry>>) -> Self {
        let state = State { entries, ..State::default() };
        Self { opener: Arc::clone(&self.opener), items: Vec::new(), deadline: self.deadline, state: Mutex::new(state) }
    }

    /// The arenas of the leases that are open, each once.
    pub fn arenas(&self) -> Vec<Arc<Map>> {
        let mut arenas: Vec<Arc<Map>> = Vec::new();
        for (map, _) in self.lock().entries.iter().filter_map(|entry| entry.lease()) {
            if !arenas.iter().any(|other| Arc::ptr_eq(other, map)) {
                arenas.push(Arc::clone(map));
            }
        }
        arenas
    }

    /// The indices of the open leases of these arenas; None: of all.
    pub fn leases_in(&self, arenas: Option<&[Arc<Map>]>) -> Vec<usize> {
        let is_wanted = |entry: &Arc<Entry>| {
            entry
                .lease()
                .is_some_and(|(map, _)| arenas.is_none_or(|all| all.iter().any(|arena| Arc::ptr_eq(arena, map))))
        };
        self.lock().entries.iter().enumerate().filter(|(_, entry)| is_wanted(entry)).map(|(index, _)| index).collect()
    }

    /// Blocks until the senders of these open items have written them.
    pub fn wait_written(&self, entries: &[Arc<Entry>], interrupted: Interrupted<'_>) -> Result<()> {
        entries.iter().try_for_each(|entry| entry.wait_written(entry.nbytes, self.deadline, interrupted).map(drop))
    }

    /// Whether all bytes of these extents are there: none waits for a sender. An error of a sender is found by reading.
    pub fn is_written(&self, extents: &Extents) -> bool {
        let state = self.lock();
        extents.iter().all(|extent| match state.entries.get(extent.source).and_then(|entry| entry.lease()) {
            None => true,
            Some((map, claim)) => map.written(claim).is_ok_and(|there| there >= claim.nbytes()),
        })
    }

    /// An open lease for a reader who keeps it for longer than the request. Blocks until its sender has written it.
    pub fn take_lease(&self, index: usize, interrupted: Interrupted<'_>) -> Result<(Arc<Map>, Claim)> {
        let entry = self.entry(index)?;
        entry.wait_written(entry.nbytes, self.deadline, interrupted)?;
        let (map, claim) = entry.lease().ok_or_else(|| not_a_lease(index))?;
        entry.keep();
        Ok((Arc::clone(map), *claim))
    }

    /// The flags behind which the leases are over that copies have begun to read, in the order of the copies.
    pub fn flags(&self) -> Vec<Flag> {
        let state = self.lock();
        state.begun.iter().filter_map(|entry| entry.lease()).map(|(map, claim)| map.release_flag(claim)).collect()
    }

    /// Another party has taken on to write the first `count` of the flags.
    pub fn flags_written(&self, count: usize) -> Result<()> {
        let mut state = self.lock();
        let count = count.min(state.begun.len());
        for entry in state.begun.drain(..count) {
            if let Some((map, claim)) = entry.lease() {
                map.defer_release(claim)?;
            }
        }
        Ok(())
    }

    /// The leases whose flags no stream writes: to be released when the copies have ended.
    pub fn keep(&self) -> Kept {
        Kept(std::mem::take(&mut self.lock().begun))
    }

    /// Whether a segment still has its name.
    pub fn has_names(&self) -> bool {
        !self.lock().named.is_empty()
    }

    /// Bytes of the segments that are open.
    pub fn file_nbytes(&self) -> u64 {
        self.lock().entries.iter().map(|entry| entry.file_nbytes()).sum()
    }

    /// Removes the names of the segments, once; what is open stays readable.
    pub fn unlink(&self) -> GivenBack {
        let named = std::mem::take(&mut self.lock().named);
        let mut given_back = GivenBack::default();
        named.iter().for_each(|segment| given_back.unlink(segment));
        given_back
    }

    /// Unlinks what still has a name, releases the leases and closes the segments; with `release_rest` also gives back
    /// the items that are not open. Leases that copies read stay, and are released behind those. The pages of large
    /// segments are freed by another thread.
    pub fn close(&self, release_rest: bool) -> GivenBack {
        let mut given_back = self.unlink();
        let (entries, num_tried, missing) = {
            let mut state = self.lock();
            (std::mem::take(&mut state.entries), state.num_tried, std::mem::take(&mut state.missing))
        };
        for entry in entries.iter().filter(|entry| !entry.is_kept()) {
            entry.release(&mut given_back);
        }
        let segments: Vec<_> = entries.iter().filter_map(|entry| entry.segment()).cloned().collect();
        let is_large = segments.iter().map(|segment| segment.file_nbytes()).sum::<u64>() >= REAP_BYTES;
        drop(entries);
        // What is left to open needs descriptors: then they are closed here.
        if is_large && !release_rest && self.opener.reaper.pending() <= REAP_BACKLOG {
            self.opener.reaper.close_later(segments);
        } else {
            drop(segments);
        }
        if release_rest {
            let is_left = |index: &usize| *index >= num_tried || missing.contains(index);
            for item in (0..self.items.len()).filter(is_left).map(|index| &self.items[index]) {
                self.opener.release(item, &mut given_back);
            }
        }
        given_back
    }

    fn entry(&self, index: usize) -> Result<Arc<Entry>> {
        let state = self.lock();
        let count = state.entries.len();
        state.entries.get(index).cloned().ok_or_else(|| no_such(index, count))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn segment(&self) -> Option<&Arc<Segment>> {
        match &self.body {
            Body::Segment { segment, .. } => Some(segment),
            _ => None,
        }
    }

    fn file_nbytes(&self) -> u64 {
        self.segment().map_or(0, |segment| segment.file_nbytes())
    }
}

impl Kept {
    /// How many.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Releases them: no copy reads them any more.
    pub fn release(&self) -> GivenBack {
        let mut given_back = GivenBack::default();
        self.0.iter().for_each(|entry| entry.release(&mut given_back));
        given_back
    }
}

impl GivenBack {
    fn unlink(&mut self, segment: &Segment) {
        match segment.unlink() {
            Ok(is_first) => self.num_removed += usize::from(is_first),
            Err(error) => self.failures.push((format!("segment {:?}", segment.name().as_str()), error)),
        }
    }
}

#[allow(unsafe_code)]
fn lasting(map: &Map, claim: &Claim) -> Source<'static> {
    // SAFETY: M5. The mapping lives as long as the entry, which those who copy keep until their copy is over.
    unsafe { map.source(claim).lasting() }
}

fn left(deadline: Option<Instant>) -> Duration {
    deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
}

fn no_such(index: usize, count: usize) -> Error {
    Error::NoSuch { piece: index, chunk: 0, kind: "item", index: index as u64, count }
}

fn not_a_lease(index: usize) -> Error {
    Error::NotALease { index }
}

#[cfg(all(test, not(loom)))]
mod tests;
