//! The arenas that senders have handed over.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::socket::Deadline;
use crate::arena::{LeaseHandle, Map};

/// All arenas whose senders are connected.
#[derive(Debug)]
pub(super) struct Arenas {
    most: usize,
    most_nbytes: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    maps: Vec<Arc<Map>>,
    accepted: u64,
}

impl State {
    /// Bytes of all arenas, each counted once.
    fn nbytes(&self) -> u64 {
        let is_first = |&(at, map): &(usize, &Arc<Map>)| !self.maps[..at].iter().any(|other| other.is_same_memory(map));
        self.maps.iter().enumerate().filter(is_first).map(|(_, map)| map.data_span().1 as u64).sum()
    }
}

impl Arenas {
    pub(super) fn new(most: usize, most_nbytes: u64) -> Self {
        Self { most, most_nbytes, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Takes a new one. An error, in words, when there are too many or too many bytes, or when its number is that of
    /// other memory: the first that came under a number keeps it as long as its sender is connected.
    pub(super) fn add(&self, map: &Arc<Map>) -> Result<(), String> {
        let mut state = self.lock();
        if state.maps.len() >= self.most {
            return Err(format!("{} arenas are mapped already", state.maps.len()));
        }
        let known = state.maps.iter().find(|known| known.instance() == map.instance());
        if known.is_some_and(|known| !known.is_same_memory(map)) {
            return Err(format!("the number {:016x} is that of another arena, which is mapped here", map.instance()));
        }
        let (mapped_nbytes, nbytes) = (state.nbytes(), map.data_span().1 as u64);
        if known.is_none() && nbytes > self.most_nbytes.saturating_sub(mapped_nbytes) {
            let most_nbytes = self.most_nbytes;
            return Err(format!("{nbytes} bytes more than the {mapped_nbytes} that are mapped, at most {most_nbytes}"));
        }
        state.maps.push(Arc::clone(map));
        state.accepted += 1;
        self.changed.notify_all();
        Ok(())
    }

    /// Its sender has gone. Each user that is left keeps it mapped.
    pub(super) fn remove(&self, map: &Arc<Map>) {
        map.owner_has_gone();
        self.lock().maps.retain(|other| !Arc::ptr_eq(other, map));
        self.changed.notify_all();
    }

    /// All of them, the newest last.
    pub(super) fn all(&self) -> Vec<Arc<Map>> {
        self.lock().maps.clone()
    }

    /// That of this random number, the newest. A worker that its sender knows by two addresses has it twice, each time as
    /// another consumer, and so has one whose sender came back before its old connection was seen to end.
    pub(super) fn find(&self, instance: u64) -> Option<Arc<Map>> {
        self.lock().maps.iter().rev().find(|map| map.instance() == instance).map(Arc::clone)
    }

    /// That of a lease: of several the one as which it is for us, else the newest.
    pub(super) fn find_for(&self, handle: &LeaseHandle) -> Option<Arc<Map>> {
        let state = self.lock();
        let mut found = state.maps.iter().rev().filter(|map| map.instance() == handle.instance());
        let newest = found.next()?;
        if newest.is_for_us(handle) {
            return Some(Arc::clone(newest));
        }
        Some(Arc::clone(found.find(|map| map.is_for_us(handle)).unwrap_or(newest)))
    }

    /// Blocks until more than `seen` were accepted; how many were.
    pub(super) fn wait(&self, seen: u64, limit: Duration) -> u64 {
        let deadline = Deadline::after(limit);
        let mut state = self.lock();
        while state.accepted <= seen && !deadline.left().is_zero() {
            state = self.changed.wait_timeout(state, deadline.left()).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.accepted
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
