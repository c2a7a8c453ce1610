//! Opening the items of a request: segments by name, leases by claiming them.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::{Body, Entry, FindArena, GivenBack, Item, Opener, Request, State};
use crate::arena::{ArenaError, LeaseHandle, Map};
use crate::fork::Process;
use crate::name::SegmentName;
use crate::reaper::Reaper;
use crate::segment::Segment;
use crate::{Error, Result};

impl Opener {
    /// Segments are in `shm_dir`; only those whose names begin with one of `accept_prefixes` are opened, and so unlinked: a
    /// handle is a peer's word, and other programs keep files in the same directory. `find_arena` finds the arenas that
    /// are mapped here; None where there can be none. A request waits for senders that are still writing up to `limit`.
    pub fn new(shm_dir: PathBuf, accept_prefixes: Vec<String>, find_arena: Option<FindArena>, limit: Duration) -> Self {
        Self { shm_dir, accept_prefixes, find_arena, limit, reaper: Reaper::new(), process: Process::current() }
    }

    /// An error in a forked child.
    pub fn check_process(&self) -> Result<()> {
        if self.process.is_current() { Ok(()) } else { Err(Error::Closed { what: "the parent's receiver".to_owned() }) }
    }

    /// Opens a segment whose name is accepted.
    fn open_segment(&self, name: &Result<SegmentName>) -> Result<Segment> {
        self.check_process()?;
        let name = name.as_ref().map_err(Clone::clone)?;
        if !self.accept_prefixes.iter().any(|prefix| name.as_str().starts_with(prefix)) {
            return Err(Error::NotAccepted { name: name.to_string(), prefixes: self.accept_prefixes.join(", ") });
        }
        Segment::open(&self.shm_dir, name)
    }

    fn arena_of(&self, handle: &LeaseHandle) -> Result<Arc<Map>> {
        let unknown = |why| ArenaError::UnknownArena { name: handle.name(), why };
        let find = self.find_arena.as_ref().ok_or_else(|| unknown("this receiver has no endpoint"))?;
        Ok(find(handle).ok_or_else(|| unknown("no sender that is connected has it"))?)
    }

    /// Unlinks the segment, or releases the lease, of an item that is not open. What cannot be opened is left alone.
    pub fn release(&self, item: &Item, given_back: &mut GivenBack) {
        match item {
            Item::Inline(_) => {}
            Item::Segment { name, .. } => {
                if let Ok(segment) = self.open_segment(name) {
                    given_back.unlink(&segment);
                    given_back.num_items += 1;
                }
            }
            Item::Lease { handle, .. } => {
                if let Ok(handle) = handle
                    && let Ok(map) = self.arena_of(handle)
                    && let Ok(claim) = map.claim(handle)
                    && let Ok(true) = map.release(&claim)
                {
                    given_back.num_released += 1;
                    given_back.num_items += 1;
                }
            }
        }
    }
}

/// What opening remembers from item to item.
#[derive(Default)]
struct Seen {
    names: HashSet<SegmentName>,
    arenas: Vec<Arc<Map>>,
}

impl Request {
    /// Opens every item: all segments exist and are long enough, all leases are claimed. Does not block for senders. The
    /// error is that of the first item that cannot be opened.
    pub fn open_all(&self) -> Result<()> {
        let mut state = self.lock();
        let mut seen = Seen::default();
        state.entries.reserve(self.items.len());
        for (index, item) in self.items.iter().enumerate() {
            self.open(item, &mut state, &mut seen)?;
            state.num_tried = index + 1;
        }
        Ok(())
    }

    /// Opens what can be opened here: the index and the error of each item whose segment is not here or may not be
    /// opened, whose arena is not mapped here, or whose lease is not for this consumer. Any other error ends it. Unlinks
    /// nothing, not on an error either: other ranks may still want to open it.
    pub fn open_reachable(&self) -> Result<Vec<(usize, Error)>> {
        let mut state = self.lock();
        let mut seen = Seen::default();
        let mut missing = Vec::new();
        for (index, item) in self.items.iter().enumerate() {
            match self.open(item, &mut state, &mut seen) {
                Ok(()) => {}
                Err(error) if is_out_of_reach(&error) => {
                    state.missing.push(index);
                    missing.push((index, error));
                }
                Err(error) => return Err(error),
            }
            state.num_tried = index + 1;
        }
        Ok(missing)
    }

    /// Takes over segments that are open already, one for each item that is not inline; the indices of those for which
    /// there is none.
    pub fn open_attached(&self, segments: Vec<Option<Arc<Segment>>>) -> Vec<usize> {
        let mut state = self.lock();
        let mut missing = Vec::new();
        for (index, (item, segment)) in self.items.iter().zip(segments).enumerate() {
            match (item, segment) {
                (Item::Inline(entry), _) => state.entries.push(Arc::clone(entry)),
                (Item::Segment { offset, nbytes, .. }, Some(segment)) => state.add(segment, *offset, *nbytes),
                _ => missing.push(index),
            }
            state.num_tried = index + 1;
        }
        state.missing.clone_from(&missing);
        missing
    }

    fn open(&self, item: &Item, state: &mut State, seen: &mut Seen) -> Result<()> {
        match item {
            Item::Inline(entry) => state.entries.push(Arc::clone(entry)),
            Item::Lease { handle, nbytes } => {
                let handle = handle.as_ref().map_err(Clone::clone)?;
                let known = seen.arenas.iter().find(|map| map.instance() == handle.instance());
                let (map, claim) = match known.map(|map| map.claim(handle).map(|claim| (Arc::clone(map), claim))) {
                    Some(Ok(claimed)) => claimed,
                    // Its arena was not looked up yet, or the lease is for another consumer that we are, too.
                    None | Some(Err(Error::Arena(ArenaError::Forged { .. }))) => {
                        let map = self.opener.arena_of(handle)?;
                        let claim = map.claim(handle)?;
                        seen.arenas.push(Arc::clone(&map));
                        (map, claim)
                    }
                    Some(Err(error)) => return Err(error),
                };
                let body = Body::Lease { map, claim, is_kept: AtomicBool::new(false) };
                state.entries.push(Arc::new(Entry { body, nbytes: *nbytes }));
            }
            Item::Segment { name, offset, nbytes } => {
                let segment = self.opener.open_segment(name)?;
                if self.items.len() > 1 && !seen.names.insert(segment.name().clone()) {
                    return Err(Error::NamedTwice { name: segment.name().to_string() });
                }
                let segment = Arc::new(segment);
                // First: one that is too short was handed over as well, and is unlinked.
                state.add(Arc::clone(&segment), *offset, *nbytes);
                segment.check(*offset, *nbytes)?;
            }
        }
        Ok(())
    }
}

impl State {
    fn add(&mut self, segment: Arc<Segment>, offset: u64, nbytes: u64) {
        self.named.push(Arc::clone(&segment));
        self.entries.push(Arc::new(Entry { body: Body::Segment { segment, offset }, nbytes }));
    }
}

const fn is_out_of_reach(error: &Error) -> bool {
    matches!(
        error,
        Error::NotFound { .. }
            | Error::Permission { .. }
            | Error::Arena(ArenaError::UnknownArena { .. } | ArenaError::Forged { .. })
    )
}
